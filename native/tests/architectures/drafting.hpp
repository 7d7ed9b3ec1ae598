// Rounds of several slots whose sampler decides what becomes of the drafts: it agrees with most draft tokens, so that
// drafts are rejected at every depth, and texts repeat themselves. Each row that stays is compared with plain decoding.
#pragma once

#include "eagle3.h"
#include "plain_decoding.hpp"

#include <numeric>

namespace drafting {

constexpr int N_TEXT = 150;  // a text that is longer has ended: the slot begins another
constexpr int N_WORDS = 24;  // tokens that texts are made of

struct failure : std::runtime_error {
    explicit failure(const std::string & why) : std::runtime_error(why) {}
};

inline int64_t must(int64_t code) {
    return code < 0 ? throw failure(eagle3_last_error()) : code;
}

enum kind { ROW, GIVEN_CHAIN, GIVEN_TREE, TEXT, TEXT_TREE, HEAD_CHAIN, HEAD_TREE, N_KINDS };

// What was done, of one cell of the table.
struct tally {
    int64_t rounds = 0, rows = 0, differing = 0;  // rows that stayed
    int64_t drafted[N_KINDS] = {}, accepted[N_KINDS] = {};
    int64_t rejected[EAGLE3_MAX_ROWS] = {};  // by depth from 1 on; first, drafts of which all was accepted
    int64_t rewinds = 0, rewinds_refused = 0;
};

struct random {
    std::mt19937 rng{5};

    int below(int n) { return (int) (rng() % (unsigned) n); }
    int32_t word() { return 3 + 5 * below(N_WORDS); }
};

// A sampler that agrees with a draft token, if there is one, in four of five cases.
struct agreeing {
    random * rng;
    std::vector<int32_t> tokens, parents;  // of the draft
    int at = -1;                           // the draft token that was sampled last
    int depth = 1, rejected_at = 0;        // of the row that is sampled next; where the draft ended, 0 for its end
    llama_sampler * sampler;

    explicit agreeing(random & r) : rng(&r) {
        static llama_sampler_i functions = {};
        functions.apply                  = [](llama_sampler * s, llama_token_data_array * all) { ((agreeing *) s->ctx)->choose(all); };
        sampler                          = llama_sampler_init(&functions, this);
    }
    ~agreeing() { llama_sampler_free(sampler); }
    agreeing(const agreeing &)             = delete;
    agreeing & operator=(const agreeing &) = delete;

    void choose(llama_token_data_array * all) {
        std::vector<int> children;
        for (size_t i = 0; i < tokens.size(); ++i) {
            if (parents[i] == at) {
                children.push_back((int) i);
            }
        }
        const bool agrees   = !children.empty() && rng->below(5) > 0;
        const int32_t token = agrees ? tokens[children[rng->below((int) children.size())]] : rng->word();
        const auto next     = std::find_if(children.begin(), children.end(), [&](int i) { return tokens[i] == token; });
        rejected_at         = next == children.end() && !children.empty() ? depth : 0;
        at                  = next == children.end() ? -2 : *next;
        ++depth;
        for (size_t i = 0; i < all->size; ++i) {
            all->selected = all->data[i].id == token ? (int64_t) i : all->selected;
        }
    }
};

struct saved {
    plain::text text;
    std::vector<uint8_t> target, drafts;
};

class session {
  public:
    random rng;
    std::vector<plain::text> texts;
    std::vector<kind> kinds;
    bool whole_prompts = true;  // else each prompt is decoded row by row

    session(llama_model * model, const llama_context_params & params, plain::decoding & reference, eagle3_head * head, tally & t)
        : texts(params.n_seq_max), ctx_(plain::context(model, params)), reference_(reference), tally_(t) {
        must(eagle3_session_open(ctx_.get(), head, (int) texts.size(), &s_));
        drafts_ = eagle3_state_size(s_, 0) >= 0;
        for (size_t i = 0; i < texts.size(); ++i) {
            samplers_.push_back(std::make_unique<agreeing>(rng));
        }
    }
    ~session() { eagle3_session_close(s_); }
    session(const session &)             = delete;
    session & operator=(const session &) = delete;

    bool drafts() const { return drafts_; }  // whether anything may draft
    bool can_tree() { return must(eagle3_can_tree(s_)) == 1; }
    bool over(int slot) const { return (int) texts[slot].tokens.size() >= N_TEXT; }

    // -- texts --

    void begin(int slot) {
        compare(slot);
        must(eagle3_rewind(s_, slot, 0));
        texts[slot].cut(0);
        std::vector<int32_t> prompt;
        const int n = 9 + rng.below(16);
        for (int i = 0; i < n; ++i) {
            prompt.push_back(i < 7 || rng.below(6) == 0 ? rng.word() : prompt[i - 7]);
        }
        read(slot, prompt);
        texts[slot].next = rng.word();
    }

    // Decodes tokens after the slot's text.
    void read(int slot, const std::vector<int32_t> & tokens) {
        plain::text & t  = texts[slot];
        const size_t step = whole_prompts ? 48 : 1;
        for (size_t from = 0; from < tokens.size(); from += step) {
            const int n    = (int) std::min(step, tokens.size() - from);
            const bool all = rng.below(2) == 0;
            must(eagle3_prefill(s_, slot, tokens.data() + from, n, all));
            for (int i = 0; i < n; ++i) {
                t.tokens.push_back(tokens[from + i]);
                t.rows.push_back(all || i == n - 1 ? plain::row_of(ctx_.get(), i) : plain::logits_row());
                tally_.rows += !t.rows.back().empty();
            }
        }
    }

    void compare(int slot) { tally_.differing += reference_.differing(texts[slot]); }

    // Cuts the slot's text back to n tokens. If the library cannot, they are decoded anew.
    void rewind(int slot, int n) {
        compare(slot);
        ++tally_.rewinds;
        plain::text & t                 = texts[slot];
        const std::vector<int32_t> kept = {t.tokens.begin(), t.tokens.begin() + n};
        if (const int code = eagle3_rewind(s_, slot, n); code == EAGLE3_OK) {
            t.cut(n);
            return;
        } else if (code != EAGLE3_E_UNSUPPORTED || eagle3_n_past(s_, slot) != (int) t.tokens.size()) {
            throw failure(std::string("a rewind changed something: ") + eagle3_last_error());
        }
        ++tally_.rewinds_refused;
        must(eagle3_rewind(s_, slot, 0));
        t.cut(0);
        read(slot, kept);
    }

    // -- rounds --

    void round(const std::vector<int> & slots) {
        if (drafts_) {
            must(eagle3_plan_set(s_, &cheap_rows()));
        }
        std::vector<eagle3_ask> asks;
        std::vector<kind> of;
        given_.resize(slots.size());
        for (size_t i = 0; i < slots.size(); ++i) {
            of.push_back(kinds[rng.below((int) kinds.size())]);
            asks.push_back(ask(slots[i], of.back(), given_[i]));
        }
        const int n = (int) slots.size();
        std::vector<int32_t> drafted(n), out((size_t) n * EAGLE3_MAX_ROWS), counts(n);
        must(eagle3_round_draft(s_, asks.data(), n, drafted.data()));
        must(eagle3_round_decode(s_));
        std::vector<llama_sampler *> samplers;
        for (int i = 0; i < n; ++i) {
            samplers.push_back(sampler_for(i, slots[i], drafted[i]));
        }
        must(eagle3_round_verify(s_, samplers.data(), out.data(), counts.data()));
        for (int i = 0; i < n; ++i) {
            take(slots[i], of[i], out.data() + (size_t) i * EAGLE3_MAX_ROWS, (int) must(counts[i]));
        }
        must(eagle3_round_commit(s_, counts.data()));
        ++tally_.rounds;
    }

    // -- states --

    saved save(int slot, bool whole) {
        saved out;
        must(eagle3_settle(s_, slot));
        out.text = texts[slot];
        if (drafts_) {
            out.drafts.resize(must(eagle3_state_size(s_, slot)));
            must(eagle3_state_get(s_, slot, out.drafts.data(), (int64_t) out.drafts.size()));
        }
        out.target.resize(whole ? llama_state_get_size(ctx_.get()) : llama_state_seq_get_size(ctx_.get(), slot));
        out.target.resize(whole ? llama_state_get_data(ctx_.get(), out.target.data(), out.target.size())
                                : llama_state_seq_get_data(ctx_.get(), out.target.data(), out.target.size(), slot));
        return out;
    }

    void restore(int slot, const saved & from, bool whole) {
        compare(slot);
        must(eagle3_rewind(s_, slot, 0));
        const size_t n = whole ? llama_state_set_data(ctx_.get(), from.target.data(), from.target.size())
                               : llama_state_seq_set_data(ctx_.get(), from.target.data(), from.target.size(), slot);
        if (n != from.target.size()) {
            throw failure("llama.cpp does not restore the target's state");
        }
        must(drafts_ ? eagle3_state_set(s_, slot, from.drafts.data(), (int64_t) from.drafts.size())
                     : eagle3_state_reset(s_, slot, (int) from.text.tokens.size()));
        texts[slot] = from.text;
    }

  private:
    llama_context_ptr ctx_;
    plain::decoding & reference_;
    tally & tally_;
    eagle3_session * s_ = nullptr;
    bool drafts_        = false;
    std::vector<std::unique_ptr<agreeing>> samplers_;
    std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> given_;  // tokens and parents

    // Costs by which every draft pays: what is drafted must not depend on this machine.
    static const eagle3_costs & cheap_rows() {
        static const eagle3_costs costs = [] {
            eagle3_costs c = {};
            for (int n = 1; n <= EAGLE3_MAX_ROWS; ++n) {
                c.layers[n] = 1.0f + 0.001f * n;
                c.output[n] = c.head[n] = 0.001f * n;
            }
            return c;
        }();
        return costs;
    }

    eagle3_ask ask(int slot, kind k, std::pair<std::vector<int32_t>, std::vector<int32_t>> & given) {
        eagle3_ask a = {};
        a.slot       = slot;
        a.token      = texts[slot].next;
        a.n_max      = 7;
        a.depth      = k == HEAD_TREE ? 4 : 0;
        a.width      = k == HEAD_TREE || k == TEXT_TREE ? 3 : 1;
        a.text       = 1;
        a.kind       = k == ROW          ? EAGLE3_PLAIN
                       : k <= GIVEN_TREE ? EAGLE3_GIVEN
                       : k <= TEXT_TREE  ? EAGLE3_PLANNED
                       : k == HEAD_CHAIN ? EAGLE3_CHAIN
                                         : EAGLE3_TREE;
        if (a.kind == EAGLE3_GIVEN) {
            auto & [tokens, parents] = given;
            tokens.resize(1 + rng.below(7));
            parents.resize(tokens.size());
            for (size_t i = 0; i < tokens.size(); ++i) {
                // in a tree, two follow each odd one
                parents[i] = k == GIVEN_CHAIN ? (int) i - 1 : i < 2 ? -1 : ((int) i - 2) / 2 * 2;
                tokens[i]  = rng.word();
                tokens[i] += k == GIVEN_TREE && i % 2 ? 1 : 0;  // siblings are different tokens
            }
            a.n       = (int) tokens.size();
            a.tokens  = tokens.data();
            a.parents = parents.data();
        }
        return a;
    }

    // The sampler of the ask number i, told what was drafted.
    llama_sampler * sampler_for(int i, int slot, int n_drafted) {
        agreeing & a = *samplers_[slot];
        a.tokens.assign(EAGLE3_MAX_DRAFT, 0);
        a.parents.assign(EAGLE3_MAX_DRAFT, 0);
        a.at          = -1;
        a.depth       = 1;
        a.rejected_at = 0;
        must(eagle3_round_drafted(s_, i, a.tokens.data(), a.parents.data(), nullptr, nullptr));
        a.tokens.resize(n_drafted);
        a.parents.resize(n_drafted);
        return a.sampler;
    }

    // Takes the rows that verification sampled from: they stay.
    void take(int slot, kind k, const int32_t * out, int count) {
        plain::text & t = texts[slot];
        const agreeing & a = *samplers_[slot];
        for (int i = 0; i < count; ++i) {
            t.tokens.push_back(t.next);
            t.rows.push_back(plain::row_of(ctx_.get(), (int) must(eagle3_verified_row(s_, slot, i))));
            tally_.rows += 1;
            tally_.differing += t.rows.back().empty();
            t.next = out[i];
        }
        tally_.drafted[k] += (int64_t) a.tokens.size();
        tally_.accepted[k] += count - 1;
        ++tally_.rejected[a.rejected_at];
    }
};

}  // namespace drafting
