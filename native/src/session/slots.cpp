#include "session/slots.hpp"

#include "model/model_source.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace eagle3 {

namespace {

constexpr char NO_CAPTURE[] = "this target does not let the layers be captured that the head reads";

// Returns a number that differs between models of other sizes, or of other vocabularies (FNV-1a).
uint64_t mark_of(const llama_model * model) {
    uint64_t mark  = 0xcbf29ce484222325;
    const auto add = [&](const void * data, size_t n) {
        for (size_t i = 0; i < n; ++i) {
            mark = (mark ^ ((const uint8_t *) data)[i]) * 0x100000001b3;
        }
    };
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const uint64_t sizes[]    = {llama_model_n_params(model), (uint64_t) llama_model_n_embd(model),
        (uint64_t) llama_model_n_layer(model), (uint64_t) llama_vocab_n_tokens(vocab)};
    add(sizes, sizeof(sizes));
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        const bool has_text = llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE;
        const char * text   = has_text ? llama_vocab_get_text(vocab, token) : "";
        add(text, strlen(text) + 1);
    }
    return mark;
}

// Refuses targets that do not write a text from left to right, or not from this text alone.
void check_decodes(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    require(!llama_model_is_diffusion(model), EAGLE3_E_UNSUPPORTED,
        "the target is a diffusion model: it fills in its whole text again and again, and does not decode it "
        "from left to right, so that there is no next token to draft");
    require(!llama_model_has_encoder(model), EAGLE3_E_UNSUPPORTED,
        "the target has an encoder, which must read another text before its decoder writes one: take a model "
        "that is a decoder alone");
    require(
        llama_get_memory(ctx) != nullptr, EAGLE3_E_UNSUPPORTED, "the target has no memory of its sequence");
}

// Says why a row's logits have other bits when it is decoded alone than among others; empty if they have not.
// minimax-01 sums its linear attention over the rows of a batch together, and minimax-m3 has another graph
// for one row, where it uses flash attention.
std::string rows_differ(const llama_model * model) {
    char arch[64] = "";
    llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch));
    const bool differ = strcmp(arch, "minimax-01") == 0 || strcmp(arch, "minimax-m3") == 0;
    return !differ ? ""
                   : format("llama.cpp computes a row of %s alone otherwise than among others: drafts could "
                            "change the text",
                         arch);
}

}  // namespace

slots::slots(llama_context * ctx, const eagle3::head * h, int n_slots)
    : ctx(ctx), target(ctx, n_slots), memory(target.handle), n_batch((int) llama_n_batch(ctx)),
      n_ctx((int) llama_n_ctx_seq(ctx)),
      n_vocab(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))),
      most_rows(std::min({n_batch, (int) llama_n_ubatch(ctx), MAX_ROWS})), slots_(n_slots) {
    const llama_model * model = llama_get_model(ctx);
    check_decodes(ctx);
    const std::string differ = rows_differ(model);
    if (h) {
        require(model == h->target, EAGLE3_E_ARGUMENT, "the head was opened for another model");
        require(differ.empty(), EAGLE3_E_UNSUPPORTED, differ);
        auto own = std::make_unique<head_source>(ctx, *h, n_slots, n_ctx);
        require(llama_has_embeddings_layer_inp(ctx), EAGLE3_E_UNSUPPORTED, NO_CAPTURE);
        head_ = own.get();
        set_passes(std::move(own));
    }
    if (differ.empty()) {
        auto own = std::make_unique<text_source>(n_slots, n_ctx, n_vocab, mark_of(model));
        text_    = own.get();
        own->id  = TEXT;
        sources_.push_back(std::move(own));
        auto of_grammars = std::make_unique<grammar_source>(llama_model_get_vocab(model), n_slots);
        grammar_         = of_grammars.get();
        add_source(std::move(of_grammars));
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (int32_t token = 0; token < n_vocab; ++token) {
        if (llama_vocab_is_eog(vocab, token)) {
            ends_.push_back(token);
        }
    }
    batch_ = llama_batch_init(n_batch, 0, 1);
}

slots::~slots() {
    llama_batch_free(batch_);
}

slot_state & slots::at(int slot) {
    require(slot >= 0 && slot < size(), EAGLE3_E_ARGUMENT, format("no slot %d", slot));
    return slots_[slot];
}

const slot_state & slots::at(int slot) const {
    return const_cast<slots *>(this)->at(slot);
}

void slots::check_tokens(const int32_t * tokens, int n) const {
    for (int i = 0; i < n; ++i) {
        require(tokens[i] >= 0 && tokens[i] < n_vocab, EAGLE3_E_ARGUMENT,
            format("token %d is not in the vocabulary", tokens[i]));
    }
}

// -- sources ----------------------------------------------------------------------------------------------

void slots::add_source(std::unique_ptr<source> source) {
    const int id           = OTHER + (int) sources_.size() - (passes_ != nullptr) - (text_ != nullptr);
    const std::string name = source->name();
    require(id < MAX_SOURCES, EAGLE3_E_ARGUMENT,
        format("a session has at most %d sources of drafts: there is no room for %s", MAX_SOURCES,
            name.c_str()));
    require(dynamic_cast<pass_source *>(source.get()) == nullptr, EAGLE3_E_ARGUMENT,
        "a source that takes passes is none of those without cost: see set_passes");
    bool taken =
        name == "target" || name == "both";  // these say that none or several sources offered a token
    for (int other = 0; other < id; ++other) {
        taken = taken || name == source_name(other);
    }
    require(!taken, EAGLE3_E_ARGUMENT,
        format("a source of drafts cannot be named %s: the name is taken", name.c_str()));
    source->id = id;
    sources_.push_back(std::move(source));
}

void slots::set_passes(std::unique_ptr<pass_source> source) {
    require(passes_ == nullptr, EAGLE3_E_ARGUMENT, "the session has a source that takes passes already");
    passes_    = source.get();
    source->id = PASSES;
    sources_.insert(sources_.begin(), std::move(source));
}

void slots::use(drafter_model & own) {
    require(own.target() == ctx && own.n_slots() == size(), EAGLE3_E_ARGUMENT,
        "the draft model was opened for another context, or for another number of slots");
    const bool begun = std::any_of(slots_.begin(), slots_.end(), [](const auto & s) { return s.n_past > 0; });
    require(!begun, EAGLE3_E_ARGUMENT, "a draft model comes before the first prompt");
    require(text_ != nullptr, EAGLE3_E_UNSUPPORTED, rows_differ(llama_get_model(ctx)));
    set_passes(std::make_unique<model_source>(own, *text_));
}

const char * slots::source_name(int id) const {
    if (id == PASSES || id == TEXT) {
        return id == TEXT ? text_source::NAME : passes_ ? passes_->name() : head_source::NAME;
    }
    const auto at =
        std::find_if(sources_.begin(), sources_.end(), [&](const auto & from) { return from->id == id; });
    return at == sources_.end() ? nullptr : (*at)->name();
}

head_source & slots::need_head() const {
    require(head_ != nullptr, EAGLE3_E_ARGUMENT, "the session has no head");
    return *head_;
}

bool slots::ready(int slot) const {
    return std::any_of(
        sources_.begin(), sources_.end(), [&](const auto & from) { return from->ready(slot); });
}

void slots::tell(const kept_tokens & k) {
    rethrow(for_all(sources_, [&](const auto & from) { from->kept(k); }));
}

void slots::apply_wanted() {
    if (passes_) {
        passes_->set_on(on_);
    }
}

// -- texts ------------------------------------------------------------------------------------------------

void slots::rewind(int slot, int n_past) {
    if (!target.go_back(slot, n_past, known_from(slot))) {
        throw error(EAGLE3_E_UNSUPPORTED, "the target cannot go back to a part of this sequence");
    }
    wait_from(slot, n_past);
    at(slot).n_past = n_past;
    for (const auto & from : sources_) {
        from->rewind(slot, n_past);
    }
}

void slots::reset(int slot, int n_past) {
    slot_state & s = at(slot);
    s              = slot_state();
    s.n_past       = n_past;
    target.is_another_text(slot, n_past);
    for (const auto & from : sources_) {
        from->reset(slot, n_past);
    }
}

void slots::put_row(int row, int32_t token, int pos, int slot, bool logits) {
    batch_.token[row]     = token;
    batch_.pos[row]       = pos;
    batch_.n_seq_id[row]  = 1;
    batch_.seq_id[row][0] = slot;
    batch_.logits[row]    = logits;
}

void slots::check_text(int slot, const int32_t * tokens, int n) const {
    const slot_state & s = at(slot);
    require(
        n >= 1 && n <= n_batch, EAGLE3_E_ARGUMENT, format("a batch of %d tokens, n_batch is %d", n, n_batch));
    require(s.n_past + n <= n_ctx, EAGLE3_E_ARGUMENT,
        format("%d tokens do not fit after %d of %d", n, s.n_past, n_ctx));
    check_tokens(tokens, n);
}

kept_tokens slots::lay_out_text(int slot, const int32_t * tokens, int n, bool all_logits) {
    const slot_state & s = at(slot);
    kept_tokens k        = {slot, s.n_past, {tokens, tokens + n}, std::vector<int32_t>(n), true};
    std::iota(k.rows.begin(), k.rows.end(), 0);
    for (int i = 0; i < n; ++i) {
        put_row(i, tokens[i], s.n_past + i, slot, all_logits || i == n - 1);
    }
    return k;
}

void slots::run_rows(int n, const int * of, int n_of) {
    batch_.n_tokens = n;
    if (passes_) {
        passes_->expect(n);
    }
    int rc = 0;
    try {
        rc = llama_decode(ctx, batch_);
    } catch (const std::exception & e) {  // a graph that cannot be built, say, or an evaluation callback's
        drop_rows(of, n_of, true);
        require(strncmp(e.what(), "failed to allocate compute", 26) != 0, EAGLE3_E_MEMORY,
            "not enough memory to compute a batch: give a smaller n_batch or n_ctx, or a smaller "
            "n_gpu_layers");
        throw;
    }
    if (rc == 0) {
        return;
    }
    drop_rows(of, n_of, rc != 1 && rc != -1);  // these say that nothing was computed
    require(rc != -4, EAGLE3_E_UNSUPPORTED, NO_CAPTURE);
    require(rc != -2, EAGLE3_E_MEMORY, "not enough memory to decode");
    throw error(
        EAGLE3_E_DECODE, rc == 1 ? "the context's memory is full" : format("llama_decode returned %d", rc));
}

void slots::kept_prompt(const kept_tokens & k) {
    slot_state & s = at(k.slot);
    holds(k.slot, s.n_past + (int) k.tokens.size());
    s.trust.fill(1.0f);
    tell(k);
}

// -- state ------------------------------------------------------------------------------------------------

void slots::need_state() const {
    require(passes_ || text_, EAGLE3_E_UNSUPPORTED, "nothing can draft for this target: there is no state");
}

int64_t slots::state_size(int slot) const {
    int64_t size = 0;
    for (const auto & from : sources_) {
        size += from->state_size(slot);
    }
    return size;
}

void slots::state_get(int slot, uint8_t * out) const {
    for (const auto & from : sources_) {
        from->save(slot, at(slot).n_past, out);
        out += from->state_size(slot);
    }
}

std::vector<int64_t> slots::check_state(const uint8_t * data, int64_t size) const {
    std::vector<int64_t> begins(1, 0);
    for (const auto & from : sources_) {
        const int64_t left = size - begins.back();
        // A state that was saved before there was this source ends here.
        const bool has = left > 0 || begins.size() == 1;
        begins.push_back(begins.back() + (has ? from->check(data + begins.back(), left) : 0));
    }
    require(begins.back() == size, EAGLE3_E_FORMAT, "the state is damaged or belongs to another drafter");
    return begins;
}

void slots::state_set(int slot, const uint8_t * data, const std::vector<int64_t> & begins) {
    slot_state s;
    s.n_past = head_ ? head_source::saved_n_past(data) : text_source::saved_n_past(data);  // the first source
    for (size_t i = 0; i < sources_.size(); ++i) {
        begins[i] == begins[i + 1] ? sources_[i]->reset(slot, s.n_past)
                                   : sources_[i]->restore(slot, s.n_past, data + begins[i]);
    }
    at(slot) = std::move(s);
    // The caller has restored the target's memory, or left it as it was: tokens may wait there.
    target.is_another_text(slot, target.holds_of(slot, at(slot).n_past, known_from(slot)));
    wait_from(slot, at(slot).n_past);
}

}  // namespace eagle3
