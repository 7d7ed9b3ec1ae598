// e3chat.h - chat templates, tools and schemas: llama.cpp's chat library behind C linkage. This header is its
// manual.
//
// It turns messages and tools into a prompt by the model's own template, says which grammar keeps the answer
// to the form in which this model writes calls, and turns the answer's text into a message. JSON goes in and
// out. Python reads what is between the cdef marks.
//
// Templates are programs, and what this library does for a request has no bound: a template may loop for
// ever, take all memory, or recurse until the stack overflows, and so may a text that is nested deeply. Load
// it into a process that may be killed (eagle3_llama/server/sandbox). Handles and calls are not thread-safe.
//
// Calls return E3CHAT_OK, or on failure a code below 0, with a message for e3chat_error(). No C++ exception
// leaves the library, and a call that fails writes nothing to `out`. Strings are UTF-8, end with a zero, and
// are the caller's: they are read during the call only.
#pragma once
#include <stdint.h>
#define E3CHAT_ABI_VERSION 1
#ifdef __cplusplus
extern "C" {
#endif
#if defined(E3CHAT_BUILD) && defined(__GNUC__) && !defined(_WIN32)
#pragma GCC visibility push(default)  // the library hides everything else
#endif
// cdef-begin
typedef struct e3chat_template e3chat_template;

enum e3chat_status {
    E3CHAT_OK = 0,
    E3CHAT_E_REFUSED =
        -1,  // a template, messages, tools, a schema or JSON that is wrong: the message says why
    E3CHAT_E_OUTPUT = -2,  // a text that is no answer in the parser's form
    E3CHAT_E_MEMORY = -3,  // out of memory
};

// The version of this header that the library was compiled with: E3CHAT_ABI_VERSION.
int32_t e3chat_abi_version(void);

// The message of this thread's last failure, "" if there was none. It is the library's, until the next call.
const char * e3chat_error(void);

// Parses a template. bos, eos: what the template shows for bos_token and eos_token, "" if there is none.
// The caller owns *out, and closes it with e3chat_close.
int32_t e3chat_open(const char * text, const char * bos, const char * eos, e3chat_template ** out);

// Frees a template. NULL does nothing.
void e3chat_close(e3chat_template * t);

// Renders a request. The fields of the request, an object: `messages` and `tools` as in OpenAI's API;
// `tool_choice`: auto, required or none; `called`: names of the tools that may be called, where not all may;
// `enforced`: the same tools with other schemas, which the grammars follow in the place of theirs;
// `parallel_tool_calls`; `json_schema`: what the answer must follow, unless a call is required;
// `enable_thinking`, true if it is absent; `chat_template_kwargs`: variables of the template;
// `continue_final_message`: the last message is the start of the answer.
//
// *out is the caller's, for e3chat_free: an object with `prompt`; `parser`, `format` and `generation_prompt`,
// for e3chat_parse; `grammar`, GBNF or "", which is `lazy` if it begins where one of the regular expressions
// `triggers` matches, and otherwise begins with `generation_prompt`; `forced`: a grammar of nothing but what
// is required, calls or JSON (with tool_choice auto and json_schema, either), and thoughts before it, that
// begins behind the prompt, "" if nothing is required, or if the template knows no calls; `stops`;
// `preserved`: special tokens that the parser must see; `thinking`: the tags around thoughts, an object with
// `start` and `ends`, null if the model has none; `tools`: whether the prompt names all tools; `incomplete`:
// what the schemas ask and the grammars do not enforce.
int32_t e3chat_apply(const e3chat_template * t, const char * request, char ** out);

// Reads an answer, from its beginning. parser, format and generation_prompt: of e3chat_apply; partial: 1 if
// the answer goes on. E3CHAT_E_OUTPUT if the text is no such answer. *out is the caller's, for e3chat_free:
// an object with `content`, `reasoning_content` and `tool_calls`, each with `name`, `arguments` and `id`,
// which are texts. The thread keeps the last four parsers, for to read one takes longer than a parse.
int32_t e3chat_parse(int32_t format, const char * generation_prompt, const char * parser, const char * text,
    int32_t partial, char ** out);

// The grammar of a JSON schema. *out is the caller's, for e3chat_free: an object with `grammar`, GBNF, and
// `incomplete`: a line for each part of the schema that the grammar does not enforce.
int32_t e3chat_schema(const char * schema, char ** out);

// Frees what a call wrote to `out`. NULL does nothing.
void e3chat_free(char * text);
// cdef-end
#if defined(E3CHAT_BUILD) && defined(__GNUC__) && !defined(_WIN32)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
