// A request as JSON to the inputs of llama.cpp's templates, and what they give back to JSON.

#include "chat.hpp"
#include "common.h"

#include <algorithm>

namespace {

using json = common_json;

// Where a call of one of the tools begins that is JSON, at the beginning of the answer. What follows its name
// tells it from data; the blanks are those that the grammar knows, which reads it again.
std::string bare_call(const std::vector<common_chat_tool> & tools) {
    const std::string blanks = R"((?: |\n{1,2}[ \t]{0,20})?)";
    const auto spaced = [&](const std::vector<std::string> & words) {
        std::string out;
        for (const auto & word : words) {
            out += word + blanks;
        }
        return out;
    };
    std::string names;
    for (const auto & tool : tools) {
        names += (names.empty() ? "" : "|") + regex_escape(json(tool.name).dump());
    }
    const auto type = "(?:" + spaced({"\"type\"", ":", "\"function\"", ","}) + ")?";
    return "^\\s*(" + spaced({"\\{"}) + type + spaced({"\"name\"", ":", "(?:" + names + ")"}) + ",)";
}

// Regular expressions for llama_sampler_init_grammar_lazy_patterns, as llama.cpp's server makes them.
json patterns(const std::vector<common_grammar_trigger> & triggers) {
    json out = json::array();
    for (const auto & t : triggers) {
        if (t.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
            out.push_back(json{{"word", t.value}, {"pattern", regex_escape(t.value)}});
        } else if (t.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN) {
            out.push_back(json{{"pattern", t.value}});
        } else if (t.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
            const bool first = t.value.empty() || t.value.front() != '^';
            const bool last = t.value.empty() || t.value.back() != '$';
            out.push_back(json{{"pattern", (first ? "^" : "") + t.value + (last ? "$" : "")}});
        }
    }
    return out;
}

json texts(const std::vector<std::string> & lines) {
    json out = json::array();
    for (const auto & line : lines) {
        out.push_back(line);
    }
    return out;
}

std::vector<common_chat_tool> tools_of(const json & request, const char * field) {
    const bool given = request.contains(field) && request.at(field).is_array();
    return given ? common_chat_tools_parse_oaicompat(request.at(field)) : std::vector<common_chat_tool>();
}

common_chat_templates_inputs inputs_of(const json & request) {
    common_chat_templates_inputs in;
    in.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    in.tools = tools_of(request, "tools");
    in.tool_choice = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    in.parallel_tool_calls = request.value("parallel_tool_calls", false);
    in.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    in.enable_thinking = request.value("enable_thinking", true);
    if (request.contains("chat_template_kwargs")) {
        for (const auto & [name, value] : request.at("chat_template_kwargs").items()) {
            in.chat_template_kwargs[name] = value.dump();
        }
    }
    if (request.value("continue_final_message", false)) {
        in.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
        in.add_generation_prompt = false;
    }
    return in;
}

// Keeps the tools that may be called. Returns whether some may not.
bool keep_called(common_chat_templates_inputs & in, const json & request) {
    if (!request.contains("called")) {
        return false;
    }
    std::vector<std::string> names;
    for (const auto & name : request.at("called")) {
        names.push_back(name.get<std::string>());
    }
    const auto other = [&](const common_chat_tool & tool) {
        return std::find(names.begin(), names.end(), tool.name) == names.end();
    };
    const auto before = in.tools.size();
    in.tools.erase(std::remove_if(in.tools.begin(), in.tools.end(), other), in.tools.end());
    return in.tools.size() < before;
}

common_chat_params called(const common_chat_templates & templates, common_chat_templates_inputs in) {
    in.tool_choice = COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    return common_chat_templates_apply(&templates, in);
}

}  // namespace

common_json e3chat::apply(const common_chat_templates & templates, const common_json & request) {
    auto in = inputs_of(request);
    auto params = common_chat_templates_apply(&templates, in);
    // the prompt shows all tools, so that its beginning is the same in every turn
    const std::string prompt = params.prompt;
    const bool shown = std::all_of(in.tools.begin(), in.tools.end(), [&](const common_chat_tool & tool) {
        return prompt.find(tool.name) != std::string::npos;
    });
    if (keep_called(in, request)) {
        take_incomplete();
        params = common_chat_templates_apply(&templates, in);
    }
    // what a call means is read by the tools as they are shown; what may be written follows the others
    const std::string parser = params.parser;
    if (auto others = tools_of(request, "enforced"); !others.empty()) {
        in.tools = std::move(others);
        take_incomplete();
        params = common_chat_templates_apply(&templates, in);
    }
    enforced what;
    what.parallel = in.parallel_tool_calls;
    what.thinking = in.enable_thinking;
    what.schema = request.value("json_schema", json());
    what.calls = !in.tools.empty() && in.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    std::string forced;
    if (in.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED) {
        what.schema = json();
        forced = enforced_grammar(params, what);
    } else if (what.schema.is_object()) {
        forced = enforced_grammar(what.calls ? called(templates, in) : params, what);
    }
    json triggers = patterns(params.grammar_triggers);
    if (what.calls && in.tool_choice == COMMON_CHAT_TOOL_CHOICE_AUTO && params.grammar.empty()) {
        // no sign of its own begins a call (Llama 3): JSON with a tool's name does, alone in the answer
        params.grammar = enforced_grammar(called(templates, in), what);
        params.grammar_lazy = !params.grammar.empty();
        triggers.push_back(json{{"pattern", bare_call(in.tools)}});
    }
    auto unmet = take_incomplete();
    std::sort(unmet.begin(), unmet.end());
    unmet.erase(std::unique(unmet.begin(), unmet.end()), unmet.end());
    json thinking;
    if (!params.thinking_start_tag.empty() && !params.thinking_end_tags.empty()) {
        thinking = json{{"start", params.thinking_start_tag}, {"ends", texts(params.thinking_end_tags)}};
    }
    return json{{"prompt", prompt}, {"parser", parser}, {"format", (int) params.format},
        {"generation_prompt", params.generation_prompt}, {"grammar", params.grammar},
        {"lazy", params.grammar_lazy}, {"triggers", triggers}, {"forced", forced},
        {"stops", texts(params.additional_stops)}, {"preserved", texts(params.preserved_tokens)},
        {"thinking", thinking}, {"tools", shown}, {"incomplete", texts(unmet)}};
}
