// The pinned tree's own drafters (common/speculative.cpp), greedy, for `eagle3-llama bench --modes
// upstream,upstream:SPEC,draft_model`.
//
//     upstream TARGET.gguf HEAD.gguf SPEC[,SPEC] N_THREADS N_CTX N_MAX FLASH_ATTN BACKEND_SAMPLING
//
// HEAD.gguf is the drafter's file, or - without one: the ngram types need none, and draft-mtp then takes the
// target's own layers. SPEC as in llama-server's --spec-type. Says "ready", then reads requests, a line each:
// n_max n_gram n_text n_predict token token ... (the prompt). n_max, at most N_MAX: draft tokens of a head or
// a small model. n_gram and n_text: tokens of a match and of a draft of the ngram types. Each request begins
// with an empty memory of n-grams. Answers each with a line: seconds from the first token to the last, how
// many rounds, sampled/drafted of each, then the tokens, the end of generation not among them. Ends with its
// input.
//
// A memory that cannot take back a part of a sequence gets what llama-server does for it: a checkpoint before
// each draft, and after a rejection the accepted tokens verified again, as a round of their own.
#include "common.h"
#include "llama.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace {

constexpr int MOST_TEXT = 64;  // draft tokens of the ngram types

struct answer {
    llama_tokens tokens;
    int64_t us = 0;
    std::vector<std::pair<int, int>> rounds;  // sampled, drafted
};

// A context, and whether its memory takes back a few rows, bounded by n_rs_seq, or only whole sequences.
struct memory {
    llama_context * ctx             = nullptr;  // null: no such context
    common_context_seq_rm_type type = COMMON_CONTEXT_SEQ_RM_TYPE_NO;

    explicit memory(llama_context * ctx_) : ctx(ctx_) {
        if (ctx) {
            type = common_context_can_seq_rm(ctx);
        }
    }

    bool whole() const { return type == COMMON_CONTEXT_SEQ_RM_TYPE_FULL; }
    bool beyond(size_t rows) const {
        return type == COMMON_CONTEXT_SEQ_RM_TYPE_RS && rows > llama_n_rs_seq(ctx);
    }
    llama_pos last() const { return llama_memory_seq_pos_max(llama_get_memory(ctx), 0); }

    void clear() const {
        if (ctx) {
            llama_memory_clear(llama_get_memory(ctx), true);
        }
    }

    void cut(llama_pos from) const {
        if (ctx && !llama_memory_seq_rm(llama_get_memory(ctx), 0, from, -1)) {
            throw std::runtime_error("the memory could not take tokens back");
        }
    }
};

constexpr llama_state_seq_flags PARTIAL = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

// One answer, by llama-server's loop for one slot (tools/server/server-context.cpp).
class generation {
  public:
    generation(const memory & target, const memory & drafter, common_speculative * spec,
        common_sampler * smpl, int n_max)
        : target(target), drafter(drafter), spec(spec), smpl(smpl), n_max(n_max),
          vocab(llama_model_get_vocab(llama_get_model(target.ctx))), batch(target.ctx) {}

    answer run(const llama_tokens & prompt, int n_predict) {
        read(prompt);
        const int64_t start = ggml_time_us();
        while ((int) out.tokens.size() < n_predict && !llama_vocab_is_eog(vocab, last)) {
            round(n_predict - (int) out.tokens.size() - 1);
        }
        out.us = ggml_time_us() - start;
        if (llama_vocab_is_eog(vocab, out.tokens.back())) {
            out.tokens.pop_back();
        }
        out.tokens.resize(std::min((int) out.tokens.size(), n_predict));
        return std::move(out);
    }

  private:
    void decode() {
        if (llama_process(target.ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0 ||
            !common_speculative_process(spec, batch)) {
            throw std::runtime_error("a batch could not be processed");
        }
    }

    void read(const llama_tokens & prompt) {
        target.clear();
        drafter.clear();
        common_sampler_reset(smpl);
        const int n_batch = llama_n_batch(target.ctx);
        n_past            = (int) prompt.size();
        for (int i = 0; i < n_past; i += n_batch) {
            batch.clear();
            for (int k = i; k < std::min(i + n_batch, n_past); ++k) {
                batch.add(prompt[k], k, 0, k == n_past - 1);
            }
            decode();
        }
        text = prompt;
        common_speculative_begin(spec, 0, prompt);
        last = common_sampler_sample(smpl, target.ctx, -1);
        common_sampler_accept(smpl, last, true);
        out.tokens.push_back(last);
    }

    // like llama-server's, no draft is longer than what is left of the answer
    void propose(int most) {
        draft.clear();
        checkpoint.clear();
        checkpoint.update_pos(
            n_past, llama_memory_seq_pos_min(llama_get_memory(target.ctx), 0), target.last());
        if (drafter.whole()) {
            checkpoint.update_dft(drafter.ctx, 0, PARTIAL);
        }
        auto & dp   = common_speculative_get_draft_params(spec, 0);
        dp          = {};
        dp.drafting = n_max > 0 && most > 0;
        dp.n_max    = std::min({n_max, most, (int) llama_n_ctx(target.ctx) - n_past - 2});
        dp.pos0     = n_past;
        dp.id_last  = last;
        dp.prompt   = &text;
        dp.result   = &draft;
        common_speculative_draft(spec);
        draft.resize(std::min(draft.size(), (size_t) most));
        if (drafter.whole()) {
            checkpoint.load_dft(drafter.ctx, 0, PARTIAL);
        }
        drafter.cut(checkpoint.pos_max + 1);
        if (!draft.empty() && (target.whole() || target.beyond(draft.size()))) {
            checkpoint.update_tgt(target.ctx, 0, PARTIAL);
        }
        if (!draft.empty() && drafter.beyond(draft.size())) {
            checkpoint.update_dft(drafter.ctx, 0, PARTIAL);
        }
    }

    llama_tokens verify() {
        batch.clear();
        batch.add(last, n_past, 0, true);
        for (size_t i = 0; i < draft.size(); ++i) {
            batch.add(draft[i], n_past + 1 + i, 0, true);
        }
        decode();
        return common_sampler_sample_and_accept_n(smpl, target.ctx, draft);
    }

    void restore() {
        checkpoint.load_tgt(target.ctx, 0, PARTIAL);
        checkpoint.load_dft(drafter.ctx, 0, PARTIAL);
        target.cut(checkpoint.pos_max + 1);
        drafter.cut(checkpoint.pos_max + 1);
    }

    void round(int most) {
        propose(most);
        const int n_draft = (int) draft.size();
        int told          = 0;  // sampled tokens that the passes before a replay have told
        llama_tokens ids;
        while (true) {
            const common_sampler_ptr before(draft.empty() ? nullptr : common_sampler_clone(smpl));
            ids                   = verify();
            const size_t rejected = draft.size() + 1 - ids.size();
            if (rejected == 0 || !(target.whole() || target.beyond(rejected))) {
                break;
            }
            draft = ids;  // the accepted tokens and the sampled one are the draft now
            told  = (int) ids.size();
            restore();
            common_sampler_copy(before.get(), smpl);
        }
        common_speculative_accept(spec, 0, ids.size() - 1);
        keep(ids);
        told = std::min(told, (int) ids.size() - 1);
        if (told > 0) {
            out.rounds.push_back({told, n_draft});
        }
        out.rounds.push_back({(int) ids.size() - told, told > 0 ? 0 : n_draft});
    }

    void keep(const llama_tokens & ids) {
        n_past += (int) ids.size();
        for (const llama_token id : ids) {
            text.push_back(last);
            last = id;
            out.tokens.push_back(id);
            if (llama_vocab_is_eog(vocab, id)) {
                break;
            }
        }
        target.cut(n_past);
        drafter.cut(n_past);
    }

    const memory & target;
    const memory & drafter;
    common_speculative * spec;
    common_sampler * smpl;
    const int n_max;
    const llama_vocab * vocab;
    common_batch batch;
    common_prompt_checkpoint checkpoint;
    llama_tokens text, draft;
    llama_token last = 0;
    int n_past       = 0;
    answer out;
};

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

common_params settings(char ** argv) {
    common_params params;
    params.model.path          = argv[1];
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = atoi(argv[4]);
    params.n_ctx                                                  = atoi(argv[5]);
    params.n_parallel                                             = 1;
    params.flash_attn_type   = (llama_flash_attn_type) atoi(argv[7]);  // -1: llama.cpp's choice
    params.sampling.temp     = 0.0f;
    params.warmup            = false;
    params.fit_params        = false;
    params.speculative.types = common_speculative_types_from_names(string_split<std::string>(argv[3], ','));
    params.speculative.draft.mparams.path     = strcmp(argv[2], "-") != 0 ? argv[2] : "";
    params.speculative.draft.n_max            = atoi(argv[6]);
    params.speculative.draft.backend_sampling = atoi(argv[8]) != 0;
    params.speculative.draft.cpuparams = params.speculative.draft.cpuparams_batch = params.cpuparams;
    const auto limits = common_speculative_get_output_limits(
        params.n_batch, 1, std::max(params.speculative.draft.n_max, MOST_TEXT));
    params.n_outputs_max         = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    return params;
}

int run(int argc, char ** argv) {
    if (argc != 9) {
        fprintf(stderr,
            "usage: %s TARGET.gguf HEAD.gguf|- SPEC[,SPEC] N_THREADS N_CTX N_MAX FLASH_ATTN "
            "BACKEND_SAMPLING\n",
            argv[0]);
        return 2;
    }
    common_params params = settings(argv);
    const bool has_head  = params.speculative.has_dft();

    llama_backend_init();
    auto target              = common_init_from_params(params);
    llama_context * ctx_tgt  = target->context();
    common_params params_dft = common_base_params_to_speculative(params);
    common_speculative_init_result_ptr init;
    const auto & types = params.speculative.types;
    const bool drafts = has_head || std::count(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
    if (drafts) {
        init = common_speculative_init_from_params(params_dft, target->model(), ctx_tgt);
    }
    params.speculative.draft.ctx_tgt = ctx_tgt;
    params.speculative.draft.ctx_dft = init ? init->context() : nullptr;
    const memory tgt_memory(ctx_tgt);  // asked before a drafter turns the target's capture on
    if (tgt_memory.type == COMMON_CONTEXT_SEQ_RM_TYPE_NO) {
        throw std::runtime_error("the target's memory cannot go back");
    }
    if (drafts && !params.speculative.draft.ctx_dft) {
        throw std::runtime_error(has_head ? "the drafter's file could not be opened beside the target"
                                          : "the target has no layers that draft-mtp could draft with");
    }
    common_speculative_ptr spec(common_speculative_init(params.speculative, 1));
    common_sampler_ptr smpl(common_sampler_init(target->model(), params.sampling));
    if (!spec) {
        throw std::runtime_error("a drafter of this kind needs a file");
    }
    const memory dft_memory(params.speculative.draft.ctx_dft);
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
        generation one(tgt_memory, dft_memory, spec.get(), smpl.get(), std::max(n_max, n_text));
        const answer a = one.run(prompt, n_predict);
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
        common_log_flush(common_log_main());  // a thread writes those lines, and this one is to be the last
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
