// llama.cpp's converter of JSON schemas, compiled here to hear what it cannot express. It prints that as a
// warning and lets it through; whoever asks for a strict schema must learn it.

#include "chat.hpp"

#include <cstdarg>
#include <cstdio>

static thread_local std::vector<std::string> incomplete;

static void note_incomplete(FILE *, const char * format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    std::string text = line;
    const auto at = text.find(": ");  // behind the words that all its warnings begin with
    text = at == std::string::npos ? text : text.substr(at + 2);
    while (!text.empty() && text.back() == '\n') {
        text.pop_back();
    }
    incomplete.push_back(text);
}

#define fprintf note_incomplete
#include "json-schema-to-grammar.cpp"
#undef fprintf

std::vector<std::string> e3chat::take_incomplete() {
    std::vector<std::string> out;
    out.swap(incomplete);
    return out;
}
