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

// A grammar of nothing but calls, and thoughts before them, "" if the parser knows no calls. required: the
// result of an apply in which a call is required.
std::string forced_grammar(const common_chat_params & required, bool thinking, bool parallel);

// The lines about what was not enforced by the grammars that this thread has made since the last call.
std::vector<std::string> take_incomplete();

}  // namespace e3chat
