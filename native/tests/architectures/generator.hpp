// Tiny random models of an architecture, as llama.cpp's own test makes them, and of those that it leaves out for want
// of some settings.
#pragma once

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

namespace generator {

// Those that it leaves out and that are made here.
inline bool is_added(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_RWKV6:
        case LLM_ARCH_RWKV7:
        case LLM_ARCH_ARWKV7:
        case LLM_ARCH_GEMMA4:
            return true;
        default:
            return false;
    }
}

inline bool makes(llm_arch arch) {
    return is_added(arch) || arch_supported(arch);
}

inline gguf_context_ptr settings(llm_arch arch, bool moe) {
    gguf_context_ptr gguf = get_gguf_ctx(arch, moe);
    if (!is_added(arch)) {
        return gguf;
    }
    const std::string name = llm_arch_name(arch);
    const auto set         = [&](const char * key, uint32_t value) { gguf_set_val_u32(gguf.get(), (name + key).c_str(), value); };
    if (arch == LLM_ARCH_GEMMA4) {
        const uint32_t windows[] = {1, 1, 1, 1, 0};
        gguf_set_arr_data(gguf.get(), "gemma4.attention.sliding_window_pattern", GGUF_TYPE_UINT32, windows, 5);
        set(".attention.key_length", 64);
        set(".attention.value_length", 64);
        return gguf;
    }
    for (const char * rank : {"decay", "iclr", "value_residual_mix", "gate"}) {
        gguf_set_val_u32(gguf.get(), (name + ".attention." + rank + "_lora_rank").c_str(), 32);
    }
    set(".token_shift_count", arch == LLM_ARCH_ARWKV7 ? 1 : 2);
    return gguf;
}

inline llama_model_ptr model(llm_arch arch, bool moe) {
    const gguf_context_ptr gguf = settings(arch, moe);
    return std::move(get_model_and_ctx(gguf.get(), nullptr, 7, 0.1f, {}).first);
}

}  // namespace generator
