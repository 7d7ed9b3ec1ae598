// What each of the planner's constants does: tokens a second with half and with twice its value, and without
// what it is for, against its value in tuning.hpp. Time is simulated, and the same luck falls to each.
//     planner_constants [NAME...]             all of them: some 10 minutes of one core
//     planner_constants without NAME...       without all of these together
// SEEDS=8 in the environment simulates four times as many rounds, for effects that two seeds leave to luck.
#include "simulation.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace eagle3;

namespace {

// How half and twice its value are meant: of a number, of a window that ends slowly (1 / (1 - value) rounds),
// of what a ratio is above 1.
enum class scale { value, window, above_one };

struct constant {
    const char * name;
    float tuning::* real;
    int tuning::* whole;
    scale by;
    float off;  // without what it is for
};

constexpr float NEVER = 1e9f;

constant number(const char * name, float tuning::* at, float off, scale by = scale::value) {
    return {name, at, nullptr, by, off};
}
constant number(const char * name, int tuning::* at, int off) {
    return {name, nullptr, at, scale::value, (float) off};
}

const constant CONSTANTS[] = {
    number("keep_tally", &tuning::keep_tally, 1.0f, scale::window),
    number("keep_rate", &tuning::keep_rate, 1.0f, scale::window),
    number("keep_gain", &tuning::keep_gain, 0.0f, scale::window),
    number("prior", &tuning::prior, 1e-3f),
    number("trust_step", &tuning::trust_step, 0.0f),
    number("trust_step_resting", &tuning::trust_step_resting, 0.05f),
    number("keep_awake", &tuning::keep_awake, 1.0f),
    number("least_gain", &tuning::least_gain, 0.0f, scale::above_one),
    number("most_loss", &tuning::most_loss, NEVER),
    number("min_drafts", &tuning::min_drafts, 1 << 30),
    number("nap_first", &tuning::nap_first, 64),
    number("nap_most", &tuning::nap_most, 1 << 20),
    number("keep_nap", &tuning::keep_nap, 0.0f),
    number("wrong", &tuning::wrong, 0.0f),
    number("most_missed", &tuning::most_missed, NEVER),
    number("keep_missed", &tuning::keep_missed, 0.0f),
    number("probes", &tuning::probes, 0),
    number("look_close", &tuning::look_close, 128),
    number("look", &tuning::look, 16),
    number("first_looks", &tuning::first_looks, 0),
    number("keep_drift", &tuning::keep_drift, 0.0f, scale::window),
    number("keep_plain", &tuning::keep_plain, 0.0f, scale::window),
    number("fade", &tuning::fade, 1.0f, scale::window),
    number("fade_plain", &tuning::fade_plain, 1.0f, scale::window),
    number("relax", &tuning::relax, 0.0f),
    number("relax_size", &tuning::relax_size, 0.0f),
    number("stale", &tuning::stale, 0.0f),
    number("try_two", &tuning::try_two, 0.7f),
    number("hope", &tuning::hope, INFINITY),
    number("hope_anew", &tuning::hope_anew, INFINITY),
    number("changed", &tuning::changed, NEVER),
    number("surprised", &tuning::surprised, NEVER),
    number("hurry", &tuning::hurry, 0),
    number("keep_surprise", &tuning::keep_surprise, 0.0f, scale::window),
    number("turned", &tuning::turned, NEVER),
    number("keep_excess", &tuning::keep_excess, 0.0f, scale::window),
    number("turned_awake", &tuning::turned_awake, NEVER),
    number("least_ratio", &tuning::least_ratio, 0.0f),
    number("most_ratio", &tuning::most_ratio, NEVER),
    number("most_rest", &tuning::most_rest, NEVER),
    number("ahead", &tuning::ahead, 1),
    number("pardons", &tuning::pardons, 0),
    number("first_guess", &tuning::first_guess, 0.0f),
    number("next_guess", &tuning::next_guess, 0.0f),
    number("least_weight", &tuning::least_weight, 1.0f),
    number("settled", &tuning::settled, 0),
    number("disturbed", &tuning::disturbed, NEVER),
    number("keep_usual", &tuning::keep_usual, 0.0f, scale::window),
    number("most_usual", &tuning::most_usual, NEVER, scale::above_one),
    number("n_usual", &tuning::n_usual, 1e-3f),
    number("n_near", &tuning::n_near, 1e-3f),
    number("shared", &tuning::shared, NEVER),
};
static_assert(sizeof(tuning) == sizeof(float) * (sizeof(CONSTANTS) / sizeof(CONSTANTS[0])),
    "CONSTANTS has each field of tuning");

float scaled(float v, scale by, float factor) {
    switch (by) {
    case scale::window:
        return std::max(1.0f - (1.0f - v) / factor, 0.0f);
    case scale::above_one:
        return 1.0f + (v - 1.0f) * factor;
    default:
        return v * factor;
    }
}

// factor 0: without what the constant is for.
tuning with(const constant & c, float factor, tuning t = {}) {
    if (c.whole) {
        t.*c.whole = factor == 0.0f ? (int) c.off : std::max((int) ((float) (t.*c.whole) * factor), 1);
    } else {
        t.*c.real = factor == 0.0f ? c.off : scaled(t.*c.real, c.by, factor);
    }
    return t;
}

// A stretch of rounds; prompt: its text follows a prompt.
struct stretch {
    text what;
    load under;
    int n_rounds;
    bool prompt;
};

struct scenario {
    const char * name;
    load told;  // under which the costs were measured
    std::vector<stretch> stretches;
    int n_times;
};

constexpr load CALM = {}, BUSY = {2.0f, 1.5f, 2.0f}, DEAR_DRAFTS = {1.0f, 3.0f, 4.0f},
               DEARER = {1.0f, 1.4f, 1.5f}, JOLTED = {1.0f, 1.0f, 1.0f, 0.1f},
               SLOW_CALLER = {1.0f, 1.0f, 1.0f, 0.01f, 0.1f};
constexpr text EASY = {1.8f, 0.95f}, MEDIUM = {0.9f, 0.9f}, HARD = {0.35f, 0.7f},
               UNFORESEEABLE = {0.2f, 0.3f}, MISJUDGED = {1.8f, 0.05f};

const scenario SCENARIOS[] = {
    {"easy", CALM, {{EASY, CALM, 800, false}}, 1},
    {"medium", CALM, {{MEDIUM, CALM, 800, false}}, 1},
    {"hard", CALM, {{HARD, CALM, 800, false}}, 1},
    {"unforeseeable", CALM, {{UNFORESEEABLE, CALM, 800, false}}, 1},
    {"misjudged", CALM, {{MISJUDGED, CALM, 800, false}}, 1},
    {"jolted", CALM, {{MEDIUM, JOLTED, 800, false}}, 1},
    {"prompts", CALM, {{EASY, CALM, 80, true}, {HARD, CALM, 80, true}, {MEDIUM, CALM, 80, true}}, 4},
    {"turns", CALM, {{UNFORESEEABLE, CALM, 250, false}, {EASY, CALM, 150, false}}, 2},
    {"misjudged turns", CALM, {{MISJUDGED, CALM, 250, false}, {EASY, CALM, 150, false}}, 2},
    {"load comes and goes", CALM, {{MEDIUM, BUSY, 200, false}, {MEDIUM, CALM, 200, false}}, 2},
    {"measured busy", BUSY, {{MEDIUM, CALM, 600, false}}, 1},
    {"drafts measured busy", DEAR_DRAFTS, {{EASY, CALM, 600, false}}, 1},
    {"slow caller", CALM, {{MEDIUM, SLOW_CALLER, 600, false}}, 1},
    {"drafts dearer", CALM, {{MEDIUM, DEARER, 600, false}}, 1},
};
constexpr int N_SCENARIOS = sizeof(SCENARIOS) / sizeof(SCENARIOS[0]);
constexpr int SLOTS[] = {1, 4}, MACHINES[] = {0, 2, 5, 7};
int n_seeds = 2;

// Tokens a second of each scenario with one slot, then with four.
std::vector<double> rates(const tuning & t) {
    std::vector<double> out;
    for (const int n_slots : SLOTS) {
        for (const scenario & s : SCENARIOS) {
            double relative = 0;  // machines count alike
            for (const int m : MACHINES) {
                const costs c = costs_of(CURVES[m]);
                simulation::sums sum;
                for (int k = 0; k < n_seeds; ++k) {
                    simulation sim(c, measured_under(c, s.told), n_slots, (unsigned) (100 * m + k), t);
                    sim.same_luck = true;
                    for (int i = 0; i < s.n_times; ++i) {
                        for (const stretch & p : s.stretches) {
                            if (p.prompt) {
                                sim.new_text();
                            }
                            sum += sim.run(p.what, p.under, p.n_rounds);
                        }
                    }
                }
                relative += std::log(sum.expected / sum.seconds);
            }
            out.push_back(relative / (double) (sizeof(MACHINES) / sizeof(MACHINES[0])));
        }
    }
    return out;
}

void show(const char * what, const std::vector<double> & base, const std::vector<double> & r) {
    const int n = (int) r.size();
    double mean = 0;
    std::vector<int> order;
    for (int i = 0; i < n; ++i) {
        mean += 100.0 * (r[i] - base[i]) / n;
        order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) { return r[a] - base[a] < r[b] - base[b]; });
    printf("  %-8s mean %+.2f%%;", what, mean);
    for (const int i : {order[0], order[1], order[n - 2], order[n - 1]}) {
        printf(" %s x%d %+.2f%%", SCENARIOS[i % N_SCENARIOS].name, SLOTS[i / N_SCENARIOS],
            100.0 * (r[i] - base[i]));
    }
    printf("\n");
    fflush(stdout);
}

}  // namespace

int main(int argc, char ** argv) {
    if (const char * seeds = getenv("SEEDS")) {
        n_seeds = atoi(seeds);
    }
    const std::vector<double> base = rates({});
    tuning nearly;  // what a change of no meaning does
    nearly.prior *= 1.01f;
    printf("luck\n");
    show("alone", base, rates(nearly));
    const auto named = [&](const char * name) {
        return std::any_of(argv + 1, argv + argc, [&](const char * given) { return !strcmp(given, name); });
    };
    if (named("without")) {
        tuning t;
        for (const constant & c : CONSTANTS) {
            t = named(c.name) ? with(c, 0.0f, t) : t;
        }
        printf("all of these\n");
        show("without", base, rates(t));
        return 0;
    }
    for (const constant & c : CONSTANTS) {
        if (argc > 1 && !named(c.name)) {
            continue;
        }
        printf("%s\n", c.name);
        show("half", base, rates(with(c, 0.5f)));
        show("twice", base, rates(with(c, 2.0f)));
        show("without", base, rates(with(c, 0.0f)));
    }
}
