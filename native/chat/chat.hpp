// What the files of libe3chat share.
#pragma once

#include "chat.h"
#include "e3chat.h"

#include <stdexcept>
#include <string>
#include <vector>

struct e3chat_template {
    common_chat_templates_ptr impl;
};

namespace e3chat {

// An answer that the parser does not accept.
struct wrong_output : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// See e3chat_apply.
common_json apply(const common_chat_templates & templates, const common_json & request);

// What an answer must be: a call, if `calls`, or JSON that follows `schema`, if that is an object.
struct enforced {
    bool calls = false;
    bool parallel = false;  // several calls
    bool thinking = true;  // thoughts may come before it
    common_json schema;
};

// A grammar of nothing else, "" if there is none. required: the result of an apply in which calls are required.
std::string enforced_grammar(const common_chat_params & required, const enforced & what);

// The lines about what was not enforced by the grammars that this thread has made since the last call.
std::vector<std::string> take_incomplete();

}  // namespace e3chat
