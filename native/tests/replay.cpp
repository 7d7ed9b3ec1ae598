// Replays recorded texts: growing drafts, the text as a source and the planner are the product's; what the
// head offers was recorded, and time is that of a cost curve.
//
//     replay FILE [CURVE [MODES [NAME=VALUE...]]]
//         tokens a second over plain decoding's, by kind of text, of each mode (head, text, both), and what
//         the planner forecast; CURVE: part of a curve's name
//     replay FILE lookups
//         what a lookup in the text takes, over a million tokens of these texts
//     replay FILE prior
//         of all matches, how often the next token was the text's: what text_prior.hpp is fitted to
//
// FILE has for each text a line: kind, number of prompt tokens, the tokens. For each answer token a line may
// follow: T, then token, parent and probability of each node that the head offers after it
// (scripts/measure/record_texts.py).
#include "draft/frontier.hpp"
#include "simulation.hpp"
#include "text/text_source.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

using namespace eagle3;

namespace {

struct offered {
    int32_t token;
    int parent;
    float q;
};

struct recorded {
    std::string kind;
    int n_prompt = 0;
    std::vector<int32_t> tokens;
    std::vector<std::vector<offered>> trees;  // of each answer token
};

std::vector<recorded> read(const char * path) {
    std::vector<recorded> all;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        if (kind == "T" && !all.empty()) {
            std::vector<offered> tree;
            for (offered v; words >> v.token >> v.parent >> v.q;) {
                tree.push_back(v);
            }
            all.back().trees.push_back(tree);
            continue;
        }
        recorded r;
        r.kind = kind;
        words >> r.n_prompt;
        for (int32_t t; words >> t;) {
            r.tokens.push_back(t);
        }
        all.push_back(r);
    }
    return all;
}

struct sums {
    double seconds = 0, plain = 0, tokens = 0, rounds = 0, drafted = 0, passes = 0;
    double forecast =
        0;  // seconds that plain decoding would take for what the planner expected of its rounds
    void add(const sums & o) {
        seconds += o.seconds;
        plain += o.plain;
        tokens += o.tokens;
        rounds += o.rounds;
        drafted += o.drafted;
        passes += o.passes;
        forecast += o.forecast;
    }
};

// One slot, text after text.
class replay {
  public:
    replay(const costs & c, bool head, bool text, const text_tuning & t)
        : c_(c), uses_head_(head), uses_text_(text), plan_({}, t), source_(1, 16384, INT32_MAX, 0) {
        source_.id = TEXT;
        plan_.set(c);
    }

    sums run(const recorded & text) {
        text_ = &text;
        trust_.fill(1.0f);
        source_.reset(0, 0);
        plan_.new_text();
        keep(0, text.n_prompt, true);
        sums s;
        n_pending_ = 1;
        for (at_ = text.n_prompt; at_ + 1 < (int) text.tokens.size();) {
            round(s);
        }
        return s;
    }

  private:
    int32_t token(int i) const { return text_->tokens[i]; }

    void keep(int at, int n, bool prompt) {
        const auto first = text_->tokens.begin() + at;
        source_.kept({0, at, {first, first + n}, std::vector<int32_t>(n), prompt});
    }

    draft_tree begin() {
        draft_tree g;
        ask q{};
        q.token = token(at_);
        q.kind  = EAGLE3_PLANNED;
        q.n_max =
            std::min(MAX_ROWS - 1, (int) text_->tokens.size() - at_ - 2);  // the answer's length was given
        q.width  = 4;
        q.text   = uses_text_;
        g.plan   = &plan_;
        g.n_asks = 1;
        g.asks.push_back(q);
        g.n_past.push_back(at_);
        g.trust.push_back(&trust_);
        place_.clear();
        return g;
    }

    // -- the head: what was recorded, a pass for each level --
    void offer_children(draft_tree & g, int parent) {
        const std::vector<offered> & tree = text_->trees[at_ - text_->n_prompt];
        const int from                    = parent < 0 ? -1 : place_[parent];
        int rank                          = 0;
        for (int i = 0; i < (int) tree.size() && (parent < 0 || from >= 0) && rank < 4; ++i) {
            if (tree[i].parent == from) {
                const int node = g.offer(PASSES, 0, parent, tree[i].token, tree[i].q, rank++);
                place_.resize(g.nodes.size(), -1);
                place_[node] = i;
                g.level.push_back(node);
            }
        }
        place_.resize(g.nodes.size(), -1);
        for (int i = parent + 1; i < (int) g.nodes.size(); ++i) {
            if (g.nodes[i].parent == parent && g.nodes[i].evidence[PASSES] == NOT_OFFERED) {
                g.level.push_back(i);
            }
        }
    }

    void follow(draft_tree & g) {
        std::vector<int> nodes;
        for (const int v : g.level) {
            if (uses_text_ && g.nodes[v].evidence[TEXT] == NOT_OFFERED) {
                nodes.push_back(v);
            }
        }
        source_.follow(g, nodes);
        place_.resize(g.nodes.size(), -1);
    }

    void run_head(draft_tree & g, planner::round & r) {
        r.tried    = true;
        r.draft_s  = c_.head[std::min(n_pending_, 16)] + c_.first;
        r.passes_s = plan_.pass_seconds(std::min(n_pending_, 16), true);
        n_pending_ = 0;
        offer_children(g, -1);
        follow(g);
        for (;;) {
            std::vector<int> frontier = planned_frontier(g, MAX_ROWS, [](int) { return 64; });
            if (frontier.empty()) {
                return;
            }
            g.level.clear();
            r.draft_s += c_.head[std::min((int) frontier.size(), MAX_ROWS)];
            r.passes_s += plan_.pass_seconds(std::min((int) frontier.size(), MAX_ROWS), false);
            std::sort(frontier.begin(), frontier.end());
            for (const int v : frontier) {
                offer_children(g, v);
            }
            follow(g);
        }
    }

    // -- a round --
    void round(sums & s) {
        planner::round r;
        plan_.begin(1, 0.0f);
        draft_tree g            = begin();
        const planner::turn now = plan_.next_turn();
        std::vector<int> chosen;
        if (now != planner::turn::look) {
            if (uses_text_) {
                source_.begin(g, {0});
            }
            r.offered         = !g.nodes.empty();
            const bool head   = uses_head_ && now == planner::turn::draft && !text_->trees.empty();
            const float first = plan_.pass_seconds(std::min(n_pending_, 16), true);
            if (head && (g.nodes.empty() || passes_pay(g, {0}, first, r.base))) {
                run_head(g, r);
            }
            chosen = choose(g, r, s);
        }
        const int n = verify(g, chosen);
        keep(at_, n, false);
        at_ += n;
        n_pending_ += n;
        r.n_rows   = 1 + (int) chosen.size();
        r.whole    = true;
        r.layers_s = c_.layers[r.n_rows];
        r.total_s  = r.layers_s + r.draft_s;
        r.n_tokens = n;
        plan_.saw_round(r);
        s.add({r.total_s, n * c_.layers[1], (double) n, 1, (double) chosen.size(), (double) r.tried, 0});
    }

    std::vector<int> choose(const draft_tree & g, planner::round & r, sums & s) {
        std::vector<int> planned = candidates(g, MAX_ROWS - 1);
        std::vector<float> reach;
        for (const int v : planned) {
            reach.push_back(g.nodes[v].reach);
        }
        const planner::choice best = plan_.best(reach);
        r.value                    = best.value;
        planned.resize(best.n);
        for (int i = 0; i < best.n; ++i) {
            s.forecast += reach[i] * c_.layers[1];
        }
        std::stable_sort(planned.begin(), planned.end(),
            [&](int v, int w) { return g.nodes[v].depth < g.nodes[w].depth; });
        return planned;
    }

    // How many tokens the round brings. Teaches the planner as round_learn.cpp does.
    int verify(const draft_tree & g, const std::vector<int> & chosen) {
        int n = 1, node = -1;
        for (bool more = true; more && at_ + n < (int) text_->tokens.size();) {
            more     = false;
            int next = node;
            std::array<int, N_RECORDS> ranks{};
            for (const int v : chosen) {
                if (g.nodes[v].parent == node) {
                    const bool hit = g.nodes[v].token == token(at_ + n);
                    learn(g.nodes[v], ranks, hit);
                    more = more || hit;
                    next = hit ? v : next;
                }
            }
            node = next;
            more = more && at_ + n + 1 < (int) text_->tokens.size();
            n += more;
        }
        std::array<int, N_RECORDS> ranks{};
        for (const draft_tree::node & v : g.nodes) {
            if (chosen.empty() && v.parent < 0) {
                learn(v, ranks, v.token == token(at_ + 1));
            }
        }
        return n;
    }

    void learn(const draft_tree::node & v, std::array<int, N_RECORDS> & ranks, bool hit) {
        for (int from = 0; from < N_RECORDS; ++from) {
            if (v.evidence[from] != NOT_OFFERED) {
                plan_.learn(from, v.depth, ranks[from]++, v.evidence[from], hit, trust_[from]);
            }
        }
    }

    costs c_;
    bool uses_head_, uses_text_;
    planner plan_;
    text_source source_;
    trust_list trust_;
    const recorded * text_ = nullptr;
    int at_ = 0, n_pending_ = 0;
    std::vector<int> place_;  // of each node, its place in the recorded tree, or -1
};

void print_prior(const std::vector<recorded> & texts) {
    std::map<std::array<int, 3>, std::array<int, 2>> cells;
    for (const recorded & text : texts) {
        suffix_index index((int) text.tokens.size());
        for (int at = 0; at + 1 < (int) text.tokens.size(); index.append(text.tokens[at++])) {
            if (at < text.n_prompt) {
                continue;
            }
            const int32_t * end = text.tokens.data() + at + 1;
            suffix_index::match found[suffix_index::N_FOUND];
            const int n_last = std::min(at + 1, suffix_index::MAX_MATCH);
            const int n      = index.find(end - n_last, n_last, found);
            std::map<int32_t, std::array<int, 2>> of;  // longest match, matches
            for (int i = 0; i < n; ++i) {
                auto & e = of[index[found[i].next]];
                e        = {std::max(e[0], (int) found[i].length), e[1] + 1};
            }
            for (const auto & [token, e] : of) {
                int other = 0;
                for (int i = 0; i < n; ++i) {
                    other += found[i].length >= e[0] && index[found[i].next] != token;
                }
                auto & cell = cells[{e[0], other, e[1]}];
                cell        = {cell[0] + 1, cell[1] + (token == text.tokens[at + 1])};
            }
        }
    }
    puts("length others matches tries hits part");
    for (const auto & [key, cell] : cells) {
        printf("%d %d %d %d %d %.3f\n", key[0], key[1], key[2], cell[0], cell[1], (double) cell[1] / cell[0]);
    }
}

// A slot whose context is full begins again.
void print_lookups(const std::vector<recorded> & texts) {
    constexpr int CAPACITY = 1 << 14, TOKENS = 1000000;
    suffix_index index(CAPACITY);
    std::vector<int32_t> all;
    for (const recorded & text : texts) {
        all.insert(all.end(), text.tokens.begin(), text.tokens.end());
    }
    double find = 0.0, append = 0.0;
    int64_t n_found = 0;
    suffix_index::match found[suffix_index::N_FOUND];
    const auto now = [] {
        return std::chrono::steady_clock::now();
    };
    for (int i = 0; i < TOKENS; ++i) {
        if (index.size() == CAPACITY) {
            index.clear();
        }
        const size_t at = (size_t) i % all.size(), n = std::min<size_t>(at + 1, suffix_index::MAX_MATCH);
        const auto start = now();
        n_found += index.find(all.data() + at + 1 - n, (int) n, found);
        const auto middle = now();
        index.append(all[at]);
        find += std::chrono::duration<double>(middle - start).count();
        append += std::chrono::duration<double>(now() - middle).count();
    }
    printf("%.2f us a lookup (%.1f matches), %.2f us a token that is added, %zu bytes a token\n",
        1e6 * find / TOKENS, (double) n_found / TOKENS, 1e6 * append / TOKENS, index.n_bytes() / CAPACITY);
}

text_tuning tuned(int n, char ** settings) {
    text_tuning t;
    for (int i = 0; i < n; ++i) {
        float v = 0.0f;
        if (sscanf(settings[i], "trust_step=%f", &v) == 1) {
            t.trust_step = v;
        } else if (sscanf(settings[i], "shared=%f", &v) == 1) {
            t.shared = v;
        } else if (sscanf(settings[i], "sure=%f", &v) == 1) {
            t.sure = v;
        } else if (sscanf(settings[i], "declined=%f", &v) == 1) {
            t.declined = (int) v;
        } else {
            fprintf(stderr, "%s is no setting of text_tuning\n", settings[i]);
            exit(2);
        }
    }
    return t;
}

costs whole(const curve & m) {
    costs c = costs_of(m);
    for (int n = 1; n <= MAX_ROWS; ++n) {
        c.layers[n] += c.output[n];
        c.output[n] = 0.0f;
    }
    return c;
}

void print_mode(
    const std::vector<recorded> & texts, const curve & m, const std::string & mode, const text_tuning & t) {
    replay r(whole(m), mode != "text", mode != "head", t);
    std::map<std::string, sums> kinds;
    for (const recorded & text : texts) {
        const sums s = r.run(text);
        kinds[text.kind].add(s);
        kinds["~all"].add(s);
    }
    printf("%s, %s\n", m.name, mode.c_str());
    for (const auto & [kind, s] : kinds) {
        printf("  %-16s %.3f (forecast %.3f), %.2f tokens a round, %.2f drafted, %.2f with the head\n",
            kind.c_str(), s.plain / s.seconds, (s.forecast + s.rounds * whole(m).layers[1]) / s.seconds,
            s.tokens / s.rounds, s.drafted / s.rounds, s.passes / s.rounds);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "replay FILE [CURVE [MODES]], replay FILE prior, or replay FILE lookups\n");
        return 2;
    }
    const std::vector<recorded> texts = read(argv[1]);
    if (argc > 2 && !strcmp(argv[2], "lookups")) {
        print_lookups(texts);
        return 0;
    }
    if (argc > 2 && !strcmp(argv[2], "prior")) {
        print_prior(texts);
        return 0;
    }
    const text_tuning t = tuned(argc - 4, argv + 4);
    for (const curve & m : CURVES) {
        std::istringstream modes(argc > 3 ? argv[3] : "head text both");
        for (std::string mode; strstr(m.name, argc > 2 ? argv[2] : "") && modes >> mode;) {
            print_mode(texts, m, mode, t);
        }
    }
    return 0;
}
