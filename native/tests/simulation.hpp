// This runs rounds on a simulated clock: the planner and growing drafts are the product's, the target, the
// head and the time that they take are made up. Steps and their order are those of draft.cpp and round.cpp.
#pragma once

#include "draft/draft_tree.hpp"
#include "planner/planner.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

namespace eagle3 {

// A curve is what a decode of 1, 2, 4, 8 and 16 rows with the output matrix takes, in units of one row, and
// what one row takes in seconds.
struct curve {
    const char * name;
    float seconds;
    float rows[5];
};

// Machines measured these, without and with dear rows.
const curve CURVES[] = {
    {"BF16, cheap rows", 0.011f, {1.0f, 1.00f, 1.17f, 1.58f, 2.84f}},
    {"Q8_0, cheap rows", 0.0053f, {1.0f, 1.10f, 1.32f, 2.08f, 3.72f}},
    {"Q4_0, cheap rows", 0.0046f, {1.0f, 1.19f, 1.51f, 1.98f, 3.28f}},
    {"Q4_K_M, cheap rows", 0.0050f, {1.0f, 1.13f, 1.41f, 2.00f, 3.87f}},
    {"BF16, dear rows", 0.0207f, {1.0f, 1.17f, 1.48f, 2.23f, 3.58f}},
    {"Q8_0, dear rows", 0.0154f, {1.0f, 1.32f, 1.79f, 2.85f, 5.33f}},
    {"Q4_0, dear rows", 0.0112f, {1.0f, 1.43f, 1.70f, 2.87f, 5.29f}},
    {"Q4_K_M, dear rows", 0.0137f, {1.0f, 1.30f, 1.97f, 3.69f, 6.03f}},
};

inline costs costs_of(const curve & m) {
    costs c = {};
    for (int n = 1; n <= MAX_ROWS; ++n) {
        int k = 0;
        while (k < 3 && (2 << k) < n) {
            ++k;
        }
        const float whole =
            m.rows[k] + (m.rows[k + 1] - m.rows[k]) * (float) (n - (1 << k)) / (float) (1 << k);
        const float output = std::min(0.21f + 0.1f * (float) (n - 1), 0.5f * whole);
        c.layers[n]        = m.seconds * (whole - output);
        c.output[n]        = m.seconds * output;
        c.head[n]          = m.seconds * 0.05f *
                             (1.0f + 0.15f * (float) std::min(n - 1, 7) + 0.05f * (float) std::max(n - 8, 0));
    }
    c.first = 0.03f * m.seconds;
    return c;
}

// This is what other programs do to the times: of rounds without a draft, of rows with drafts beyond that, of
// the head.
struct load {
    float plain = 1.0f, drafted = 1.0f, head = 1.0f;
    float jolts = 0.01f;  // part of the rounds that something disturbs
    float rest =
        0.0f;  // what callers take between rounds, in plain decodes; one in 20 takes 10 times as long
};

// Returns what the costs look like if they are measured under a load.
inline costs measured_under(costs c, const load & l) {
    for (int n = 1; n <= MAX_ROWS; ++n) {
        const float f = l.plain * (n > 1 ? l.drafted : 1.0f);
        c.layers[n] *= f;
        c.output[n] *= f;
        c.head[n] *= l.head;
    }
    c.first *= l.head;
    return c;
}

// This says how well a head foresees a text: its best guess is spread as Beta(sure, 0.7), the next ones share
// the rest; a guess is right `truth` times as often as the head says, and 0.93 times that on each further
// level.
struct text {
    float sure, truth;
};

class simulation {
  public:
    simulation(
        const costs & true_costs, const costs & told, int n_slots, unsigned seed, const tuning & t = {})
        : c_(true_costs), seed_(seed), rng_(seed), trust_(n_slots), plan_(t) {
        plan_.set(told);
        for (trust_list & t : trust_) {
            t.fill(1.0f);
        }
    }

    struct sums {
        double seconds = 0, tokens = 0, rounds = 0, drafted = 0;
        double expected = 0;  // tokens, without the luck of which drafts were accepted
        double rate() const { return tokens / seconds; }
        sums & operator+=(const sums & o) {
            seconds += o.seconds;
            tokens += o.tokens;
            rounds += o.rounds;
            drafted += o.drafted;
            expected += o.expected;
            return *this;
        }
    };

    // With plain, it runs without the planner.
    sums run(const text & t, const load & l, int n_rounds, bool plain = false) {
        sums s;
        for (int i = 0; i < n_rounds; ++i) {
            text_ = t;
            load_ = l;
            if (plain) {
                s += {decode_seconds((int) trust_.size(), true) + rest_seconds(), (double) trust_.size(), 1,
                    0, (double) trust_.size()};
            } else {
                s += round();
            }
        }
        return s;
    }

    // A slot begins another text, as with a prompt.
    void new_text() {
        plan_.new_text();
        for (trust_list & t : trust_) {
            t.fill(1.0f);
        }
    }

    // Luck depends on the seed and the round alone: two planners that decide alike have the same.
    bool same_luck = false;

    planner & plan() { return plan_; }
    const trust_list & trust(int slot) const { return trust_[slot]; }
    bool verbose = false;

  private:
    // -- the machine --
    float noise() {
        std::mt19937 & rng = same_luck ? noise_rng_ : rng_;
        const float u      = uniform_(rng);
        return 0.9f + 0.2f * uniform_(rng) + (u < load_.jolts ? 1.0f : 0.0f);
    }

    float slowed(int n_rows) const {
        return load_.plain * (n_rows > (int) trust_.size() ? load_.drafted : 1.0f);
    }

    float decode_seconds(int n_rows, bool whole) {
        return (c_.layers[n_rows] + (whole ? c_.output[n_rows] : 0.0f)) * slowed(n_rows) * noise();
    }

    float rest_seconds() {
        if (load_.rest == 0.0f) {
            return 0.0f;
        }
        return load_.rest * c_.layers[1] * noise() * (uniform_(noise_rng_) < 0.05f ? 10.0f : 1.0f);
    }

    float pass_seconds(int n_rows, bool first) {
        return (c_.head[n_rows] + (first ? c_.first : 0.0f)) * load_.head * noise();
    }

    // -- the head --
    void offer_children(draft_tree & g, int a, int parent) {
        std::gamma_distribution<float> x(text_.sure, 1.0f), y(0.7f, 1.0f);
        const float u = x(rng_), v = y(rng_);
        float q = std::clamp(u / (u + v), 1e-4f, 1.0f), rest = 1.0f - q;
        const float depth = parent < 0 ? 0.0f : (float) g.nodes[parent].depth;
        const float truth = text_.truth * std::pow(0.93f, depth);
        float hit         = uniform_(rng_);
        for (int k = 0; k < g.asks[a].width; ++k) {
            const int node = g.offer(0, a, parent, next_token_++, q, k);
            right_.resize(g.nodes.size(), false);
            right_[node] = hit >= 0.0f && hit < truth * q;
            chance_.resize(g.nodes.size(), 0.0f);
            chance_[node] = truth * q * (parent < 0 ? 1.0f : chance_[parent]);
            hit -= truth * q;
            g.level.push_back(node);
            q = rest * 0.5f;
            rest -= q;
        }
    }

    void begin_tree(draft_tree & g, planner::round & r) {
        const int n = (int) trust_.size();
        g.plan      = &plan_;
        g.n_asks    = n;
        right_.clear();
        for (int a = 0; a < n; ++a) {
            ask q{};
            q.slot  = a;
            q.kind  = EAGLE3_PLANNED;
            q.n_max = std::min(24 * n, MAX_ROWS - n);
            q.width = 4;
            g.asks.push_back(q);
            g.n_past.push_back(0);
            g.trust.push_back(&trust_[a]);
        }
        n_pending_ = std::min(n_pending_, 16);  // catching up counts for nothing: it is due at any rate
        r.draft_s += pass_seconds(std::min(n_pending_, MAX_ROWS), true);
        r.passes_s += plan_.pass_seconds(std::min(n_pending_, MAX_ROWS), true);
        n_pending_ = 0;
        for (int a = 0; a < n; ++a) {
            offer_children(g, a, -1);
        }
    }

    std::vector<int> planned_frontier(const draft_tree & g) const {
        std::vector<float> reach, level_reach;
        const int room = g.asks[0].n_max;
        float trust    = 0.0f;
        for (const int v : g.planned()) {
            if ((int) reach.size() < room) {
                reach.push_back(g.nodes[v].reach);
            }
        }
        std::vector<int> used(g.asks.size(), 0), level;
        for (const int v : g.level_by_reach([](const draft_tree::node &) { return true; })) {
            const int a = g.nodes[v].ask;
            if (used[a] < g.asks[a].width) {
                ++used[a];
                level.push_back(v);
                level_reach.push_back(g.nodes[v].reach);
                trust += trust_[a][0];
            }
        }
        if (level.empty() || (int) reach.size() >= room) {
            return {};
        }
        level.resize(plan_.grow_width(
            reach, g.nodes[level[0]].depth, level_reach, g.asks[0].width, trust / (float) level.size()));
        return level;
    }

    void grow(draft_tree & g, planner::round & r) {
        for (std::vector<int> frontier = planned_frontier(g); !frontier.empty();
            frontier                   = planned_frontier(g)) {
            g.level.clear();
            r.draft_s += pass_seconds((int) frontier.size(), false);
            r.passes_s += plan_.pass_seconds((int) frontier.size(), false);
            for (const int v : frontier) {
                offer_children(g, g.nodes[v].ask, v);
            }
        }
    }

    // -- a slot's part of the round --
    struct row {
        int slot, parent, depth;  // parent: of the batch, -1 for the root
        float reach, evidence;
        int rank;
        bool right;
    };

    // Lays out rows level by level over all slots, as round::lay_out does.
    std::vector<row> lay_out(const draft_tree & g, const std::vector<int> & chosen) const {
        std::vector<row> rows;
        for (int a = 0; a < (int) trust_.size(); ++a) {
            rows.push_back({a, -1, 0, 1.0f, 0.0f, 0, true});
        }
        std::vector<int> order = chosen, place(g.nodes.size(), -1);
        std::sort(order.begin(), order.end(), [&](int v, int w) {
            const draft_tree::node &x = g.nodes[v], &y = g.nodes[w];
            return std::make_pair(x.depth, x.ask) < std::make_pair(y.depth, y.ask) ||
                   (x.depth == y.depth && x.ask == y.ask && x.reach > y.reach);
        });
        std::vector<int> n_children(g.nodes.size() + trust_.size(), 0);
        for (const int v : order) {
            const draft_tree::node & n = g.nodes[v];
            const int parent           = n.parent < 0 ? n.ask : place[n.parent];
            place[v]                   = (int) rows.size();
            int & rank                 = n_children[n.parent < 0 ? (int) g.nodes.size() + n.ask : n.parent];
            rows.push_back({n.ask, parent, n.depth, n.reach, n.evidence[0], rank++, right_[v]});
        }
        return rows;
    }

    // Takes the slots' paths as far as the target agrees; computes the output matrix as it is needed.
    std::vector<std::vector<int>> verify(const std::vector<row> & rows, bool defers, float & output) {
        const int n_slots = (int) trust_.size(), n = (int) rows.size();
        std::vector<std::vector<int>> paths(n_slots);
        std::vector<bool> over(n_slots, false), done(n, !defers);
        for (int a = 0; a < n_slots; ++a) {
            paths[a].push_back(a);
        }
        for (bool more = true; more;) {
            more = false;
            for (int a = 0; a < n_slots; ++a) {
                if (over[a]) {
                    continue;
                }
                const int now = paths[a].back();
                if (!done[now]) {
                    const int m      = plan_.piece(reach_now(rows, paths), now);
                    const float took = c_.output[m] * slowed(n);
                    output += took;
                    plan_.saw_piece(m, took);
                    std::fill_n(done.begin() + now, m, true);
                }
                int next = now + 1;
                while (next < n && !(rows[next].parent == now && rows[next].right)) {
                    ++next;
                }
                over[a] = next == n;
                if (!over[a]) {
                    paths[a].push_back(next);
                    more = true;
                }
            }
        }
        return paths;
    }

    std::vector<float> reach_now(
        const std::vector<row> & rows, const std::vector<std::vector<int>> & paths) const {
        std::vector<float> reach(rows.size(), 0.0f);
        std::vector<bool> below(rows.size(), false);
        for (int i = 0; i < (int) rows.size(); ++i) {
            const int now = paths[rows[i].slot].back();
            below[i]      = i == now || (i > now && rows[i].parent >= 0 && below[rows[i].parent]);
            if (below[i]) {
                reach[i] = rows[i].reach / std::max(rows[now].reach, 1e-6f);
            }
        }
        return reach;
    }

    void learn(const std::vector<row> & rows, const std::vector<std::vector<int>> & paths) {
        for (int a = 0; a < (int) trust_.size(); ++a) {
            for (int i = (int) trust_.size(); i < (int) rows.size(); ++i) {
                const row & v = rows[i];
                if (v.slot != a) {
                    continue;
                }
                const auto at = std::find(paths[a].begin(), paths[a].end(), v.parent);
                if (at != paths[a].end()) {
                    const bool accepted = at + 1 != paths[a].end() && at[1] == i;
                    plan_.learn(0, v.depth, v.rank, v.evidence, accepted, trust_[a][0]);
                }
            }
        }
    }

    sums round() {
        const int n_slots = (int) trust_.size();
        planner::round r;
        draft_tree g;
        if (same_luck) {
            rng_.seed(seed_ * 7919u + n_rounds_);
            noise_rng_.seed(seed_ * 104729u + n_rounds_++);
        }
        plan_.begin(n_slots, 0.0f);
        std::vector<int> chosen;
        std::vector<float> reach;
        if (plan_.next_turn() == planner::turn::draft) {
            r.tried = true;
            begin_tree(g, r);
            grow(g, r);
            const std::vector<int> planned = g.planned();
            for (int i = 0; i < std::min((int) planned.size(), MAX_ROWS - n_slots); ++i) {
                reach.push_back(g.nodes[planned[i]].reach);
            }
            const planner::choice c = plan_.best(reach);
            r.value                 = c.value;
            chosen.assign(planned.begin(), planned.begin() + c.n);
            reach.resize(c.n);
        }
        r.expected                  = plan_.foresee(reach, 0, r.passes_s);
        const std::vector<row> rows = lay_out(g, chosen);
        r.n_rows                    = (int) rows.size();
        r.whole                     = chosen.empty();
        r.layers_s                  = decode_seconds(r.n_rows, r.whole);
        float output                = 0.0f;
        const auto paths            = verify(rows, !r.whole, output);
        for (const auto & path : paths) {
            r.n_tokens += (int) path.size();
        }
        r.output_s = r.whole ? 0.0f : output;
        r.total_s  = r.draft_s + r.layers_s + output;
        r.before_s = rest_seconds();
        n_pending_ += r.n_tokens;
        learn(rows, paths);
        if (r.tried) {
            learn_undrafted(g, chosen);
        }
        plan_.saw_round(r);
        double expected = n_slots;
        for (const int v : chosen) {
            expected += chance_[v];
        }
        return {r.before_s + r.total_s, (double) r.n_tokens, 1, chosen.empty() ? 0.0 : 1.0, expected};
    }

    // Learns what would have become of the first tokens of slots without a draft.
    void learn_undrafted(const draft_tree & g, const std::vector<int> & chosen) {
        std::vector<bool> drafts(trust_.size(), false);
        for (const int v : chosen) {
            drafts[g.nodes[v].ask] = true;
        }
        std::vector<int> rank(trust_.size(), 0);
        for (int v = 0; v < (int) g.nodes.size(); ++v) {
            const draft_tree::node & n = g.nodes[v];
            if (n.parent < 0 && !drafts[n.ask]) {
                plan_.learn(0, 1, rank[n.ask]++, n.evidence[0], right_[v], trust_[n.ask][0]);
            }
        }
    }

    const costs c_;
    const unsigned seed_;
    unsigned n_rounds_ = 0;
    std::mt19937 rng_, noise_rng_;
    std::uniform_real_distribution<float> uniform_{0.0f, 1.0f};
    std::vector<trust_list> trust_;
    planner plan_;
    text text_{};
    load load_{};
    std::vector<float> chance_;  // of each node: that verification gets to it and accepts it
    std::vector<bool> right_;    // of each node: whether it is what the target samples after its parent
    int n_pending_      = 1;     // features that wait for the head's first pass
    int32_t next_token_ = 0;
};

}  // namespace eagle3
