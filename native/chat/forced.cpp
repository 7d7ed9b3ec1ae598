// Calls that cannot be left out. llama.cpp's own grammar for tool_choice `required` lets the model write any
// text before the call, and end there. Among its rules are those that a lazy grammar would begin with: they
// are the calls alone. A grammar that begins with them, behind thoughts at most, enforces the call. So does
// one that begins with the rules of a schema.

#include "chat.hpp"
#include "json-schema-to-grammar.h"

#include <map>
#include <sstream>

namespace {

std::string trimmed(const std::string & text) {
    const auto first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool contains(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

// The rules of a parser's calls: their text, and the names of those that calls begin with.
struct call_rules {
    std::string text;
    std::map<std::string, std::string> rules;
    std::vector<std::string> first;

    // The rules of `first` that no other of them is made of. One that repeats another is for several calls.
    std::string outermost(bool parallel) const {
        std::string out;
        for (const auto & name : first) {
            bool inner = false;
            for (const auto & other : first) {
                const auto & rule = rules.at(other);
                const bool repeats = rule == "(" + name + " space)+";
                inner = inner || (other != name && contains(" " + rule + " ", name) && (parallel || !repeats));
                inner = inner || (!parallel && rules.at(name) == "(" + other + " space)+");
            }
            out += inner ? "" : (out.empty() ? "" : " | ") + name;
        }
        return out;
    }
};

call_rules rules_of_calls(const common_peg_arena & arena) {
    call_rules out;
    common_grammar_builder builder;
    builder.add_schema = [](const std::string & name, const common_chat_schema &) { return name; };
    builder.add_rule = [&](const std::string & name, const std::string & rule) {
        if (name != "root") {
            out.text += rule + "\n";
            out.rules[name] = rule;
            return name;
        }
        std::istringstream words(rule);
        for (std::string word; words >> word;) {
            if (word != "|") {
                out.first.push_back(word);
            }
        }
        return name;
    };
    arena.build_grammar(builder, true);
    return out;
}

// Where the model is in its thoughts when the prompt ends.
enum class thoughts { none, possible, begun };

thoughts thoughts_at(const common_chat_params & p, const std::string & start, bool thinking) {
    if (start.empty() || p.thinking_end_tags.empty()) {
        return thoughts::none;
    }
    const auto at = p.generation_prompt.rfind(start);
    if (at == std::string::npos) {
        return thinking ? thoughts::possible : thoughts::none;
    }
    for (const auto & end : p.thinking_end_tags) {
        if (p.generation_prompt.find(trimmed(end), at + start.size()) != std::string::npos) {
            return thoughts::none;  // the prompt has ended them
        }
    }
    return thoughts::begun;
}

// The rules of thoughts and of what stands between them and a call. Names that begin with forced- are ours.
std::string rules_of_thoughts(const common_chat_params & p, const std::string & calls, const std::string & start) {
    std::string out, ends;
    const auto until = build_peg_parser([&](common_peg_parser_builder & b) {
        return b.rule("thought", b.until_one_of(p.thinking_end_tags));
    });
    common_grammar_builder builder;
    builder.add_rule = [&](const std::string & name, const std::string & rule) {
        std::string renamed = rule;  // the parser of calls has rules of the same names
        for (size_t at = 0; (at = renamed.find("until-", at)) != std::string::npos; at += 13) {
            renamed.insert(at, "forced-");
        }
        if (name != "root") {
            out += "forced-" + name + " ::= " + renamed + "\n";
        }
        return name;
    };
    until.build_grammar(builder);
    for (const auto & end : p.thinking_end_tags) {
        const auto literal = gbnf_format_literal(end);
        // a call's own beginning ends thoughts too, and is written once
        if (!contains(calls, literal.substr(0, literal.size() - 1))) {
            ends += (ends.empty() ? "" : " | ") + literal;
        }
    }
    std::string gap = "[ \\t\\n]{0,4}";
    if (contains(start, "<|channel|>analysis")) {  // gpt-oss: the next message begins as the prompt ended
        gap = gbnf_format_literal(p.generation_prompt);
    } else if (contains(start, "<|START_THINKING|>")) {  // Cohere: one mark follows the other
        gap = "\"\"";
    }
    return ends.empty() ? "" : out + "forced-thoughts ::= forced-thought (" + ends + ") " + gap + "\n";
}

// Adds the rules of a grammar, one a line, to others, without its root and those that are there already.
void add_rules(std::string & out, const std::string & grammar) {
    std::istringstream lines(grammar);
    for (std::string line; std::getline(lines, line);) {
        // an id that may be left out leaves its comma behind, and then no parser reads the call
        const std::string id = "| json-number))?";
        for (size_t at = 0; (at = line.find(id, at)) != std::string::npos; at += id.size() - 1) {
            line.erase(at + id.size() - 1, 1);
        }
        if (line.rfind("root ::=", 0) != 0 && !contains("\n" + out, "\n" + line + "\n")) {
            out += line + "\n";
        }
    }
}

// What calls begin with, "" if the parser knows none. Their rules are in the grammar of `required`.
std::string first_of_calls(const call_rules & calls, const common_chat_params & required, bool parallel) {
    return required.grammar.empty() || required.grammar_lazy ? "" : calls.outermost(parallel);
}

}  // namespace

std::string e3chat::enforced_grammar(const common_chat_params & required, const enforced & what) {
    call_rules calls;
    std::string out, first;
    if (what.calls && !required.parser.empty()) {
        common_peg_arena arena;
        arena.load(required.parser);
        calls = rules_of_calls(arena);
        first = first_of_calls(calls, required, what.parallel);
        if (!first.empty()) {
            add_rules(out, required.grammar);
        }
    }
    if (what.schema.is_object()) {
        const auto document = common_chat_schema_from_json(what.schema);
        add_rules(out, build_grammar([&](const common_grammar_builder & builder) {
            builder.add_rule("answer", builder.add_schema("answer-schema", *document.root));
            builder.add_rule("root", "answer");
        }));
        first += first.empty() ? "answer" : " | answer";
    }
    if (first.empty()) {
        return "";
    }
    const std::string start = trimmed(required.thinking_start_tag);
    const auto where = thoughts_at(required, start, what.thinking);
    const std::string thought = where == thoughts::none ? "" : rules_of_thoughts(required, calls.text, start);
    std::string before;
    if (!thought.empty()) {
        const auto tag = gbnf_format_literal(start);
        before = where == thoughts::begun ? "forced-thoughts " : "(" + tag + " forced-thoughts)? ";
    }
    return out + thought + "root ::= " + before + "(" + first + ")\n";
}
