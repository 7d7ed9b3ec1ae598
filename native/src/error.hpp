// Errors inside the library are exceptions with a status; at the C boundary they become codes.
#pragma once

#include "eagle3.h"

#include <stdexcept>
#include <string>

namespace eagle3 {

struct error : std::runtime_error {
    eagle3_status status;
    error(eagle3_status status, const std::string & what) : std::runtime_error(what), status(status) {}
};

// printf into a std::string
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
std::string format(const char * fmt, ...);

inline void require(bool ok, eagle3_status status, const std::string & what) {
    if (!ok) {
        throw error(status, what);
    }
}

}  // namespace eagle3
