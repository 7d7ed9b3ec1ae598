// C functions of llama.cpp, guarded: an exception that leaves one ends the process if its caller is written
// in Python, where nothing can catch it. A guarded one logs it and returns what its error is.
#pragma once

#include "ggml.h"

#include <string>
#include <type_traits>

namespace eagle3 {

// Logs the exception being handled as an error of that function, by llama.cpp's log.
void log_caught(const char * function) noexcept;

// A function of its own for each Id. failed: called after an exception; it may be null.
template <int Id, typename F> struct guarded;
template <int Id, typename R, typename... Args> struct guarded<Id, R(Args...)> {
    using function = R(Args...);
    using result   = std::conditional_t<std::is_void_v<R>, int, R>;
    static inline const char * name;
    static inline function * inner;
    static inline result error;
    static inline void (*failed)(Args...) = nullptr;

    static R call(Args... args) {
        try {
            return inner(args...);
        } catch (...) {
            log_caught(name);
            if (failed != nullptr) {
                failed(args...);
            }
            if constexpr (!std::is_void_v<R>) {
                return error;
            }
        }
    }
};

}  // namespace eagle3
