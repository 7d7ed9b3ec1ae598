// Which functions are guarded: all that llama-cpp-python declares and that can throw for more than a lack of
// some bytes. tests/native/test_c_functions.py fails for one that is in none of its lists.
#include "api/guards.hpp"

#include "eagle3.h"
#include "error.hpp"
#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#include <cmath>
#include <cstring>
#include <exception>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // Python calls those, too
#endif

namespace eagle3 {

void log_caught(const char * function) noexcept {
    try {
        try {
            throw;
        } catch (const std::exception & e) {
            log_error(std::string(function) + ": " + e.what());
        }
    } catch (...) {
        // no exception of the library, or no memory to log it
    }
}

namespace {

struct entry {
    const char * name;
    void * (*around)(void * function);
};

// The error is 0, null or false where none is given.
#define GUARD(f, ...)                                                                                        \
    entry {                                                                                                  \
        #f, [](void * inner) {                                                                               \
            return around<guarded<__LINE__, decltype(f)>>(#f, inner, {__VA_ARGS__});                         \
        }                                                                                                    \
    }
#define GUARD_AND(f, then)                                                                                   \
    entry {                                                                                                  \
        #f, [](void * inner) {                                                                               \
            return around<guarded<__LINE__, decltype(f)>>(#f, inner, {}, then);                              \
        }                                                                                                    \
    }

template <typename G, typename... Failed>
void * around(const char * name, void * inner, typename G::result error, Failed... failed) {
    void * const call = (void *) &G::call;
    if (inner != call) {  // it may be guarded already
        G::name  = name;
        G::inner = (typename G::function *) inner;
        G::error = error;
        ((G::failed = failed), ...);
    }
    return call;
}

// A constraint that fails must not be lost.
void allow_nothing(llama_sampler *, llama_token_data_array * candidates) {
    for (size_t i = 0; i < candidates->size; ++i) {
        candidates->data[i].logit = -INFINITY;
    }
}

// llama.cpp's own does not look whether there is such a token.
bool is_control(const llama_vocab * vocab, llama_token token) {
    return llama_vocab_get_attr(vocab, token) & LLAMA_TOKEN_ATTR_CONTROL;
}

// clang-format off
const entry ENTRIES[] = {
    GUARD(llama_adapter_lora_init),
    GUARD(llama_adapter_lora_init_from_file_ptr),
    GUARD(llama_adapter_meta_val_str, -1),
    GUARD(llama_backend_init),
    GUARD(llama_batch_ext_add, -1),
    GUARD(llama_batch_ext_add_embd, -1),
    GUARD(llama_batch_ext_add_seq),
    GUARD(llama_batch_ext_add_token, -1),
    GUARD(llama_batch_ext_init),
    GUARD(llama_batch_ext_set_embd_token),
    GUARD(llama_batch_ext_set_output_embd),
    GUARD(llama_batch_ext_set_output_logits),
    GUARD(llama_batch_ext_set_pos),
    GUARD(llama_chat_apply_template, -1),
    GUARD(llama_copy_state_data),
    GUARD(llama_decode, -3),
    GUARD(llama_detokenize),
    GUARD(llama_encode, -3),
    GUARD(llama_get_embeddings),
    GUARD(llama_get_embeddings_ith),
    GUARD(llama_get_embeddings_seq),
    GUARD(llama_get_logits),
    GUARD(llama_get_logits_ith),
    GUARD(llama_get_state_size),
    GUARD(llama_init_from_model),
    GUARD(llama_load_mode_from_str, LLAMA_LOAD_MODE_AUTO),
    GUARD(llama_load_model_from_file),
    GUARD(llama_load_session_file),
    GUARD(llama_memory_clear),
    GUARD(llama_memory_seq_add),
    GUARD(llama_memory_seq_cp),
    GUARD(llama_memory_seq_div),
    GUARD(llama_memory_seq_keep),
    GUARD(llama_memory_seq_rm),
    GUARD(llama_model_chat_template),
    GUARD(llama_model_desc, -1),
    GUARD(llama_model_init_from_user),
    GUARD(llama_model_load_from_file),
    GUARD(llama_model_load_from_file_ptr),
    GUARD(llama_model_load_from_splits),
    GUARD(llama_model_meta_val_str, -1),
    GUARD(llama_model_quantize, 1),
    GUARD(llama_model_save_to_file),
    GUARD(llama_new_context_with_model),
    GUARD(llama_opt_epoch),
    GUARD(llama_opt_init),
    GUARD(llama_print_system_info, ""),
    GUARD(llama_process, -3),
    GUARD(llama_sampler_accept),
    GUARD_AND(llama_sampler_apply, allow_nothing),
    GUARD(llama_sampler_chain_add),
    GUARD(llama_sampler_clone),
    GUARD(llama_sampler_copy),
    GUARD(llama_sampler_init_dry),
    GUARD(llama_sampler_init_grammar),
    GUARD(llama_sampler_init_grammar_lazy),
    GUARD(llama_sampler_init_grammar_lazy_patterns),
    GUARD(llama_sampler_init_infill),
    GUARD(llama_sampler_init_logit_bias),
    GUARD(llama_sampler_init_penalties),
    GUARD(llama_sampler_name, ""),
    GUARD(llama_sampler_reset),
    GUARD(llama_sampler_sample, LLAMA_TOKEN_NULL),
    GUARD(llama_save_session_file),
    GUARD(llama_set_adapter_cvec, -1),
    GUARD(llama_set_adapters_lora, -1),
    GUARD(llama_set_n_threads),
    GUARD(llama_set_sampler),
    GUARD(llama_set_state_data),
    GUARD(llama_split_prefix),
    GUARD(llama_state_get_data),
    GUARD(llama_state_get_size),
    GUARD(llama_state_load_file),
    GUARD(llama_state_save_file),
    GUARD(llama_state_seq_get_data),
    GUARD(llama_state_seq_get_data_ext),
    GUARD(llama_state_seq_get_size),
    GUARD(llama_state_seq_get_size_ext),
    GUARD(llama_state_seq_load_file),
    GUARD(llama_state_seq_save_file),
    GUARD(llama_state_seq_set_data),
    GUARD(llama_state_seq_set_data_ext),
    GUARD(llama_state_set_data),
    GUARD(llama_supports_gpu_offload),
    GUARD(llama_supports_rpc),
    GUARD(llama_synchronize),
    GUARD(llama_token_to_piece),
    GUARD(llama_tokenize, -1),
    GUARD(llama_vocab_get_attr),
    GUARD(llama_vocab_get_score, NAN),
    GUARD(llama_vocab_get_text),
    {"llama_vocab_is_control", [](void *) {
        return around<guarded<__LINE__, decltype(is_control)>>("llama_vocab_is_control", (void *) is_control, {});
    }},
    GUARD(mtmd_batch_add_chunk, 1),
    GUARD(mtmd_bitmap_init),
    GUARD(mtmd_bitmap_init_from_audio),
    GUARD(mtmd_bitmap_init_lazy),
    GUARD(mtmd_bitmap_set_id),
    GUARD(mtmd_helper_bitmap_init_from_buf),
    GUARD(mtmd_helper_bitmap_init_from_file),
    GUARD(mtmd_helper_decode_image_chunk, -1),
    GUARD(mtmd_helper_eval_chunk_single, -1),
    GUARD(mtmd_helper_eval_chunks, -1),
    GUARD(mtmd_helper_gen_audio_get_output, -1),
    GUARD(mtmd_helper_gen_audio_init),
    GUARD(mtmd_helper_gen_audio_reset),
    GUARD(mtmd_helper_gen_audio_set_input, -1),
    GUARD(mtmd_helper_gen_audio_step_gen, -1),
    GUARD(mtmd_helper_gen_audio_step_prompt, -1),
    GUARD(mtmd_helper_image_get_decoder_pos),
    GUARD(mtmd_helper_model_can_chat),
    GUARD(mtmd_helper_video_init),
    GUARD(mtmd_helper_video_init_from_buf),
    GUARD(mtmd_helper_video_read_next, -2),
    GUARD(mtmd_input_chunk_copy),
    GUARD(mtmd_input_chunk_get_placeholder),
    GUARD(mtmd_input_chunk_save, -1),
};
// clang-format on

}  // namespace
}  // namespace eagle3

void * eagle3_guarded(const char * name, void * function) {
    for (const auto & entry : eagle3::ENTRIES) {
        if (strcmp(entry.name, name) == 0) {
            return entry.around(function);
        }
    }
    return function;
}
