#pragma once

#include "ggml.h"

#include <cstdio>

#define LOG(...)     fprintf(stderr, __VA_ARGS__)
#define LOG_INF(...) LOG(__VA_ARGS__)
#define LOG_ERR(...) LOG(__VA_ARGS__)

#define LOG_LEVEL_ERROR 1
#define LOG_LEVEL_DEBUG 5

inline int  common_log_get_verbosity(ggml_log_level level) { return level == GGML_LOG_LEVEL_ERROR ? LOG_LEVEL_ERROR : LOG_LEVEL_DEBUG; }
inline void common_log_set_verbosity_thold(int) {}
inline void * common_log_main() { return nullptr; }
inline void common_log_flush(void *) {}
