#include "error.hpp"

#include <cstdarg>
#include <cstdio>

namespace eagle3 {

std::string format(const char * fmt, ...) {
    char buf[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(buf, sizeof(buf), fmt, args);
    va_end(args);
    return buf;
}

}  // namespace eagle3
