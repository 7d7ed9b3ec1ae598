// The planner's parts, each told what to learn: costs, checkpoints, rests, estimates and forecasts.
#include "error.hpp"
#include "simulation.hpp"

#include <cmath>
#include <cstdio>
#include <iterator>
#include <random>
#include <utility>

using namespace eagle3;

namespace {

int failures = 0;

// Rounds whose drafts bring nothing, until drafting rests for so many. Returns the rest.
int rest_after(planner & p, const costs & c, int n_slots, int least) {
    int rest = 0;
    for (int i = 0; i < 5000 && rest < least; ++i) {
        planner::round r;
        r.tried    = p.next_turn() == planner::turn::draft;
        r.n_rows   = n_slots;
        r.whole    = true;
        r.n_tokens = n_slots;
        r.layers_s = c.layers[n_slots] + c.output[n_slots];
        r.draft_s  = r.tried ? c.head[1] + c.first : 0.0f;
        r.total_s  = r.layers_s + r.draft_s;
        p.saw_round(r);
        rest = p.asleep();
    }
    return rest;
}

// Drafts that bring nothing lead to rests, none so long that a turn of the text goes unseen; a lone slot's
// ends with its text.
void check_rests(const costs & c) {
    for (const auto & [n_slots, least] : {std::pair(1, 64), {4, 64}}) {
        planner p;
        p.set(c);
        p.begin(n_slots, 0.0f);
        const int rest = rest_after(p, c, n_slots, least);
        p.new_text();
        if (rest < least || p.asleep() != (n_slots == 1 ? 0 : rest)) {
            fprintf(stderr, "a new text in one of %d slots: %d of %d rounds of rest are left, expected %d\n",
                n_slots, p.asleep(), rest, least);
            ++failures;
        }
    }
}

// A prompt is one text in however many chunks it is decoded: the next rest is as long.
void check_pieces(const costs & c) {
    int rest[2];
    for (const int n_pieces : {1, 8}) {
        planner p;
        p.set(c);
        p.begin(1, 0.0f);
        rest_after(p, c, 1, 64);
        for (int i = 0; i < n_pieces; ++i) {
            p.new_text();
        }
        rest[n_pieces == 8] = rest_after(p, c, 1, 1);
    }
    if (rest[0] != rest[1] || rest[0] < 1) {
        fprintf(stderr, "the rest after a prompt in one chunk is %d rounds, in eight %d\n", rest[0], rest[1]);
        ++failures;
    }
}

// What a further row is worth to eight slots when eight rows take twice what was told, and a lone slot has
// drafted seven before.
float worth_to_eight(const costs & c, bool alone_before) {
    planner p;
    p.set(c);
    for (const int n_slots : {1, 8}) {
        p.begin(n_slots, 0.0f);
        for (int i = 0; i < (n_slots == 8 || alone_before ? 100 : 0); ++i) {
            planner::round r;
            r.tried    = n_slots == 1;
            r.n_rows   = 8;
            r.whole    = true;
            r.n_tokens = 8;
            r.layers_s = 2.0f * (c.layers[8] + c.output[8]);
            r.total_s  = r.layers_s;
            p.saw_round(r);
        }
    }
    return p.best({0.9f}).value;
}

void check_sizes(const costs & c) {
    const float apart = std::fabs(worth_to_eight(c, true) - worth_to_eight(c, false));
    if (!(apart < 1e-3f)) {
        fprintf(stderr,
            "what a lone slot's rounds took is held against those of eight: a row's worth changes by %.3f "
            "tokens\n",
            apart);
        ++failures;
    }
}

// A draft that only a checkpoint takes back is dearer by the checkpoint, one that rows are dropped of is not;
// and what rounds with checkpoints take beside their parts is no other draft's.
void check_back(costs c) {
    c.back = 0.5f * (c.layers[1] + c.output[1]);
    float seconds[2], value[2];
    planner p;
    p.set(c);
    for (const bool drops : {false, true}) {
        p.begin(1, 0.0f, 0, drops ? MAX_ROWS : 0);
        seconds[drops] = p.foresee({0.9f}, 0, 0.0f).seconds;
        value[drops]   = p.best({0.9f}).value;
    }
    for (int i = 0; i < 100; ++i) {
        planner::round r;
        r.n_rows   = 2;
        r.n_tokens = 2;
        r.n_copies = 2;
        r.layers_s = c.layers[2];
        r.output_s = c.output[2];
        r.total_s  = r.layers_s + r.output_s + c.back;
        p.saw_round(r);
    }
    const float after = p.foresee({0.9f}, 0, 0.0f).seconds;
    if (std::fabs(seconds[0] - seconds[1] - 0.55f * c.back) > 0.01f * c.back || value[0] > value[1] - 0.2f ||
        std::fabs(after - seconds[1]) > 0.05f * c.back) {
        fprintf(stderr,
            "a checkpoint of %.4f s: a round of %.4f s takes %.4f s with it, later %.4f s without\n", c.back,
            seconds[1], seconds[0], after);
        ++failures;
    }
}

// Tokens of a source that are wrong at one estimate say something of its other estimates. Those that are
// right do not raise any.
void check_estimates() {
    for (const int source : {PASSES, TEXT}) {
        planner wrong, right;
        float trust = 1.0f;
        for (int i = 0; i < 12; ++i) {
            wrong.learn(source, 1, 0, 0.5f, false, trust);
            right.learn(source, 1, 0, 0.5f, true, trust);
        }
        const float less = wrong.accept(source, 1, 0.8f, 1.0f), same = right.accept(source, 1, 0.8f, 1.0f);
        if (less > 0.65f || std::fabs(same - 0.8f) > 0.001f) {
            fprintf(stderr, "source %d: 0.8 is worth %.3f after wrong tokens, %.3f after right ones\n",
                source, less, same);
            ++failures;
        }
    }
    planner p;
    float trust = 1.0f;
    for (int i = 0; i < 12; ++i) {
        p.learn(TEXT, 1, 0, 0.24f, false, trust);
    }
    const float other = p.accept(TEXT, 1, 0.6f, 1.0f);
    planner good;
    for (int i = 0; i < 400; ++i) {
        good.learn(TEXT, 1, 0, 0.24f, i % 4 == 0, trust);
    }
    const float same = good.accept(TEXT, 1, 0.6f, 1.0f);
    if (other > 0.45f || std::fabs(same - 0.6f) > 0.05f) {
        fprintf(stderr, "after others that were wrong 0.6 is worth %.3f, after as many as expected %.3f\n",
            other, same);
        ++failures;
    }
}

// What plain decoding is foreseen to take, where something disturbs one look in six, and few of the rounds
// with drafts: a mean of the looks would be 1.33 of it.
void check_forecast(const costs & c) {
    planner p;
    p.set(c);
    p.begin(1, 0.0f);
    const float plain = c.layers[1] + c.output[1];
    double expected   = 0.0;
    for (int i = 0; i < 1300; ++i) {
        const bool is_plain = i % 66 < 3, is_slow = is_plain ? i / 66 % 6 == 3 : i % 20 == 0;
        planner::round r;
        r.n_rows   = is_plain ? 1 : 4;
        r.whole    = true;
        r.n_tokens = 1;
        r.layers_s = (!is_slow ? 1.0f : is_plain ? 3.0f : 1.4f) * (c.layers[r.n_rows] + c.output[r.n_rows]);
        r.total_s  = r.layers_s;
        r.expected = {r.layers_s, 1.0f};
        expected += plain;
        p.saw_round(r);
    }
    const double times = p.foreseen().plain / expected;
    if (times < 0.99 || times > 1.15) {
        fprintf(stderr, "plain decoding is foreseen to take %.3f times what it takes\n", times);
        ++failures;
    }
}

// Rounds that draft nothing are plain decoding, also where the costs were measured on a machine twice as
// slow; but not those in which the head ran for nothing.
void check_forecast_of_plain_rounds(const costs & c) {
    const float plain = c.layers[1] + c.output[1];
    for (const bool tried : {false, true}) {
        planner p;
        p.set(c);
        p.begin(1, 0.0f);
        for (int i = 0; i < 100; ++i) {
            planner::round r;
            r.n_rows   = 1;
            r.whole    = true;
            r.n_tokens = 1;
            r.tried    = tried;
            r.layers_s = (tried ? 1.0f : 0.5f) * plain;
            r.draft_s = r.passes_s = tried ? 0.2f * plain : 0.0f;
            r.total_s              = r.layers_s + r.draft_s;
            r.expected             = {plain + r.passes_s, 1.0f};
            p.saw_round(r);
        }
        const float times = p.foreseen().plain / p.foreseen().seconds, truth = tried ? 1.0f / 1.2f : 1.0f;
        if (std::fabs(times - truth) > 0.02f) {
            fprintf(stderr, "plain rounds%s are foreseen to be %.3f of plain decoding\n",
                tried ? " with a pass" : "", times);
            ++failures;
        }
    }
}

// Each source has its own calibration: another one that is wrong, or right, changes nothing of the head's.
void check_sources() {
    planner alone, both;
    float trust = 1.0f, trust_alone = 1.0f, trust_other = 1.0f;
    for (int i = 0; i < 300; ++i) {
        alone.learn(0, 1 + i % 3, 0, 0.6f, i % 2 == 0, trust_alone);
        both.learn(0, 1 + i % 3, 0, 0.6f, i % 2 == 0, trust);
        both.learn(1, 1 + i % 3, 0, 0.6f, false, trust_other);
        both.learn(2, 1 + i % 3, 0, 0.6f, true, trust_other);
    }
    const float head = both.accept(0, 2, 0.6f, 1.0f);
    if (head != alone.accept(0, 2, 0.6f, 1.0f) || trust != trust_alone || std::fabs(head - 0.5f) > 0.05f ||
        both.accept(1, 2, 0.6f, 1.0f) > 0.1f || both.accept(2, 2, 0.6f, 1.0f) < 0.9f) {
        fprintf(stderr, "sources share their statistics: the head's estimate is worth %.3f\n", head);
        ++failures;
    }
}

// What check lets through gives times that are positive and finite, at any position; the rest it refuses.
void check_costs() {
    std::mt19937 rng(3);
    const float values[] = {-1.0f, 0.0f, 1e-30f, 1e-9f, 1e-6f, 1e-3f, 1.0f, 1e4f, 1e30f, INFINITY, NAN};
    const auto any       = [&] {
        return values[rng() % std::size(values)];
    };
    int n_good = 0;
    for (int run = 0; run < 20000; ++run) {
        costs c = costs_of(CURVES[0]);
        for (int k = (int) (rng() % 4); k > 0; --k) {
            const int n = 1 + (int) (rng() % MAX_ROWS);
            (rng() % 2 ? c.layers : rng() % 2 ? c.head : rng() % 2 ? c.output : c.cell)[n] = any();
        }
        std::fill_n(c.cell, rng() % 3 ? 0 : MAX_ROWS + 1, any());
        c.context = rng() % 2 ? c.context : any();
        c.first   = rng() % 4 ? c.first : any();
        c.back    = rng() % 4 ? c.back : any();
        try {
            eagle3::check(c);
        } catch (const error &) {
            continue;
        }
        ++n_good;
        planner p;
        p.set(c);
        for (const float n_past : {0.0f, 1.0f, 4096.0f, 1e6f}) {
            p.begin(1, n_past, 0, (int) (rng() % 3));
            const auto e = p.foresee(std::vector<float>(5, 0.5f), 0, c.head[1]);
            if (!(p.plain_seconds() > 0.0f && std::isfinite(p.plain_seconds()) && std::isfinite(p.rate()) &&
                    e.seconds > 0.0f && std::isfinite(e.seconds))) {
                fprintf(stderr, "costs that were let through: %g s a plain round, %g tokens a second\n",
                    p.plain_seconds(), p.rate());
                ++failures;
                return;
            }
        }
    }
    if (n_good < 1000) {
        fprintf(stderr, "only %d costs were let through\n", n_good);
        ++failures;
    }
}

}  // namespace

int main() {
    const costs c = costs_of(CURVES[0]);
    check_costs();
    check_rests(c);
    check_pieces(c);
    check_sizes(c);
    check_forecast(c);
    check_forecast_of_plain_rounds(c);
    check_sources();
    check_back(c);
    check_estimates();
    if (failures == 0) {
        printf("ok\n");
    }
    return failures != 0;
}
