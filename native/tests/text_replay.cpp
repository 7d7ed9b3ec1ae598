// Replays texts with drafts from the text alone: the planner, growing drafts and the source are the product's,
// the time is that of a cost curve.
//
//     text_replay FILE [CURVE]    lines of FILE: kind, number of prompt tokens, all tokens
//     text_replay FILE prior      how often the token after a match was the text's, by what is known of it
#include "simulation.hpp"
#include "text_prior.hpp"
#include "text_source.hpp"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

using namespace eagle3;

namespace {

struct recorded {
    std::string kind;
    int n_prompt = 0;
    std::vector<int32_t> tokens;
};

std::vector<recorded> read(const char * path) {
    std::vector<recorded> all;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        recorded r;
        words >> r.kind >> r.n_prompt;
        for (int32_t t; words >> t;) {
            r.tokens.push_back(t);
        }
        all.push_back(r);
    }
    return all;
}

struct sums {
    double seconds = 0, plain = 0, tokens = 0, rounds = 0, drafted = 0, accepted = 0, forecast = 0;
    void add(const sums & o) {
        seconds += o.seconds;
        plain += o.plain;
        tokens += o.tokens;
        rounds += o.rounds;
        drafted += o.drafted;
        accepted += o.accepted;
        forecast += o.forecast;
    }
};

std::map<std::array<int, 2>, std::array<double, 4>> dbg;

// One text, as a slot of its own.
sums replay(planner & plan, const costs & c, const recorded & text, text_source & source, trust_list & trust) {
    sums s;
    source.reset(0, 0);
    trust.fill(1.0f);
    plan.new_text();
    kept_tokens k = {0, 0, {}, {}, true};
    k.tokens.assign(text.tokens.begin(), text.tokens.begin() + text.n_prompt);
    k.rows.resize(k.tokens.size());
    source.kept(k);
    for (int at = text.n_prompt; at + 1 < (int) text.tokens.size();) {
        plan.begin(1, 0.0f);
        growth g;
        g.plan   = &plan;
        g.n_asks = 1;
        ask q{};
        q.token = text.tokens[at];
        q.kind  = EAGLE3_PLANNED;
        q.n_max = MAX_ROWS - 1;
        q.width = 4;
        q.text  = 1;
        g.asks.push_back(q);
        g.n_past.push_back(at);
        g.trust.push_back(&trust);
        std::vector<int> planned;
        planner::round r;
        planner::choice best = {0, 0.0f};
        if (plan.next_turn() != planner::turn::look) {
            source.begin(g, {0});
            planned = g.planned();
            std::vector<float> reach;
            for (const int v : planned) {
                reach.push_back(g.nodes[v].reach);
            }
            best = plan.best(reach);
            r.offered = !planned.empty();
            for (int i = 0; i < best.n; ++i) {
                s.forecast += reach[i];
            }
        }
        std::vector<int> chosen(planned.begin(), planned.begin() + best.n);
        std::stable_sort(chosen.begin(), chosen.end(), [&](int v, int w) { return g.nodes[v].depth < g.nodes[w].depth; });
        int node = -1, n = 1;
        std::map<int, int> ranks;
        for (bool more = true; more && at + n < (int) text.tokens.size();) {
            more           = false;
            const int from = node;
            for (const int v : chosen) {
                if (g.nodes[v].parent != from) {
                    continue;
                }
                const bool hit = g.nodes[v].token == text.tokens[at + n] && at + n + 1 < (int) text.tokens.size();
                if (getenv("DBG")) { auto & d = dbg[{std::min(g.nodes[v].depth, 8), (int) (g.nodes[v].evidence[TEXT] * 10)}]; d[0] += 1; d[1] += g.nodes[v].prob; d[2] += g.nodes[v].token == text.tokens[at + n]; d[3] += trust[TEXT]; }
                plan.learn(TEXT, g.nodes[v].depth, ranks[from]++, g.nodes[v].evidence[TEXT], g.nodes[v].token == text.tokens[at + n], trust[TEXT]);
                if (hit) {
                    node = v;
                    more = true;
                }
            }
            n += more;
        }
        if (chosen.empty()) {
            int rank = 0;
            for (const growth::node & v : g.nodes) {
                if (v.parent < 0) {
                    plan.learn(TEXT, 1, rank++, v.evidence[TEXT], v.token == text.tokens[at + 1], trust[TEXT]);
                }
            }
        }
        k = {0, at, {text.tokens.begin() + at, text.tokens.begin() + at + n}, std::vector<int32_t>(n), false};
        source.kept(k);
        at += n;
        r.n_rows   = 1 + (int) chosen.size();
        r.whole    = true;
        r.layers_s = r.total_s = c.layers[r.n_rows];
        r.n_tokens             = n;
        r.value                = best.value;
        plan.saw_round(r);
        s.seconds += r.total_s;
        s.plain += n * c.layers[1];
        s.tokens += n;
        s.rounds += 1;
        s.drafted += (int) chosen.size();
        s.accepted += n - 1;
    }
    return s;
}

void print_prior(const std::vector<recorded> & texts) {
    std::map<std::array<int, 3>, std::array<int, 2>> cells;
    for (const recorded & text : texts) {
        suffix_index index((int) text.tokens.size());
        for (int at = 0; at + 1 < (int) text.tokens.size(); ++at) {
            if (at >= text.n_prompt) {
                std::vector<int32_t> last(text.tokens.begin() + std::max(at + 1 - 32, 0), text.tokens.begin() + at + 1);
                suffix_index::match found[suffix_index::N_FOUND];
                const int n = index.find(last.data(), (int) last.size(), found);
                std::map<int32_t, std::array<int, 2>> of;  // longest, matches
                for (int i = 0; i < n; ++i) {
                    auto & e = of[index[found[i].next]];
                    e[0]     = std::max(e[0], (int) found[i].length);
                    ++e[1];
                }
                for (const auto & [token, e] : of) {
                    int other = 0;
                    for (int i = 0; i < n; ++i) {
                        other += found[i].length >= e[0] && index[found[i].next] != token;
                    }
                    auto & cell = cells[{e[0], other, e[1]}];
                    ++cell[0];
                    cell[1] += token == text.tokens[at + 1];
                }
            }
            index.append(text.tokens[at]);
        }
    }
    printf("length others matches tries hits part\n");
    for (const auto & [key, cell] : cells) {
        printf("%d %d %d %d %d %.3f\n", key[0], key[1], key[2], cell[0], cell[1], (double) cell[1] / cell[0]);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const std::vector<recorded> texts = read(argv[1]);
    if (argc > 2 && !strcmp(argv[2], "prior")) {
        print_prior(texts);
        return 0;
    }
    for (const curve & m : CURVES) {
        if (argc > 2 && !strstr(m.name, argv[2])) {
            continue;
        }
        costs c = costs_of(m);
        for (int n = 1; n <= MAX_ROWS; ++n) {
            c.layers[n] += c.output[n];
            c.output[n] = 0.0f;
        }
        planner plan;
        plan.set(c);
        text_source source(1, 16384);
        source.id = TEXT;
        trust_list trust;
        std::map<std::string, sums> kinds;
        sums all;
        for (const recorded & text : texts) {
            const sums s = replay(plan, c, text, source, trust);
            kinds[text.kind].add(s);
            all.add(s);
        }
        kinds["~all"] = all;
        printf("%s\n", m.name);
        for (const auto & [kind, s] : kinds) {
            printf("  %-16s %.3f of plain, %.2f tokens a round, %.0f drafted, %.0f accepted, forecast %.0f\n", kind.c_str(), s.plain / s.seconds, s.tokens / s.rounds, s.drafted, s.accepted, s.forecast);
        }
    }
    for (auto & [k, d] : dbg) printf("depth %d q %.1f n %.0f said %.3f was %.3f trust %.2f\n", k[0], k[1] / 10.0, d[0], d[1] / d[0], d[2] / d[0], d[3] / d[0]);
    return 0;
}
