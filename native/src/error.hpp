// Errors inside the library are exceptions with a status; at the C boundary they become codes.
#pragma once

#include "eagle3.h"
#include "llama.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace eagle3 {

struct error : std::runtime_error {
    eagle3_status status;
    error(eagle3_status status, const std::string & what) : std::runtime_error(what), status(status) {}
};

// This is printf into a std::string.
#if defined(__MINGW32__)
__attribute__((format(gnu_printf, 1, 2)))  // what libstdc++ takes there; printf would be Microsoft's
#elif defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string format(const char * fmt, ...);

inline void require(bool ok, eagle3_status status, const std::string & what) {
    if (!ok) {
        throw error(status, what);
    }
}

// Calls f for each item, also if it fails for some. Returns the first failure, or null.
template <typename T, typename F> std::exception_ptr for_all(T & items, F && f) {
    std::exception_ptr failure;
    for (auto & item : items) {
        try {
            f(item);
        } catch (...) {
            failure = failure ? failure : std::current_exception();
        }
    }
    return failure;
}

// Writes a line to llama.cpp's log.
inline void log_error(const std::string & line) {
    ggml_log_callback log = nullptr;
    void * user_data      = nullptr;
    llama_log_get(&log, &user_data);
    log(GGML_LOG_LEVEL_ERROR, (line + "\n").c_str(), user_data);
}

inline void rethrow(const std::exception_ptr & failure) {
    if (failure) {
        std::rethrow_exception(failure);
    }
}

}  // namespace eagle3
