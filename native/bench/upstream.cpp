// The pinned tree's own drafters (common/speculative.cpp), greedy, for `eagle3-llama bench --modes
// upstream,upstream:SPEC,draft_model`.
//
//     upstream TARGET.gguf HEAD.gguf SPEC[,SPEC] N_THREADS N_CTX N_MAX FLASH_ATTN BACKEND_SAMPLING
//
// HEAD.gguf is - without one; SPEC as in llama-server's --spec-type. Says "ready", then reads requests, a
// line each: n_max n_gram n_text n_predict token token ... (the prompt). n_max, at most N_MAX: draft tokens
// of a head or a small model. n_gram and n_text: tokens of a match and of a draft of the ngram types. Each
// request begins with an empty memory of n-grams. Answers each with a line: seconds from the first token to
// the last, how many rounds, sampled/drafted of each, then the tokens, the end of generation not among them.
// Ends with its input.
#include "common.h"
#include "llama.h"
#include "sampling.h"
#include "speculative.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

namespace {

constexpr int MOST_TEXT = 64;  // draft tokens of the ngram types

struct answer {
    llama_tokens tokens;
    int64_t us = 0;
    std::vector<std::pair<int, int>> rounds;  // sampled, drafted
};

// examples/speculative-simple's loop; like llama-server's, no draft is longer than what is left of the answer
answer generate(llama_context * ctx_tgt, llama_context * ctx_dft, common_speculative * spec,
    common_sampler * smpl, const llama_tokens & prompt, int n_max, int n_predict) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx_tgt));
    llama_memory_clear(llama_get_memory(ctx_tgt), true);
    if (ctx_dft) {
        llama_memory_clear(llama_get_memory(ctx_dft), true);
    }
    common_sampler_reset(smpl);

    answer out;
    const int n_batch = llama_n_batch(ctx_tgt);
    const int n_all   = (int) prompt.size();
    for (int i = 0; i < n_all; i += n_batch) {
        common_batch batch(ctx_tgt);
        for (int k = i; k < std::min(i + n_batch, n_all); ++k) {
            batch.add(prompt[k], k, 0, k == n_all - 1);
        }
        if (llama_process(ctx_tgt, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0 ||
            !common_speculative_process(spec, batch)) {
            throw std::runtime_error("the prompt could not be processed");
        }
    }
    common_speculative_begin(spec, 0, prompt);
    llama_token last = common_sampler_sample(smpl, ctx_tgt, -1);
    common_sampler_accept(smpl, last, true);
    out.tokens.push_back(last);
    const int64_t start = ggml_time_us();

    llama_tokens text = prompt, draft;
    int n_past        = n_all;
    common_batch batch(ctx_tgt);
    while ((int) out.tokens.size() < n_predict && !llama_vocab_is_eog(vocab, last)) {
        draft.clear();
        const int most          = n_predict - (int) out.tokens.size() - 1;
        auto & dp               = common_speculative_get_draft_params(spec, 0);
        dp                      = {};
        dp.drafting             = n_max > 0 && most > 0;
        dp.n_max                = std::min({n_max, most, (int) llama_n_ctx(ctx_tgt) - n_past - 2});
        dp.pos0                 = n_past;
        dp.id_last              = last;
        dp.prompt               = &text;
        dp.result               = &draft;
        const llama_pos dft_max = ctx_dft ? llama_memory_seq_pos_max(llama_get_memory(ctx_dft), 0) : -1;
        common_speculative_draft(spec);
        draft.resize(std::min(draft.size(), (size_t) most));
        if (ctx_dft) {
            llama_memory_seq_rm(llama_get_memory(ctx_dft), 0, dft_max + 1, -1);
        }

        batch.clear();
        batch.add(last, n_past, 0, true);
        for (size_t i = 0; i < draft.size(); ++i) {
            batch.add(draft[i], n_past + 1 + i, 0, true);
        }
        if (llama_process(ctx_tgt, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0 ||
            !common_speculative_process(spec, batch)) {
            throw std::runtime_error("a round could not be processed");
        }
        const llama_tokens ids = common_sampler_sample_and_accept_n(smpl, ctx_tgt, draft);
        common_speculative_accept(spec, 0, ids.size() - 1);
        n_past += (int) ids.size();
        for (const llama_token id : ids) {
            text.push_back(last);
            last = id;
            out.tokens.push_back(id);
            if (llama_vocab_is_eog(vocab, id)) {
                break;
            }
        }
        llama_memory_seq_rm(llama_get_memory(ctx_tgt), 0, n_past, -1);
        if (ctx_dft) {
            llama_memory_seq_rm(llama_get_memory(ctx_dft), 0, n_past, -1);
        }
        out.rounds.push_back({(int) ids.size(), (int) draft.size()});
    }
    out.us = ggml_time_us() - start;
    if (llama_vocab_is_eog(vocab, out.tokens.back())) {
        out.tokens.pop_back();
    }
    out.tokens.resize(std::min((int) out.tokens.size(), n_predict));
    return out;
}

void set(common_params_speculative & p, int n_max, int n_gram, int n_text) {
    p.draft.n_max       = std::max(n_max, 1);
    p.ngram_mod.n_match = std::max(n_gram, 1);
    p.ngram_mod.n_max   = std::max(n_text, 1);
    p.ngram_mod.n_min   = n_text >= 64 ? 48 : 1;  // upstream's default belongs to its default of 64
    for (common_params_speculative_ngram_map * map : {&p.ngram_simple, &p.ngram_map_k, &p.ngram_map_k4v}) {
        map->size_n = (uint16_t) std::max(n_gram, 1);
        map->size_m = (uint16_t) std::max(n_text, 1);
    }
}

int run(int argc, char ** argv) {
    if (argc != 9) {
        fprintf(stderr,
            "usage: %s TARGET.gguf HEAD.gguf|- SPEC[,SPEC] N_THREADS N_CTX N_MAX FLASH_ATTN "
            "BACKEND_SAMPLING\n",
            argv[0]);
        return 2;
    }
    common_params params;
    params.model.path          = argv[1];
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = atoi(argv[4]);
    params.n_ctx                                                  = atoi(argv[5]);
    params.n_parallel                                             = 1;
    params.flash_attn_type   = (llama_flash_attn_type) atoi(argv[7]);  // -1: llama.cpp's choice
    params.sampling.temp     = 0.0f;
    params.warmup            = false;
    params.fit_params        = false;
    const bool has_head      = std::string(argv[2]) != "-";
    params.speculative.types = common_speculative_types_from_names(string_split<std::string>(argv[3], ','));
    params.speculative.draft.mparams.path     = has_head ? argv[2] : "";
    params.speculative.draft.n_max            = atoi(argv[6]);
    params.speculative.draft.backend_sampling = atoi(argv[8]) != 0;
    params.speculative.draft.cpuparams = params.speculative.draft.cpuparams_batch = params.cpuparams;
    const auto limits = common_speculative_get_output_limits(
        params.n_batch, 1, std::max(params.speculative.draft.n_max, MOST_TEXT));
    params.n_outputs_max         = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;

    llama_backend_init();
    auto target              = common_init_from_params(params);
    llama_context * ctx_tgt  = target->context();
    common_params params_dft = common_base_params_to_speculative(params);
    common_speculative_init_result_ptr init;
    if (has_head) {
        init = common_speculative_init_from_params(params_dft, target->model(), ctx_tgt);
    }
    llama_context * ctx_dft          = init ? init->context() : nullptr;
    params.speculative.draft.ctx_tgt = ctx_tgt;
    params.speculative.draft.ctx_dft = ctx_dft;
    common_speculative_ptr spec(common_speculative_init(params.speculative, 1));
    common_sampler_ptr smpl(common_sampler_init(target->model(), params.sampling));
    if (!spec || (has_head && !ctx_dft)) {
        fprintf(stderr, "the drafter could not be started\n");
        return 1;
    }
    printf("ready\n");
    fflush(stdout);

    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        int n_max = 0, n_gram = 0, n_text = 0, n_predict = 0;
        llama_tokens prompt;
        in >> n_max >> n_gram >> n_text >> n_predict;
        for (llama_token t; in >> t;) {
            prompt.push_back(t);
        }
        // drafters draft as many as they were made for, whatever a round asks for; and n-grams of the last
        // request, which may have had the same prompt, would be known
        set(params.speculative, n_max, n_gram, std::min(n_text, MOST_TEXT));
        spec.reset();
        spec.reset(common_speculative_init(params.speculative, 1));
        const answer a =
            generate(ctx_tgt, ctx_dft, spec.get(), smpl.get(), prompt, std::max(n_max, n_text), n_predict);
        printf("%.6f %d", a.us * 1e-6, (int) a.rounds.size());
        for (const auto & [sampled, drafted] : a.rounds) {
            printf(" %d/%d", sampled, drafted);
        }
        for (const llama_token t : a.tokens) {
            printf(" %d", t);
        }
        printf("\n");
        fflush(stdout);
    }
    return 0;
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception & e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
