// The buffer type of weights that are interleaved by columns (formats.hpp), for the CPU backend's list.
#pragma once

#include "ggml-backend.h"

// It is null where this build has no products for it, or EAGLE3_LLAMA_INTERLEAVE is 0 in the environment. The
// type lives as long as the process.
ggml_backend_buffer_type_t eagle3_interleaved_buffer_type(void);
