// The calls of e3chat.h. Every exception becomes a code and a line.

#include "chat.hpp"
#include "json-schema-to-grammar.h"
#include "log.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <new>
#include <utility>

namespace {

thread_local std::string last_error;

int32_t fail(int32_t status, const char * what) noexcept {
    try {
        last_error = what;
    } catch (...) {
        last_error.clear();
    }
    return status;
}

template <typename F> int32_t guard(F && f) noexcept {
    try {
        f();
        return E3CHAT_OK;
    } catch (const e3chat::wrong_output & e) {
        return fail(E3CHAT_E_OUTPUT, e.what());
    } catch (const std::bad_alloc &) {
        return fail(E3CHAT_E_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(E3CHAT_E_REFUSED, e.what());
    } catch (...) {
        return fail(E3CHAT_E_REFUSED, "unknown error");
    }
}

void not_null(const void * p, const char * name) {
    if (p == nullptr) {
        throw std::invalid_argument(std::string(name) + " is NULL");
    }
}

void give(const common_json & value, char ** out) {
    const std::string text = value.dump();
    char * copy = (char *) malloc(text.size() + 1);
    if (copy == nullptr) {
        throw std::bad_alloc();
    }
    memcpy(copy, text.c_str(), text.size() + 1);
    *out = copy;
}

// llama.cpp throws a copy of a template's error, which has lost its words: parsing it first keeps them.
void check_syntax(const std::string & text) {
    jinja::lexer lexer;
    jinja::parse_from_tokens(lexer.tokenize(text));
}

common_json message_of(const common_chat_msg & message) {
    common_json calls = common_json::array();
    for (const auto & call : message.tool_calls) {
        calls.push_back(
            common_json{{"name", call.name}, {"arguments", call.arguments}, {"id", call.id}});
    }
    return common_json{{"content", message.render_content()}, {"reasoning_content", message.reasoning_content},
        {"tool_calls", calls}};
}

// Parameters with a parser. The last few are kept: with 60 tools, to read one takes longer than a parse.
common_chat_parser_params & params_with(const std::string & parser) {
    constexpr size_t KEPT = 4;
    static thread_local std::list<std::pair<std::string, common_chat_parser_params>> kept;
    auto found = std::find_if(kept.begin(), kept.end(), [&](const auto & one) { return one.first == parser; });
    if (found == kept.end()) {
        common_chat_parser_params fresh;
        if (!parser.empty()) {
            fresh.parser.load(parser);
        }
        kept.emplace_front(parser, std::move(fresh));
        found = kept.begin();
    }
    kept.splice(kept.begin(), kept, found);
    kept.resize(std::min(kept.size(), KEPT));
    return kept.front().second;
}

}  // namespace

int32_t e3chat_abi_version(void) {
    return E3CHAT_ABI_VERSION;
}

const char * e3chat_error(void) {
    return last_error.c_str();
}

int32_t e3chat_open(const char * text, const char * bos, const char * eos, e3chat_template ** out) {
    return guard([&] {
        not_null(text, "text");
        not_null(bos, "bos");
        not_null(eos, "eos");
        not_null(out, "out");
        if (*text == 0) {
            throw std::invalid_argument("the template is empty");
        }
        common_log_set_verbosity_thold(-1);  // what fails is said by codes
        check_syntax(text);
        *out = new e3chat_template{common_chat_templates_init(nullptr, text, bos, eos)};
    });
}

void e3chat_close(e3chat_template * t) {
    delete t;
}

int32_t e3chat_apply(const e3chat_template * t, const char * request, char ** out) {
    return guard([&] {
        not_null(t, "t");
        not_null(request, "request");
        not_null(out, "out");
        give(e3chat::apply(*t->impl, common_json::parse(request)), out);
    });
}

int32_t e3chat_parse(int32_t format, const char * generation_prompt, const char * parser, const char * text,
    int32_t partial, char ** out) {
    return guard([&] {
        not_null(generation_prompt, "generation_prompt");
        not_null(parser, "parser");
        not_null(text, "text");
        not_null(out, "out");
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            throw std::invalid_argument("there is no such format");
        }
        common_chat_parser_params & params = params_with(parser);
        params.format = (common_chat_format) format;
        params.generation_prompt = generation_prompt;
        params.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
        common_chat_msg message;
        try {
            message = common_chat_parse(text, partial != 0, params);
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception & e) {
            throw e3chat::wrong_output(e.what());
        }
        give(message_of(message), out);
    });
}

int32_t e3chat_schema(const char * schema, char ** out) {
    return guard([&] {
        not_null(schema, "schema");
        not_null(out, "out");
        e3chat::take_incomplete();
        const std::string grammar = json_schema_to_grammar(common_json::parse(schema), true);
        common_json lines = common_json::array();
        for (const auto & line : e3chat::take_incomplete()) {
            lines.push_back(line);
        }
        give(common_json{{"grammar", grammar}, {"incomplete", lines}}, out);
    });
}

void e3chat_free(char * text) {
    free(text);
}
