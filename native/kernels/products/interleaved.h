// The buffer type of weights that are interleaved by columns (formats.hpp), for the CPU backend's list, and
// whether AMX's may be in that list.
#pragma once

#include "ggml-backend.h"

// It is null where this build has no products for it, or EAGLE3_LLAMA_INTERLEAVE is 0 in the environment. The
// type lives as long as the process.
ggml_backend_buffer_type_t eagle3_interleaved_buffer_type(void);

// False where EAGLE3_LLAMA_AMX is 0 in the environment: then the list has no buffer type of AMX, and no tile
// instruction is executed. For a machine on which these fail, or to compare them with the other kernels.
bool eagle3_amx_is_wanted(void);
