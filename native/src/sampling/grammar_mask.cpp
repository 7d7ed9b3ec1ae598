#include "sampling/grammar_mask.hpp"

#include "error.hpp"
#include "sampling/largest.hpp"
#include "sampling/sampler_kinds.hpp"
#include "sampling/thoughts.hpp"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>

namespace eagle3 {

namespace {

// So many of the likeliest tokens are tested, one step after the other. Where the last step does not decide,
// the mask of the whole vocabulary costs little more.
constexpr size_t STEPS[] = {1, 8, 64, 512};

// So many steps find their tokens faster in the row itself than in a list of all candidates.
constexpr size_t FOUND_IN_ROW[] = {8, 64};

// Says whether a sampler changes each logit alone, or cuts off the end of candidates in falling order, and no
// earlier where candidates at the end are larger.
bool cuts_the_end(const llama_sampler * s) {
    const sampler_kinds & known = sampler_kinds::known();
    return s->iface == known.empty || s->iface == known.top_p || s->iface == known.min_p ||
           s->iface == known.temp;
}

// Says whether a sampler selects a token by logits alone, whatever earlier ones computed from them.
bool selects(const llama_sampler * s) {
    return s->iface == sampler_kinds::known().dist || s->iface == sampler_kinds::known().greedy;
}

// Applies the samplers number `from` up to `end` of a chain.
void apply_links(llama_sampler * sampler, int from, int end, llama_token_data_array & candidates) {
    for (int i = from; i < end; ++i) {
        llama_sampler * s = link(sampler, i);
        if (s->iface->apply != nullptr) {
            llama_sampler_apply(s, &candidates);
        }
    }
}

}  // namespace

int selected_of(const llama_token_data_array & candidates) {
    require(candidates.selected >= 0 && candidates.selected < (int64_t) candidates.size, EAGLE3_E_INTERNAL,
        "no sampler of the chain selected a token");
    return candidates.data[candidates.selected].id;
}

grammar_mask::grammar_mask(llama_sampler * sampler) : sampler_(sampler) {
    const sampler_kinds & known = sampler_kinds::known();
    const auto behind           = [&](int i, const auto & passes) {
        while (i < n_ && passes(link(sampler, i))) {
            ++i;
        }
        return i;
    };
    while (link(sampler, n_) != nullptr) {
        ++n_;
    }
    grammar_at_ =
        behind(0, [&](const llama_sampler * s) { return s->iface != known.grammar && !holds_grammar(s); });
    top_k_at_ = behind(grammar_at_ + 1, [&](const llama_sampler * s) { return s->iface == known.empty; });
    if (top_k_at_ < n_) {
        k_          = std::max(lets_through(sampler, top_k_at_), 0);
        is_bounded_ = behind(top_k_at_ + 1, cuts_the_end) == n_ - 1 && selects(link(sampler, n_ - 1));
    }
}

bool grammar_mask::only_lowers() const {
    for (int i = 0; i < grammar_at_; ++i) {
        if (lets_through(link(sampler_, i)) >= 0) {
            return false;
        }
    }
    return is_lazy();
}

// Tests all but the last of these, except for those that were tested before. A grammar may refuse so much
// work for so few; then the whole vocabulary tells whether it is too much.
bool grammar_mask::test(const std::vector<llama_token_data> & largest) {
    std::vector<llama_token_data> some(largest.begin() + (ptrdiff_t) n_tested_, largest.end() - 1);
    llama_token_data_array tested = {some.data(), some.size(), -1, false};
    try {
        llama_sampler_apply(link(sampler_, grammar_at_), &tested);
    } catch (const std::exception &) {
        failed_ = true;
        return false;
    }
    std::copy_if(some.begin(), some.end(), std::back_inserter(allowed_),
        [](const llama_token_data & t) { return t.logit > -INFINITY; });
    n_tested_ = largest.size() - 1;
    next_     = largest.back().logit;
    return true;
}

// Says whether the first n allowed tokens can stand in one order only: none equals the one after it, nor what
// was not tested.
bool grammar_mask::are_in_one_order(size_t n) const {
    for (size_t i = 0; i < n; ++i) {
        if (!(allowed_[i].logit > (i + 1 < allowed_.size() ? allowed_[i + 1].logit : next_))) {
            return false;
        }
    }
    return true;
}

// Returns how many the samplers from top-k to the last but one keep of the allowed tokens and of n_more
// behind them, which are as large as they can be.
size_t grammar_mask::kept_with(size_t n_more) const {
    std::vector<llama_token_data> some = allowed_;
    some.insert(some.end(), n_more, {LLAMA_TOKEN_NULL, next_, 0.0f});
    llama_token_data_array all = {some.data(), some.size(), -1, false};
    apply_links(sampler_, top_k_at_, n_ - 1, all);
    return all.size;
}

// Says whether what is allowed of these decides what the samplers behind the grammar keep. They are the row's
// first, with those of earlier calls at the beginning; all but the last are tested.
bool grammar_mask::decides(const std::vector<llama_token_data> & largest) {
    if (failed_ || largest.size() < n_tested_ + 2 || !test(largest) || allowed_.empty()) {
        return false;
    }
    if (allowed_.size() >= (size_t) k_) {
        return are_in_one_order(k_);
    }
    if (!is_bounded_ || !std::isfinite(allowed_[0].logit)) {
        return false;
    }
    // Between none and the most and largest that may follow, each case keeps as many as both of these do.
    const size_t n = kept_with(0);
    return n == kept_with(k_ - allowed_.size()) && are_in_one_order(n);
}

// Applies the samplers behind the grammar to what it allows.
int grammar_mask::take() {
    llama_token_data_array all = {allowed_.data(), allowed_.size(), -1, false};
    apply_links(sampler_, top_k_at_, n_, all);
    return selected_of(all);
}

int grammar_mask::take_from_all(llama_token_data_array all) {
    apply_links(sampler_, grammar_at_, n_, all);
    return selected_of(all);
}

int grammar_mask::sample(const float * logits, int n_vocab) {
    for (const size_t n : FOUND_IN_ROW) {
        const int token = only_lowers() ? take_from(first_of(logits, n_vocab, n + 1)) : LLAMA_TOKEN_NULL;
        if (token != LLAMA_TOKEN_NULL) {
            return token;
        }
    }
    static thread_local std::vector<llama_token_data> row;  // kept, for it may be 3 MB
    row.resize(n_vocab);
    for (int i = 0; i < n_vocab; ++i) {
        row[i] = {i, logits[i], 0.0f};
    }
    llama_token_data_array all = {row.data(), row.size(), -1, false};
    apply_links(sampler_, 0, grammar_at_, all);
    auto * const end = all.data + all.size;
    // NaN has no order. Top-k leaves what is sorted as it is, with refused tokens among the others.
    if (all.sorted || std::any_of(all.data, end, is_nan)) {
        return take_from_all(all);
    }
    std::vector<llama_token_data> largest;
    for (const size_t n : STEPS) {
        if (n >= all.size) {
            break;
        }
        if (n > n_tested_) {
            largest.resize(n + 1);
            std::partial_sort_copy(all.data, end, largest.begin(), largest.end(), precedes);
            if (decides(largest)) {
                return take();
            }
        }
    }
    return take_from_all(all);
}

int grammar_mask::take_from(std::vector<llama_token_data> found) {
    if (!only_lowers() || found.empty()) {
        return LLAMA_TOKEN_NULL;
    }
    std::sort(found.begin(), found.end(), precedes);
    const float others         = found.back().logit;  // at most so large
    llama_token_data_array all = {found.data(), found.size(), -1, false};
    apply_links(sampler_, 0, grammar_at_, all);
    if (std::any_of(found.begin(), found.end(), is_nan)) {
        return LLAMA_TOKEN_NULL;
    }
    std::sort(found.begin(), found.end(), precedes);
    while (!found.empty() && !(found.back().logit > others)) {
        found.pop_back();
    }
    found.push_back({LLAMA_TOKEN_NULL, others, 0.0f});
    std::vector<llama_token_data> largest;
    for (const size_t n : STEPS) {
        largest.assign(found.begin(), found.begin() + (ptrdiff_t) std::min(n + 1, found.size()));
        if (decides(largest)) {
            return take();
        }
    }
    return LLAMA_TOKEN_NULL;
}

}  // namespace eagle3
