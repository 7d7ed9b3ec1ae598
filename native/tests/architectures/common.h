// As much of llama.cpp's common library as its tests/test-llama-archs.cpp needs to write models: for architectures.py.
#pragma once

#include "llama-cpp.h"
#include "log.h"

// compiled, never run: the parts that decode are not what it is built for
struct common_batch {
    explicit common_batch(const llama_context *) {}
    void clear() {}
    void add(llama_token, llama_pos, llama_seq_id, bool) {}
    llama_batch_ext * get() { return nullptr; }
};

inline void common_init() {}
