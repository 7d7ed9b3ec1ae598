// The expressions that llama.cpp splits texts with (patch 0010): unicode_regex knows each of them, finds the
// matches of std::regex, and takes steps in proportion to the text, however it is made.
// They are read from llama-vocab.cpp, so that those of a newer llama.cpp are tested too.
#include "unicode-regex.h"
#include "unicode.h"

#include "check.hpp"

#include <fstream>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

using expressions = std::vector<std::string>;

// What llama.cpp splits by hand: these names and borders are nobody else's.
const std::set<std::string> BY_HAND = {"\\p{Han}+", "\\p{AFMoE_digits}", "\\d{1,3}(?=(?:\\d{3})*\\b)"};

// The literal that begins behind source[at], and at behind its end.
std::string literal(const std::string & source, size_t & at) {
    std::string out;
    for (++at; source[at] != '"'; ++at) {
        if (source[at] == '\\') {
            const char c = source[++at];
            CHECK(c == 'r' || c == 'n' || c == '\\' || c == '"');
            out += c == 'r' ? '\r' : c == 'n' ? '\n' : c;
        } else {
            out += source[at];
        }
    }
    ++at;
    return out;
}

// The lists of all pre-tokenizers.
std::set<expressions> lists_of_the_tree() {
    std::ifstream file(EAGLE3_LLAMA_CPP_TREE "/src/llama-vocab.cpp");
    std::stringstream text;
    text << file.rdbuf();
    const std::string source = text.str(), begin = "regex_exprs = {";
    std::set<expressions> out;
    for (size_t at = source.find(begin); at != std::string::npos; at = source.find(begin, at)) {
        expressions list;
        for (at += begin.size(); source[at] != '}'; source[at] == '"' ? (void) 0 : (void) ++at) {
            if (source.compare(at, 2, "//") == 0) {
                at = source.find('\n', at);
            } else if (source[at] == '"') {
                list.push_back(literal(source, at));
            }
        }
        CHECK(!list.empty());
        out.insert(list);
    }
    CHECK(out.size() > 20);
    return out;
}

//
// texts and expressions as unicode_regex_split hands them to std::regex: see there
//

struct category {
    std::string name;
    uint16_t flag;
    char mark;
    std::string ascii;
};

const std::vector<category> CATEGORIES = {
    {"\\p{N}", unicode_cpt_flags::NUMBER, '\xD1', "0-9"},
    {"\\p{L}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{Lu}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{Ll}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{Lt}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{Lm}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{Lo}", unicode_cpt_flags::LETTER, '\xD2', "A-Za-z"},
    {"\\p{P}", unicode_cpt_flags::PUNCTUATION, '\xD3', "!-#%-*,-/:-;?-@\\[-\\]_\\{\\}"},
    {"\\p{M}", unicode_cpt_flags::ACCENT_MARK, '\xD4', ""},
    {"\\p{S}", unicode_cpt_flags::SYMBOL, '\xD5', "\\$\\+<->^`\\|\\~"},
};

std::string collapsed(const std::string & expr) {
    std::string out;
    bool inside = false;
    for (size_t i = 0; i < expr.size();) {
        const auto found = std::find_if(CATEGORIES.begin(), CATEGORIES.end(),
            [&](const category & c) { return expr.compare(i, c.name.size(), c.name) == 0; });
        if (found != CATEGORIES.end()) {
            out += inside ? found->mark + found->ascii : "[" + (found->mark + found->ascii) + "]";
            i += found->name.size();
            continue;
        }
        if (expr[i] == '\\') {
            out += expr[i++];
        } else if (expr[i] == '[' || expr[i] == ']') {
            inside = expr[i] == '[';
        }
        out += expr[i++];
    }
    return out;
}

std::string collapsed(const std::u32string & text) {
    std::string out;
    for (const char32_t c : text) {
        const auto flags = unicode_cpt_flags_from_cpt(c);
        char mark        = '\xD0';
        for (const category & known : CATEGORIES) {
            mark = flags.category_flag() == known.flag ? known.mark : mark;
        }
        out += c < 128 ? (char) c : flags.is_whitespace ? '\x0B' : mark;
    }
    return out;
}

std::wstring wide(const std::u32string & text) {
    std::wstring out(text.begin(), text.end());
    for (wchar_t & c : out) {
        c = c > 0x7F && unicode_cpt_flags_from_cpt(c).is_whitespace ? 0x0B : c;
    }
    return out;
}

std::u32string code_points(const std::string & utf8) {
    const auto found = unicode_cpts_from_utf8(utf8);
    return {found.begin(), found.end()};
}

std::string utf8_of(const std::u32string & text) {
    std::string out;
    for (const char32_t c : text) {
        out += unicode_cpt_to_utf8(c);
    }
    return out;
}

//
// texts of every script
//

const std::vector<std::string> WORDS = {"a", "z", "E", "LL", "straße", "Ünder", "МИР", "мир", "كتاب", "شَكْل",
    "שלום", "हिन्दी", "ไทย", "中文", "漢", "ひらがな", "カタカナ", "한국", "ㄅ", "ΑΒγ", "ǅ", "ʰ", "ა",
    "e\u0301", "\u0301\u0301", "\u200D", "👩‍👩‍👧", "🙂", "🇩🇪", "0", "12", "345", "1234567", "٣",
    "५", "Ⅷ", "½", "'s", "'S", "'ll", "'RE", "'", "’", "\"", "!", "?!", ".", "...", ",", "-", "--", "—", "_",
    "/", "//", "\\", "(", ")", "[", "]", "{", "}", "<", ">", "=", "+", "^", "~", "`", "|", "$", "€", "#", "@",
    "%", "&", "*", ":", ";", "。", "、", "！", "…", "“", "\n", "\n\n", "\r\n", "\r", "\t", " ", "  ", "   ",
    "\u00A0", "\u3000", "\u2028", "\u0085", "\v", "\f", std::string(1, '\0'), "\x01", "\x7F", "\uFFFD",
    "\uE000", "\U0010FFFF", "\U00010400", "\U000118A0", "for (int i = 0;", "x_1 = y2;", "don't", "I'M"};

std::u32string random_text(std::mt19937 & rng) {
    std::u32string out;
    // of few different words, or of all, with some of them in runs
    const size_t n_words = 1 + rng() % 12, n_kinds = 1 + rng() % (rng() % 2 ? 4 : WORDS.size());
    const size_t first = rng() % WORDS.size();
    for (size_t i = 0; i < n_words; ++i) {
        const std::u32string word = code_points(WORDS[(first + rng() % n_kinds) % WORDS.size()]);
        for (size_t k = rng() % 4 ? 1 : 1 + rng() % 9; k > 0; --k) {
            out += word;
        }
    }
    return out;
}

//
// tests
//

using matches = std::vector<std::pair<size_t, size_t>>;

template <typename CharT> struct tried {
    std::basic_string<CharT> expr;
    unicode_regex<CharT> ours{expr};
    std::basic_regex<CharT> theirs{expr, std::regex_constants::optimize | std::regex_constants::nosubs};

    void compare(const std::basic_string<CharT> & text, size_t begin, size_t end) {
        matches found, expected;
        ours.for_each_match(text, begin, end, [&](size_t a, size_t b) { found.emplace_back(a, b); });
        using iterator = std::regex_iterator<typename std::basic_string<CharT>::const_iterator>;
        for (iterator it(text.begin() + begin, text.begin() + end, theirs); it != iterator(); ++it) {
            const size_t first = begin + it->position();
            expected.emplace_back(first, first + it->length());
        }
        CHECK(found == expected);
    }
    size_t n_steps(const std::basic_string<CharT> & text) {
        unicode_regex<CharT> fresh(expr);
        size_t reached = 0;
        fresh.for_each_match(text, 0, text.size(), [&](size_t, size_t last) { reached = last; });
        CHECK(reached <= text.size());
        return fresh.n_steps;
    }
};

// calls f(tried, a function that makes its text of code points)
template <typename F> void with(const std::string & expr, F && f) {
    if (expr.find("\\p{") != std::string::npos) {
        tried<char> t{collapsed(expr)};
        f(t, [](const std::u32string & text) { return collapsed(text); });
    } else {
        const std::u32string points = code_points(expr);
        tried<wchar_t> t{std::wstring(points.begin(), points.end())};
        f(t, [](const std::u32string & text) { return wide(text); });
    }
}

void test_matches(const std::string & expr, int seed, int n) {
    with(expr, [&](auto & t, auto && text_of) {
        if (!t.ours.is_known()) {
            fprintf(stderr, "unicode_regex does not know %s\n", expr.c_str());
        }
        CHECK(t.ours.is_known());
        std::mt19937 rng(seed);
        for (int i = 0; i < n; ++i) {
            const auto text = text_of(random_text(rng));
            t.compare(text, 0, text.size());
            const size_t begin = rng() % (text.size() + 1);  // a piece that an expression before it made
            t.compare(text, begin, begin + rng() % (text.size() - begin + 1));
        }
    });
}

std::u32string repeated(const std::u32string & unit, size_t n) {
    std::u32string out;
    while (out.size() < n) {
        out += unit;
    }
    return out.substr(0, n);
}

// Runs of one word, runs that end in another one, and random mixtures that repeat.
std::vector<std::u32string> long_texts(size_t n) {
    std::vector<std::u32string> out;
    for (const std::string & word : WORDS) {
        out.push_back(repeated(code_points(word), n));
        out.push_back(out.back() + U"x");
    }
    out.push_back(repeated(U" ", n) + U"\n");
    out.push_back(repeated(U" ", n) + U"1");
    out.push_back(repeated(U"1", n) + U"a");
    std::mt19937 rng(1);
    for (int i = 0; i < 50; ++i) {
        out.push_back(repeated(random_text(rng), n));
    }
    return out;
}

// Twice the text, twice the steps; those at its begin and its end may differ.
void test_steps(const std::string & expr) {
    const size_t n = 3000;
    with(expr, [&](auto & t, auto && text_of) {
        const std::vector<std::u32string> once = long_texts(n), twice = long_texts(2 * n);
        for (size_t i = 0; i < once.size(); ++i) {
            const size_t a = t.n_steps(text_of(once[i])), b = t.n_steps(text_of(twice[i]));
            if (b > 2 * a + a / 10 + 5000) {
                fprintf(stderr, "%s: %zu steps, %zu for twice the text %zu\n", expr.c_str(), a, b, i);
            }
            CHECK(b <= 2 * a + a / 10 + 5000);
        }
    });
}

// One text of each kind of character.
const std::vector<std::string> KINDS = {"a", "E", "aB", "я", "م", "ह\u093F", "中", "한", "7", "٣", " ", "\n",
    " \n", "\t", "!", "-", "。", "'", "'s", "\u0301", "🙂", "€", "\u00A0", "\x01"};

// 200,000 characters of each kind, through all that the library does before the merges: nothing is lost.
void test_long_texts(const expressions & list) {
    for (const std::string & word : KINDS) {
        const std::string text = utf8_of(repeated(code_points(word), 200000));
        std::string all;
        for (const std::string & piece : unicode_regex_split(text, list, false)) {
            all += piece;
        }
        CHECK(all == text);
    }
}

// What it does not know is left to std::regex.
void test_unknown() {
    for (const char * expr : {"a*?", "a++", "(a*)*", "(?:a|)+", ".", "^a", "\\w", "\\bx", "[[:alpha:]]", "(a",
             "a)", "[a", "[]", "[z-a]", "a{", "a{2", "a{2,", "a{2,1}", "a{,2}", "*", "\\", "[\\", "[a-",
             "(?<a>b)", "(?i:a)", "\\p{Han}", "[\\s-a]", "(?=a)*", "$+", "\\1", "a|*", "(?", "[a\\"}) {
        CHECK(!unicode_regex<char>(expr).is_known());
    }
    for (const char * expr :
        {"", "a", "a|b|", "(a)(?:b)", "[^-a]", "[a-]", "a{2}b{0,3}", "(?!a)(?=b)", "x$", "(a|ab)(c|bcd)"}) {
        tried<char> t{expr};
        CHECK(t.ours.is_known());
        for (const char * text : {"", "a", "ab", "aabbb", "b-a", "abcd", "xx", "aab aa", "ba"}) {
            t.compare(text, 0, strlen(text));
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const int seed = argc > 1 ? atoi(argv[1]) : 1, n = argc > 2 ? atoi(argv[2]) : 300;
    test_unknown();
    std::set<std::string> all;
    for (const expressions & list : lists_of_the_tree()) {
        all.insert(list.begin(), list.end());
        test_long_texts(list);
    }
    for (const std::string & expr : all) {
        if (BY_HAND.count(expr) == 0) {
            test_matches(expr, seed, n);
            test_steps(expr);
        }
    }
    puts("ok");
}
