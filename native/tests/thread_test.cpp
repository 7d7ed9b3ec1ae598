// How the number of threads is chosen, on simulated machines: no clock is read.
#include "check.hpp"
#include "session/thread_policy.hpp"

#include <cmath>
#include <functional>
#include <random>

using namespace eagle3;

namespace {

// What a decode takes with so many threads, in units of what it takes with `all` on a machine that is quiet.
// n_busy cores have another program, which has each of them for half of the time.
struct machine {
    int n_cores;
    float serial;  // part of a decode that no further thread makes shorter
    std::mt19937 random{7};

    float takes(int n, int all, int n_busy) {
        const auto alone = [&](int k) {
            return serial + (1.0f - serial) / (float) k;
        };
        const bool hit   = n > n_cores - n_busy;  // a thread shares its core: all wait for it
        const float luck = std::uniform_real_distribution<float>(0.9f, 1.1f)(random);
        const float wait = hit ? std::exponential_distribution<float>(0.5f)(random) : 0.0f;
        return luck * alone(n) / alone(all) * (1.0f + wait);
    }
};

// What rounds take on average, relative to those of the best fixed number of threads.
float relative(machine & m, thread_policy & p, int all, int n_rounds, int n_busy) {
    float took = 0.0f;
    std::vector<float> fixed(p.numbers().size(), 0.0f);
    for (int i = 0; i < n_rounds; ++i) {
        const float t = m.takes(p.now(), all, n_busy);
        took += t;
        p.saw(t);
        for (size_t k = 0; k < fixed.size(); ++k) {
            fixed[k] += m.takes(p.numbers()[k], all, n_busy);
        }
    }
    return took / *std::min_element(fixed.begin(), fixed.end());
}

void the_numbers_to_choose_from() {
    thread_policy p;
    const std::vector<std::vector<int>> expected = {
        {1}, {2, 1}, {3, 2, 1}, {4, 3, 2, 1}, {8, 7, 4, 2, 1}, {16, 15, 8, 4, 2, 1}};
    for (const std::vector<int> & numbers : expected) {
        p.set_most(numbers[0]);
        CHECK(p.numbers() == numbers);
        CHECK(p.now() == numbers[0] && !p.is_trial());
    }
}

void a_quiet_machine_keeps_all_threads() {
    for (const int all : {2, 4, 8}) {
        for (const float serial : {0.0f, 0.3f, 0.6f}) {
            machine m{all, serial};
            thread_policy p;
            p.set_most(all);
            std::vector<float> seen;
            for (const int n : p.numbers()) {
                seen.push_back(m.takes(n, all, 0));
            }
            p.measured(seen);
            CHECK(relative(m, p, all, 4000, 0) < 1.01f);
            CHECK(p.now() == all);
        }
    }
}

void beside_a_busy_core_fewer_are_used() {
    for (const int all : {2, 4, 8}) {
        for (const float serial : {0.0f, 0.3f}) {
            machine m{all, serial};
            thread_policy p;
            p.set_most(all);
            relative(m, p, all, 200, 0);
            relative(m, p, all, 60, 1);
            CHECK(p.now() == all - 1);
            CHECK(relative(m, p, all, 4000, 1) < 1.05f);
        }
    }
}

void more_are_used_again_when_the_core_is_free() {
    machine m{4, 0.1f};
    thread_policy p;
    p.set_most(4);
    relative(m, p, 4, 1000, 1);
    CHECK(p.now() < 4);
    relative(m, p, 4, 500, 0);
    CHECK(p.now() == 4);
}

void a_load_beside_a_busy_core_begins_with_fewer() {
    thread_policy p;
    p.set_most(2);
    p.measured({3.4f, 1.9f});
    CHECK(p.now() == 1 && !p.is_trial());
    p.measured({1.0f, 1.9f});  // once more, on a machine that is quiet now
    CHECK(p.now() == 2);
    p.set_most(8);
    p.measured({3.0f, 1.0f, 0.0f, 0.0f, 0.0f});  // a large model, for which there was no time to try all
    CHECK(p.now() == 7);
}

void other_numbers_of_the_user_begin_anew() {
    thread_policy p;
    p.set_most(4);
    p.measured({3.0f, 1.5f, 2.0f, 4.0f});
    CHECK(p.now() == 3);
    p.set_most(4);
    CHECK(p.now() == 3);
    p.set_most(8);
    CHECK(p.now() == 8);
    p.set_most(1);
    for (int i = 0; i < 1000; ++i) {
        p.saw(50.0f);
    }
    CHECK(p.now() == 1 && !p.is_trial());
}

void times_of_rows_without_costs() {
    row_times t;
    CHECK(t.ratio(1, 0.010f, 1.0f) == 1.0f);
    CHECK(std::fabs(t.ratio(1, 0.030f, 1.0f) - 3.0f) < 1e-5f);
    CHECK(std::fabs(t.ratio(4, 0.040f, 2.0f) - 2.0f) < 1e-5f);  // seen first with a number that is slower
    t.clear();
    CHECK(t.ratio(1, 0.030f, 1.0f) == 1.0f);
}

}  // namespace

int main() {
    the_numbers_to_choose_from();
    a_quiet_machine_keeps_all_threads();
    beside_a_busy_core_fewer_are_used();
    more_are_used_again_when_the_core_is_free();
    a_load_beside_a_busy_core_begins_with_fewer();
    other_numbers_of_the_user_begin_anew();
    times_of_rows_without_costs();
    puts("ok");
    return 0;
}
