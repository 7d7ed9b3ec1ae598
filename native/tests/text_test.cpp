// Drafts from the slot's own text: the index against a search by hand and against one built anew, its memory;
// sessions with and without a head, whose text is plain decoding's; states; slots that see only their own
// text.
//     text_test TARGET.gguf HEAD.gguf
#include "asks.hpp"
#include "check.hpp"
#include "text_fixture.hpp"
#include "text/text_source.hpp"

#include <random>

using eagle3::suffix_index;

namespace {

std::vector<suffix_index::match> found_in(const suffix_index & index, const tokens & last) {
    std::vector<suffix_index::match> out(suffix_index::N_FOUND);
    out.resize(index.find(last.data(), (int) last.size(), out.data()));
    return out;
}

tokens tail(const suffix_index & index, int32_t next) {
    tokens last(1, next);
    for (int i = index.size() - 1; i >= 0 && (int) last.size() < suffix_index::MAX_MATCH; --i) {
        last.insert(last.begin(), index[i]);
    }
    return last;
}

// The longest match by hand, of those places that find may look at: the last ones of each order.
int longest_by_hand(const suffix_index & index, const tokens & last) {
    int longest = 0;
    for (int next = 1; next < index.size(); ++next) {
        int n = 0;
        while (n < (int) last.size() && n < next && index[next - 1 - n] == last[last.size() - 1 - n]) {
            ++n;
        }
        longest = std::max(longest, n);
    }
    return longest;
}

// A small alphabet makes many matches; few enough texts of this length that visits suffice for the longest.
void test_finds() {
    std::mt19937 rng(1);
    for (const int alphabet : {2, 5, 40}) {
        suffix_index index(300);
        int longer = 0, tries = 0;
        for (int i = 0; i < 300; ++i) {
            const int32_t next = (int32_t) (rng() % alphabet);
            const tokens last  = tail(index, next);
            int longest        = 0;
            for (const suffix_index::match & m : found_in(index, last)) {
                CHECK(m.next > 0 && m.next < index.size() && m.length >= 1);
                for (int k = 0; k < m.length; ++k) {
                    CHECK(index[m.next - 1 - k] == last[last.size() - 1 - k]);
                }
                longest = std::max(longest, (int) m.length);
            }
            const int by_hand = longest_by_hand(index, last);
            CHECK(longest <= by_hand && (longest > 0) == (by_hand > 0));
            CHECK(alphabet < 40 || longest == by_hand);
            longer += longest == by_hand;
            ++tries;
            index.append(next);
        }
        CHECK(longer * 10 >= tries * 9);
    }
}

// Whatever was appended and taken back: it finds what an index of the same text finds.
void test_rewinds() {
    std::mt19937 rng(2);
    suffix_index index(400);
    tokens text;
    for (int i = 0; i < 10000; ++i) {
        const int n = (int) (rng() % 12);
        if (rng() % 2 && text.size() < 380) {
            for (int k = 0; k < n; ++k) {
                text.push_back((int32_t) (rng() % 6));
                index.append(text.back());
            }
        } else {
            text.resize(text.size() - std::min<size_t>(text.size(), rng() % 16));
            index.truncate((int) text.size());
        }
        if (i % 10) {
            continue;
        }
        suffix_index anew(400);
        for (const int32_t t : text) {
            anew.append(t);
        }
        const tokens last = tail(index, (int32_t) (rng() % 6));
        const auto a = found_in(index, last), b = found_in(anew, last);
        CHECK(index.size() == anew.size() && a.size() == b.size());
        for (size_t k = 0; k < a.size(); ++k) {
            CHECK(a[k].next == b[k].next && a[k].length == b[k].length);
        }
    }
}

// A million tokens through one structure, in texts that fill it.
void test_memory() {
    constexpr int CAPACITY = 1 << 14;
    suffix_index index(CAPACITY);
    CHECK(index.n_bytes() == 0);
    std::mt19937 rng(3);
    for (int i = 0; i < 1000000; ++i) {
        if (index.size() == CAPACITY) {
            index.truncate((int) (rng() % CAPACITY));
        }
        index.append((int32_t) (rng() % 1000));
    }
    CHECK((double) index.n_bytes() <=
          CAPACITY * (1.5 * suffix_index::BYTES_A_TOKEN + suffix_index::BYTES_A_PLACE));
}

// -- sessions ---------------------------------------------------------------------------------------------

const tokens PROMPT = {5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 12, 5, 6, 7};

// With and without a head the text is plain decoding's; without `text` only the head drafts.
void test_same_text(const fixture & f) {
    for (eagle3_head * head : {(eagle3_head *) nullptr, f.head}) {
        eagle3_session * s  = open(f, head, cheap_rows());
        const result plain  = generate(s, f, 0, PROMPT, 150, EAGLE3_PLAIN, 0);
        const result text   = generate(s, f, 0, PROMPT, 150, EAGLE3_PLANNED, 1);
        const result silent = generate(s, f, 1, PROMPT, 150, EAGLE3_PLANNED, 0);
        CHECK(plain.text == text.text && plain.text == silent.text);
        CHECK(plain.of_text == 0 && silent.of_text == 0 && text.of_text > 0);
        CHECK((silent.of_head > 0) == (head != nullptr) && (head || text.of_head == 0));
        // a text that repeats itself is foreseen
        tokens twice = plain.text;
        twice.insert(twice.begin(), PROMPT.begin(), PROMPT.end());
        twice.resize(110);
        twice.insert(twice.end(), PROMPT.begin(), PROMPT.end());
        const result again = generate(s, f, 0, twice, 100, EAGLE3_PLANNED, 1);
        CHECK(again.text == generate(s, f, 0, twice, 100, EAGLE3_PLAIN, 0).text);
        eagle3_session_close(s);
    }
}

// Rows so dear that nothing pays: the text is offered, and declined.
void test_dear_rows(const fixture & f) {
    eagle3_costs dear = cheap_rows();
    for (int n = 1; n <= EAGLE3_MAX_ROWS; ++n) {
        dear.layers[n] = 1e-3f * (float) (n * n);
    }
    eagle3_session * s = open(f, nullptr, dear);
    const result text  = generate(s, f, 0, PROMPT, 120, EAGLE3_PLANNED, 1);
    CHECK(text.text == generate(s, f, 0, PROMPT, 120, EAGLE3_PLAIN, 0).text);
    CHECK(text.of_text <= text.rounds / 2);
    eagle3_session_close(s);
}

void test_matches(const fixture & f) {
    eagle3_session * s = open(f, nullptr, cheap_rows());
    CHECK(eagle3_text_match(s, 0, 5) == 0);  // nothing is there yet
    CHECK(eagle3_prefill(s, 0, PROMPT.data(), (int) PROMPT.size(), 0) == 0);
    CHECK(eagle3_text_match(s, 0, 8) == 4);  // 5 6 7 8
    CHECK(eagle3_text_match(s, 0, 100) == 0);
    CHECK(eagle3_text_match(s, 1, 8) == 0);  // another slot's text
    CHECK(
        eagle3_text_match(s, 2, 8) == EAGLE3_E_ARGUMENT && eagle3_text_match(s, 0, -1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_rewind(s, 0, 4) == 0 && eagle3_text_match(s, 0, 5) == 1 && eagle3_text_match(s, 0, 8) == 0);
    CHECK(eagle3_state_reset(s, 0, 2) == 0 && eagle3_text_match(s, 0, 5) == 0);  // of tokens never seen
    eagle3_session_close(s);
}

// With and without a head, drafts end where the text does: at the levels that are asked for, and at a token
// that ends generation.
void test_ends(const fixture & f) {
    const int32_t end = llama_vocab_eos(llama_model_get_vocab(f.model));
    CHECK(llama_vocab_is_eog(llama_model_get_vocab(f.model), end));
    tokens prompt;
    for (int i = 0; i < 4; ++i) {
        prompt.insert(prompt.end(), {5, 6, 7, 8, 9, end, 10, 11});
    }
    prompt.insert(prompt.end(), {5, 6});
    for (eagle3_head * head : {(eagle3_head *) nullptr, f.head}) {
        for (const int depth : {0, 1, 2, 9}) {
            eagle3_session * s = open(f, head, cheap_rows());
            int longest        = 0;
            for (int round = 0; round < 6; ++round) {  // some of the first look at plain rounds
                CHECK(eagle3_rewind(s, 0, 0) == 0);
                CHECK(eagle3_prefill(s, 0, prompt.data(), (int) prompt.size(), 0) == 0);
                eagle3_ask a = ask_for(0, 7, EAGLE3_PLANNED, EAGLE3_MAX_DRAFT, depth, 4);
                a.text       = 1;
                int32_t ids[EAGLE3_MAX_DRAFT], parents[EAGLE3_MAX_DRAFT];
                const int n = draft(s, a, ids, parents);
                CHECK(n >= 0);
                std::vector<int> level(n);
                for (int i = 0; i < n; ++i) {
                    CHECK(parents[i] < 0 || ids[parents[i]] != end);
                    level[i] = parents[i] < 0 ? 1 : level[parents[i]] + 1;
                    longest  = std::max(longest, level[i]);
                }
                CHECK(eagle3_round_decode(s) == 0 && commit(s, 1) == 0);
            }
            // behind 5 6 7 the text has 8 9 and the end
            CHECK(depth && depth < 3 ? longest == depth : head ? longest >= 3 : longest == 3);
            eagle3_session_close(s);
        }
        eagle3_session * s = open(f, head, cheap_rows());
        eagle3_ask a       = ask_for(0, 7, EAGLE3_PLANNED, EAGLE3_MAX_DRAFT, -1, 4);
        CHECK(draft(s, a) == EAGLE3_E_ARGUMENT);
        eagle3_session_close(s);
    }
}

// A state carries the text, with a head and without; what was saved before there was a text is read. Another
// model's is refused, and a text that has tokens outside the vocabulary.
void test_states(const fixture & f) {
    for (eagle3_head * head : {(eagle3_head *) nullptr, f.head}) {
        eagle3_session * s = open(f, head, cheap_rows());
        CHECK(eagle3_prefill(s, 0, PROMPT.data(), (int) PROMPT.size(), 0) == 0);
        std::vector<uint8_t> state(eagle3_state_size(s, 0));
        CHECK(eagle3_state_get(s, 0, state.data(), (int64_t) state.size()) == (int64_t) state.size());
        CHECK(eagle3_state_set(s, 1, state.data(), (int64_t) state.size()) == 0);
        CHECK(eagle3_n_past(s, 1) == (int) PROMPT.size() && eagle3_text_match(s, 1, 8) == 4);
        const int64_t of_text = 24 + 4 * (int64_t) PROMPT.size();
        for (const int64_t cut : {int64_t(1), of_text - 1, (int64_t) state.size() - 1}) {
            CHECK(eagle3_state_set(s, 1, state.data(), (int64_t) state.size() - cut) == EAGLE3_E_FORMAT);
        }
        // the model, the number of tokens, a token: too large, below 0
        for (const auto & [at, byte] : {std::pair(8, 0x55), {21, 0x7f}, {24 + 2, 0x7f}, {24 + 3, 0xff}}) {
            std::vector<uint8_t> damaged = state;
            damaged[state.size() - of_text + at] ^= (uint8_t) byte;
            CHECK(eagle3_state_set(s, 1, damaged.data(), (int64_t) damaged.size()) == EAGLE3_E_FORMAT);
            CHECK(at != 8 || strstr(eagle3_last_error(), "another model"));
        }
        CHECK(eagle3_text_match(s, 1, 8) == 4);
        if (head) {
            CHECK(eagle3_state_set(s, 1, state.data(), (int64_t) state.size() - of_text) == 0);
            CHECK(eagle3_n_past(s, 1) == (int) PROMPT.size() && eagle3_text_match(s, 1, 8) == 0);
        }
        eagle3_session_close(s);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    test_finds();
    test_rewinds();
    test_memory();
    fixture f(argv[1], argv[2]);
    test_ends(f);
    test_matches(f);
    test_states(f);
    test_same_text(f);
    test_dear_rows(f);
    puts("ok");
    return 0;
}
