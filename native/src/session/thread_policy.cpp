// See thread_policy.hpp.
#include "session/thread_policy.hpp"

#include "llama.h"

#include <algorithm>

namespace eagle3 {

// The numbers are all, one fewer (another program has one core), then half, a quarter and so on.
void thread_policy::set_most(int one, int many, bool fixed) {
    if (one == one_ && many == many_ && fixed == fixed_) {
        return;
    }
    one_     = one;
    many_    = many;
    fixed_   = fixed;
    numbers_ = {one};
    for (int n = one - 1, part = one; n >= 1 && !fixed; n = part) {
        if (n < numbers_.back()) {
            numbers_.push_back(n);
        }
        part /= 2;
    }
    cost_.assign(numbers_.size(), 1.0f);
    for (size_t i = 0; i < numbers_.size(); ++i) {
        cost_[i] = (float) one / (float) numbers_[i];  // at most, on a machine that does nothing else
    }
    home_       = 0;
    trial_      = -1;
    n_seen_     = 0;
    since_      = 0;
    excess_     = 0.0f;
    wait_fewer_ = tune_.first_wait;
    wait_more_  = tune_.first_wait_more;
}

void thread_policy::measured(const std::vector<float> & seconds) {
    home_ = 0;
    for (size_t i = 0; i < numbers_.size(); ++i) {
        const bool is_known = seconds[i] > 0.0f;
        cost_[i]            = is_known ? seconds[i] : seconds[0] * (float) numbers_[0] / (float) numbers_[i];
        home_               = is_known && cost_[i] < tune_.better * cost_[home_] ? (int) i : home_;
    }
    n_seen_ = 1;
    begin_unit();
}

void thread_policy::begin_unit() {
    const float unit = cost_[home_];
    for (float & c : cost_) {
        c /= unit;
    }
    trial_  = -1;
    excess_ = 0.0f;
}

// It is a mean, not a median: a thread that another program delays is delayed in some rounds only.
void thread_policy::saw(float ratio) {
    ratio = std::min(ratio, tune_.most_ratio);
    if (numbers_.size() == 1) {
        return;
    }
    if (trial_ >= 0) {
        tried_ += ratio;
        ++n_tried_;
        if (n_tried_ == tune_.trial || is_lost()) {
            end_trial();
        }
        return;
    }
    n_seen_ = std::min(n_seen_ + 1, tune_.window);
    cost_[home_] += (ratio - cost_[home_]) / (float) n_seen_;
    ++since_;
    see_excess(std::min(ratio, tune_.most_excess));
    begin_trial();
}

// The excess is a cumulative sum, as detectors of changes use it: it stays near zero while the present number
// is the better one, and grows with each round that fewer threads would have made shorter.
void thread_policy::see_excess(float ratio) {
    if (home_ + 1 < (int) numbers_.size()) {
        excess_ = std::max(0.0f, excess_ + tune_.better * ratio - cost_[home_ + 1]);
    }
}

// Fewer threads are tried when they seem to be faster than what is seen now. Whether more are faster again
// cannot be seen: they are tried now and then.
void thread_policy::begin_trial() {
    const int more = home_ - 1;
    if (excess_ >= tune_.enough_excess && since_ >= wait_fewer_) {
        trial_ = home_ + 1;
    } else if (more >= 0 && since_ >= wait_more_) {
        trial_ = more;
    }
    n_tried_ = 0;
    tried_   = 0.0f;
}

// Even if the rest of the trial's rounds took so little that hardly any machine does it, it would not be the
// better number.
bool thread_policy::is_lost() const {
    const float rest = (float) (tune_.trial - n_tried_) * tune_.hope * cost_[home_];
    return tried_ + rest >= (float) tune_.trial * tune_.better * cost_[home_];
}

void thread_policy::end_trial() {
    const int tried = trial_;
    int & wait      = tried > home_ ? wait_fewer_ : wait_more_;
    const bool lost = is_lost();
    cost_[tried]    = tried_ / (float) n_tried_;
    trial_          = -1;
    since_          = 0;
    excess_         = 0.0f;
    if (lost) {
        wait = std::min(2 * wait, tune_.most_wait);
    } else {
        home_       = tried;
        n_seen_     = n_tried_;
        wait_fewer_ = tune_.first_wait;
        wait_more_  = tune_.first_wait_more;
    }
}

float row_times::ratio(int n_rows, float seconds, float slower) {
    seconds_.resize(std::max(seconds_.size(), (size_t) n_rows + 1));
    float & known = seconds_[n_rows];
    if (known == 0.0f) {
        known = seconds / slower;
    }
    return seconds / known;
}

thread_scope::thread_scope(llama_context * ctx, const thread_policy & policy)
    : thread_scope(ctx, policy.uses_most() ? INT32_MAX : policy.now()) {}

thread_scope::thread_scope(llama_context * ctx, int most)
    : ctx_(ctx), one_(llama_n_threads(ctx)), many_(llama_n_threads_batch(ctx)) {
    set(std::min(most, one_), std::min(most, many_));
}

thread_scope::~thread_scope() {
    set(one_, many_);
}

void thread_scope::set(int32_t one, int32_t many) {
    llama_set_n_threads(ctx_, one, many);
}

}  // namespace eagle3
