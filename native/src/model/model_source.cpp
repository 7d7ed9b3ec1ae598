#include "model/model_source.hpp"

#include "eagle3.h"
#include "error.hpp"
#include "llama-ext.h"
#include "sampling/largest.hpp"

#include <cmath>

namespace eagle3 {

namespace {

// A prompt of n tokens costs about what n / READ_PER_TOKEN tokens of an answer gain, so that one which ends
// before is not drafted for. A row of a prompt takes an eighth of one that is decoded alone, and drafts that
// are worth it bring a third.
constexpr int READ_PER_TOKEN = 64, READ_AT_ONCE = 64;

// Logits so far below the largest add nothing to the sum of a float's softmax that a draft could tell.
constexpr float FAR = 16.0f;

// Returns the k likeliest tokens of the first n_vocab of a row, with their probabilities, the likeliest
// first.
std::vector<llama_token_data> likeliest(const float * logits, int n_vocab, int k) {
    std::vector<llama_token_data> out = first_of(logits, n_vocab, (size_t) k);
    std::sort(out.begin(), out.end(), precedes);
    if (out.empty() || !std::isfinite(out[0].logit)) {
        return {};
    }
    float sum = 0.0f;
    for (int i = 0; i < n_vocab; ++i) {
        sum += logits[i] > out[0].logit - FAR ? std::exp(logits[i] - out[0].logit) : 0.0f;
    }
    for (llama_token_data & t : out) {
        t.p = std::exp(t.logit - out[0].logit) / sum;
    }
    return out;
}

}  // namespace

model_source::model_source(drafter_model & own, const text_source & text)
    : own_(own), text_(text), ctx_(own.ctx()), memory_(own.ctx(), own.n_slots()),
      batch_(llama_batch_init((int) llama_n_batch(own.ctx()), 0, 1)),
      n_batch_((int) llama_n_batch(own.ctx())), n_ctx_((int) llama_n_ctx_seq(own.ctx())), of_(own.n_slots()) {
    batch_.n_tokens = 0;
    llama_memory_clear(memory_.handle, false);  // texts of an earlier session
}

model_source::~model_source() {
    llama_batch_free(batch_);
}

// -- decodes ----------------------------------------------------------------------------------------------

void model_source::add(int slot, int32_t token, int at, bool logits) {
    const int i         = batch_.n_tokens++;
    batch_.token[i]     = token;
    batch_.pos[i]       = at;
    batch_.n_seq_id[i]  = 1;
    batch_.seq_id[i][0] = slot;
    batch_.logits[i]    = logits;
}

// Decodes the batch, with as many threads as the target has now: the threads of one pool serve both. What
// fails here is never the target's failure.
bool model_source::run() {
    llama_set_n_threads(ctx_, llama_n_threads(own_.target()), llama_n_threads_batch(own_.target()));
    int code = -1;
    try {
        code = llama_decode(ctx_, batch_);
    } catch (const std::exception &) {
    }
    batch_.n_tokens = 0;
    return code == 0 || fail();
}

// What the model's memory holds is not known any more.
bool model_source::fail() {
    if (!failed_) {
        log_error("eagle3: the draft model cannot go on, and drafts no more");
    }
    failed_ = true;
    return false;
}

// Drops what the last draft decoded behind the text.
bool model_source::drop_draft(int slot) {
    if (of_[slot].from < text_.from(slot)) {
        start_over(slot, text_.from(slot));
    }
    of_[slot].drafted.clear();
    return !failed_ && (memory_.go_back(slot, memory_.held(slot), 0) || fail());
}

// Decodes what of the text it has not read.
void model_source::read(int slot) {
    seen & s = of_[slot];
    if (!drop_draft(slot)) {
        return;
    }
    for (int pos = read_to(slot), end = text_.end(slot); pos < end;) {
        memory_.keep_checkpoint(slot);
        const int to = std::min(pos + n_batch_, end);
        for (int i = pos; i < to; ++i) {
            add(slot, text_.token(slot, i), i - s.from, i == end - 1);
        }
        if (!run()) {
            return;
        }
        n_read_ += to - pos;
        pos = to;
        memory_.decoded(slot, pos - s.from);
    }
}

float model_source::measure(int slot, int /* n_past */, int n) {
    const int held = memory_.held(slot);
    require(held + n <= n_ctx_ && drop_draft(slot), EAGLE3_E_UNSUPPORTED,
        "the draft model has no room for the rows that are measured");
    if (!memory_.drops_any()) {
        memory_.begin_round(slot);
    }
    const int64_t start = ggml_time_us();
    for (int i = 0; i < n; ++i) {
        add(slot, (100 + 37 * i) % own_.n_shared(), held + i, i == n - 1);
    }
    require(run(), EAGLE3_E_DECODE, "the draft model could not decode");
    likeliest(llama_get_logits_ith(ctx_, n - 1), own_.n_shared(), 1);
    const float seconds = 1e-6f * (ggml_time_us() - start);
    drop_draft(slot);
    return seconds;
}

// -- drafts -----------------------------------------------------------------------------------------------

bool model_source::ready(int slot) const {
    const int n = n_unread(slot);
    return on_ && !failed_ && (n <= READ_AT_ONCE || of_[slot].n_answer >= n / READ_PER_TOKEN);
}

// A memory that cannot drop rows has its checkpoint behind the text, so all of it is read before.
void model_source::catch_up(int slot, int at_most) {
    if (n_pending(slot) > at_most || !memory_.drops_any()) {
        read(slot);
    }
}

void model_source::offer_children(draft_tree & g, int a, int row, int parent) {
    int rank = 0;
    for (const llama_token_data & t : likeliest(
             llama_get_logits_ith(ctx_, row), own_.n_shared(), std::min(g.asks[a].width, own_.n_shared()))) {
        g.level.push_back(g.offer(id, a, parent, t.id, t.p, rank++));
    }
    for (const int i : g.children_of_others(a, parent)) {
        g.level.push_back(i);
    }
}

// The first pass reads what waits, with the token that each ask goes on from.
void model_source::begin(draft_tree & g, const std::vector<int> & asks) {
    chains_.assign(g.asks.size(), {});
    std::vector<int> of, rows;
    for (const int a : asks) {
        const int slot = g.asks[a].slot, end = text_.end(slot), from = of_[slot].from;
        if (failed_ || g.asks[a].token >= own_.n_shared() || end - from + 1 > n_ctx_ || !drop_draft(slot)) {
            continue;
        }
        if (!memory_.drops_any()) {
            memory_.begin_round(slot);
        }
        for (int i = read_to(slot); i < end; ++i) {
            add(slot, text_.token(slot, i), i - from, false);
        }
        add(slot, g.asks[a].token, end - from, true);
        of.push_back(a);
        rows.push_back(batch_.n_tokens - 1);
    }
    if (of.empty() || !run()) {
        return;
    }
    for (size_t i = 0; i < of.size(); ++i) {
        const int a = of[i], slot = g.asks[a].slot;
        n_read_ += n_unread(slot);
        memory_.decoded(slot, text_.end(slot) - of_[slot].from);
        of_[slot].drafted.assign(1, g.asks[a].token);
        chains_[a].grows = true;
        offer_children(g, a, rows[i], -1);
    }
}

int model_source::n_extensible(int a) const {
    return chains_[a].grows && !failed_ ? 1 : 0;
}

// A chain has one tip, so of an ask the first of these nodes is extended.
void model_source::extend(draft_tree & g, const std::vector<int> & nodes) {
    std::vector<int> extended;
    for (const int v : nodes) {
        const draft_tree::node & n = g.nodes[v];
        const int slot = g.asks[n.ask].slot, at = text_.end(slot) - of_[slot].from + n.depth;
        chain & c = chains_[n.ask];
        if (!c.grows || n.parent != c.tip) {
            continue;
        }
        c.grows = n.token < own_.n_shared() && at < n_ctx_;
        if (c.grows) {
            c.tip = v;
            add(slot, n.token, at, true);
            extended.push_back(v);
        }
    }
    if (extended.empty() || !run()) {
        return;
    }
    for (size_t i = 0; i < extended.size(); ++i) {
        const int v = extended[i], a = g.nodes[v].ask;
        of_[g.asks[a].slot].drafted.push_back(g.nodes[v].token);
        offer_children(g, a, (int) i, v);
    }
}

// -- the text ---------------------------------------------------------------------------------------------

void model_source::start_over(int slot, int pos) {
    of_[slot]      = {};
    of_[slot].from = pos;
    memory_.clear(slot);
}

// The source of texts is told of these tokens afterwards.
void model_source::kept(const kept_tokens & k) {
    const int n = (int) k.tokens.size();
    if (k.pos != text_.end(k.slot) || k.pos < of_[k.slot].from) {
        start_over(k.slot, k.pos);  // a gap
    }
    seen & s   = of_[k.slot];
    s.n_answer = k.prompt ? 0 : s.n_answer + n;
    if (memory_.drops_any() && read_to(k.slot) == k.pos) {
        const auto end =
            std::mismatch(k.tokens.begin(), k.tokens.end(), s.drafted.begin(), s.drafted.end()).first;
        const int n_stay = (int) (end - k.tokens.begin());
        n_reused_ += n_stay;
        memory_.decoded(k.slot, memory_.held(k.slot) + n_stay);
    }
    s.drafted.clear();
    for (int i = n - 1; i >= 0; --i) {
        if (k.tokens[i] >= own_.n_shared()) {
            start_over(k.slot, k.pos + i + 1);  // behind a token that it does not know
            break;
        }
    }
}

void model_source::rewind(int slot, int n_past) {
    of_[slot].drafted.clear();
    if (n_past < of_[slot].from) {
        start_over(slot, n_past);
    } else if (n_past < read_to(slot)) {
        if (!memory_.go_back(slot, n_past - of_[slot].from, 0)) {
            fail();
        }
    }
}

void model_source::reset(int slot, int n_past) {
    start_over(slot, n_past);
}

pass_source::bytes model_source::memory() const {
    bytes b;
    for (const auto & [type, data] : llama_get_memory_breakdown(ctx_)) {
        b.weights += data.model;
        b.cache += data.context;
        b.compute += data.compute;
    }
    b.cache += memory_.checkpoint_bytes();
    return b;
}

}  // namespace eagle3
