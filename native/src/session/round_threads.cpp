// This chooses the number of threads that a round uses: see thread_policy.hpp.
#include "session/round.hpp"

namespace eagle3 {

const thread_policy & round::threads() {
    const int one = llama_n_threads(slots_.ctx), many = llama_n_threads_batch(slots_.ctx);
    threads_.set_most(one, many, !chooses_threads_);
    return threads_;
}

void round::measured_threads(const std::vector<float> & seconds) {
    threads_.measured(seconds);
    row_times_.clear();
}

void round::new_costs() {
    threads_.begin_unit();
    row_times_.clear();
}

// What a trial says of the machine is no drift of it: the planner is not told of such a round.
void round::tell_threads(int n) {
    const float ratio = planner_.ready() ? layers_seconds_ / planner_.measured_seconds(n, whole_)
                                         : row_times_.ratio(n, layers_seconds_, threads_.slower());
    is_trial_         = threads_.is_trial();
    threads_.saw(ratio);
}

}  // namespace eagle3
