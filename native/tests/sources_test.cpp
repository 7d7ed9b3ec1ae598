// A scripted source of drafts beside the head: the planner chooses among both; the source is told what was
// accepted, rewound, saved and restored; its statistics are its own; reports name it.
//     sources_test TARGET.gguf HEAD.gguf
#include "asks.hpp"
#include "api/capi.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);                                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

namespace {

constexpr int N_SLOTS = 2, N_TEXT = 60, N_AHEAD = 4;
constexpr int SCRIPT              = eagle3::OTHER + 1;  // the source of this test, behind the grammar
const std::vector<int32_t> PROMPT = {5, 6, 7, 8, 9, 10, 11};

// Knows how the text goes on, or continues it with wrong tokens.
class script : public eagle3::source {
  public:
    std::vector<int32_t> right;
    std::vector<std::vector<int32_t>> texts;  // of each slot, as it was told
    bool lies = false, copies = false;        // copies: offers what the head offers, too

    explicit script(const char * name = "script") : texts(N_SLOTS), name_(name) {}

    const char * name() const override { return name_; }
    bool ready(int slot) const override { return texts[slot].size() + 1 < right.size(); }

    void begin(eagle3::draft_tree & g, const std::vector<int> & asks) override {
        for (const int a : asks) {
            int parent = -1;
            for (size_t at = g.n_past[a] + 1, n = 0; at < right.size() && n < N_AHEAD; ++at, ++n) {
                parent = g.offer(id, a, parent, lies ? (right[at] + 1) % 50 : right[at], 0.9f, 0);
            }
        }
    }

    void follow(eagle3::draft_tree & g, const std::vector<int> & nodes) override {
        for (const int v : nodes) {
            const eagle3::draft_tree::node n = g.nodes[v];
            CHECK(!copies || g.offer(id, n.ask, n.parent, n.token, 0.3f, 1) == v);
        }
    }

    void kept(const eagle3::kept_tokens & k) override {
        CHECK(k.pos == (int) texts[k.slot].size() && k.tokens.size() == k.rows.size() && !k.tokens.empty());
        texts[k.slot].insert(texts[k.slot].end(), k.tokens.begin(), k.tokens.end());
    }
    void rewind(int slot, int n_past) override { texts[slot].resize(n_past); }
    void reset(int slot, int n_past) override { texts[slot].assign(n_past, -1); }

    int64_t state_size(int slot) const override { return 4 + 4 * (int64_t) texts[slot].size(); }
    void save(int slot, int n_past, uint8_t * out) const override {
        CHECK(n_past == (int) texts[slot].size());
        memcpy(out, &n_past, 4);
        memcpy(out + 4, texts[slot].data(), 4 * texts[slot].size());
    }
    int64_t check(const uint8_t * data, int64_t size) const override {
        int32_t n = -1;
        memcpy(&n, data, size < 4 ? 0 : 4);
        eagle3::require(n >= 0 && 4 + 4 * (int64_t) n <= size, EAGLE3_E_FORMAT, "no script's state");
        return 4 + 4 * (int64_t) n;
    }
    void restore(int slot, int n_past, const uint8_t * data) override {
        texts[slot].resize(n_past);
        memcpy(texts[slot].data(), data + 4, 4 * (size_t) n_past);
    }

  private:
    const char * name_;
};

struct fixture {
    llama_model * model;
    llama_context * ctx;
    llama_sampler * greedy = llama_sampler_init_greedy();
    std::unique_ptr<eagle3::head> head;

    fixture(const char * target, const char * path)
        : model(llama_model_load_from_file(target, llama_model_default_params())) {
        CHECK(model != nullptr);
        llama_context_params p = llama_context_default_params();
        p.n_ctx                = 256 * N_SLOTS;
        p.n_batch = p.n_ubatch = 64;
        p.n_seq_max            = N_SLOTS;
        p.n_threads = p.n_threads_batch = 1;
        p.flash_attn_type               = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        ctx                             = llama_init_from_model(model, p);
        head                            = eagle3::load_head(path, model);
    }
    ~fixture() {
        llama_sampler_free(greedy);
        llama_free(ctx);
        head.reset();
        llama_model_free(model);
    }
};

// One round of slots 0..n-1, greedy. Appends what each sampled to its text, whose last token is not decoded
// yet. Returns the number of tokens that slot 0 got.
int round_of(eagle3::session & s, const fixture & f, std::vector<std::vector<int32_t>> & texts, int width) {
    const int n = (int) texts.size();
    std::vector<eagle3_ask> asks;
    for (int i = 0; i < n; ++i) {
        asks.push_back(ask_for(i, texts[i].back(), width ? EAGLE3_PLANNED : EAGLE3_PLAIN, 24, 0, width));
    }
    std::vector<int32_t> out(64 * n), counts(n);
    const std::vector<llama_sampler *> samplers(n, f.greedy);
    std::string failure;
    s.draft(asks);
    s.decode();
    s.verify(samplers.data(), out.data(), counts.data(), failure);
    s.commit(counts.data());
    for (int i = 0; i < n; ++i) {
        CHECK(counts[i] > 0);
        texts[i].insert(texts[i].end(), &out[64 * i], &out[64 * i] + counts[i]);
    }
    return counts[0];
}

// The texts of slots 0..n-1 after the prompt was decoded, with the first token sampled.
std::vector<std::vector<int32_t>> begin(eagle3::session & s, const fixture & f, int n) {
    std::vector<std::vector<int32_t>> texts(n, PROMPT);
    for (int i = 0; i < n; ++i) {
        s.rewind(i, 0);
        s.prefill(i, PROMPT.data(), (int) PROMPT.size(), false);
        texts[i].push_back(s.sample(f.greedy, -1));
    }
    return texts;
}

bool begins_with(const std::vector<int32_t> & text, const std::vector<int32_t> & other) {
    return std::equal(text.begin(), text.begin() + std::min(text.size(), other.size()), other.begin());
}

// Drafts of the head and of the script as one: siblings differ, and there are no more than the width. Where
// the script is right, its tokens are drafted.
void check_draft(const eagle3::slot_state & slot, int width) {
    const size_t n = slot.draft.tokens.size();
    for (size_t i = 0; i < n; ++i) {
        int siblings = 0;
        for (size_t j = 0; j < n; ++j) {
            siblings += slot.draft.parents[i] == slot.draft.parents[j];
            CHECK(i == j || slot.draft.parents[i] != slot.draft.parents[j] ||
                  slot.draft.tokens[i] != slot.draft.tokens[j]);
        }
        CHECK(siblings <= width && slot.draft.parents[i] < (int) i);
        const eagle3::evidence_list & evidence = slot.draft.evidence[i];
        CHECK(evidence[eagle3::PASSES] >= 0.0f || evidence[SCRIPT] >= 0.0f);
    }
}

struct tally {
    int rounds = 0, tokens = 0, scripted = 0;  // scripted: draft tokens of the script
};

tally generate(eagle3::session & s, const fixture & f, const script & source, int n_slots, int width) {
    tally t;
    for (int turn = 0; turn < 6; ++turn) {  // a prompt ends a rest of the planner's
        std::vector<std::vector<int32_t>> texts = begin(s, f, n_slots);
        for (int r = 0; r < 15; ++r) {
            ++t.rounds;
            t.tokens += round_of(s, f, texts, width);
            for (int i = 0; i < n_slots; ++i) {
                CHECK(begins_with(texts[i], source.right));
                CHECK(begins_with(texts[i], source.texts[i]));
                CHECK(
                    (int) source.texts[i].size() == s.n_past(i) && s.n_past(i) + 1 == (int) texts[i].size());
                check_draft(s.slot(i), width);
                for (const eagle3::evidence_list & e : s.slot(i).draft.evidence) {
                    t.scripted += e[source.id] >= 0.0f;
                }
            }
        }
    }
    return t;
}

// Rewound and restored, the source knows the same text as the slot.
void check_state(eagle3::session & s, const fixture & f, const script & source) {
    std::vector<std::vector<int32_t>> texts = begin(s, f, 1);
    round_of(s, f, texts, 1);
    std::vector<uint8_t> state(s.state_size(0)), target(llama_state_seq_get_size(f.ctx, 0));
    s.state_get(0, state.data());
    llama_state_seq_get_data(f.ctx, target.data(), target.size(), 0);
    const std::vector<int32_t> known = source.texts[0];
    s.rewind(0, 3);
    CHECK((int) source.texts[0].size() == 3 && begins_with(source.texts[0], known));
    const auto refused = [&](std::vector<uint8_t> bytes) {
        try {
            s.state_set(0, bytes.data(), (int64_t) bytes.size());
        } catch (const eagle3::error & e) {
            return e.status == EAGLE3_E_FORMAT && source.texts[0].size() == 3 && s.n_past(0) == 3;
        }
        return false;
    };
    std::vector<uint8_t> longer = state, shorter(state.begin(), state.end() - 1), damaged = state;
    longer.push_back(0);
    damaged[state.size() - 4 * known.size() - 1] = 0xff;  // the script's count
    CHECK(refused(longer) && refused(shorter) && refused(damaged));
    s.rewind(0, 0);
    CHECK(llama_state_seq_set_data(f.ctx, target.data(), target.size(), 0) == target.size());
    s.state_set(0, state.data(), (int64_t) state.size());
    CHECK(source.texts[0] == known && s.n_past(0) == (int) known.size());
    for (int r = 0; r < 5; ++r) {
        round_of(s, f, texts, 1);
        CHECK(begins_with(texts[0], source.right));
    }
    s.reset(0, s.n_past(0));
    CHECK((int) source.texts[0].size() == s.n_past(0) && source.texts[0][0] == -1);
}

// The C API names the script behind head, text and grammar.
void check_names(const eagle3_session & s, const script & source) {
    const std::pair<const char *, int> own[] = {
        {"head", EAGLE3_FROM_HEAD}, {"text", EAGLE3_FROM_TEXT}, {"grammar", EAGLE3_FROM_GRAMMAR}};
    for (int i = 0; i < 3; ++i) {
        CHECK(strcmp(eagle3_source_name(&s, i), own[i].first) == 0 && 1 << i == own[i].second);
    }
    CHECK(eagle3_source_name(&s, source.id) == source.name());
    CHECK(!eagle3_source_name(&s, source.id + 1) && !eagle3_source_name(&s, -1));
    CHECK(!eagle3_source_name(nullptr, 0));
}

// The source's bit is in what the C API says of slot 0's draft. Returns the number of the source's tokens.
int check_bits(const eagle3_session & s, const script & source) {
    int32_t tokens[EAGLE3_MAX_DRAFT], sources[EAGLE3_MAX_DRAFT], n_scripted = 0;
    const int32_t n = eagle3_round_drafted(&s, 0, tokens, nullptr, nullptr, sources);
    for (int i = 0; i < n; ++i) {
        const bool scripted = s.impl->slot(0).draft.evidence[i][source.id] >= 0.0f;
        CHECK(sources[i] != 0 && scripted == (((sources[i] >> source.id) & 1) != 0));
        n_scripted += scripted;
    }
    return n_scripted;
}

// A single draft may be none of the script's: the planner looks at plain rounds between drafts, and rests
// where times say so. A prompt ends a rest, and these costs make drafts worth their rows.
bool drafts_scripted(
    const eagle3_session & handle, const fixture & f, const script & source, const eagle3::costs & costs) {
    eagle3::session & s = *handle.impl;
    for (int turn = 0; turn < 50; ++turn) {
        s.set_plan(costs);
        s.draft({ask_for(0, begin(s, f, 1)[0].back(), EAGLE3_PLANNED, 24, 0, 1)});
        if (check_bits(handle, source) > 0) {
            return true;
        }
    }
    return false;
}

// There is room for three sources beside head, text and grammar, and each name is one source's.
void check_room(const fixture & f) {
    eagle3::session s(f.ctx, f.head.get(), N_SLOTS);
    const auto added = [&](const char * name) {
        try {
            s.add_source(std::make_unique<script>(name));
        } catch (const eagle3::error & e) {
            CHECK(e.status == EAGLE3_E_ARGUMENT && strstr(e.what(), name) != nullptr);
            return false;
        }
        return true;
    };
    CHECK(added("one") && added("two"));
    for (const char * taken : {"head", "text", "grammar", "one", "both", "target"}) {
        CHECK(!added(taken));
    }
    CHECK(added("three") && !added("four"));
    for (int i = 0; i < EAGLE3_MAX_SOURCES; ++i) {
        CHECK(s.source_name(i) != nullptr);
    }
    CHECK(s.source_name(EAGLE3_MAX_SOURCES) == nullptr);
}

std::vector<int32_t> chain_of_head(eagle3::session & s, const fixture & f) {
    const std::vector<std::vector<int32_t>> texts = begin(s, f, 1);
    s.draft({ask_for(0, texts[0].back(), EAGLE3_CHAIN, 8)});
    return s.slot(0).draft.tokens;
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    fixture f(argv[1], argv[2]);
    std::vector<std::vector<int32_t>> plain;
    {
        eagle3::session s(f.ctx, nullptr, 1);
        plain = begin(s, f, 1);
        while ((int) plain[0].size() < N_TEXT * 3) {
            round_of(s, f, plain, 0);
        }
        s.rewind(0, 0);
    }
    std::vector<int32_t> chain;
    {
        eagle3::session s(f.ctx, f.head.get(), N_SLOTS);
        chain = chain_of_head(s, f);
        CHECK(chain.size() == 8);
        s.rewind(0, 0);
    }
    eagle3::costs costs = {};
    for (int n = 1; n <= eagle3::MAX_ROWS; ++n) {
        costs.layers[n] = 1e-3f * (1.0f + 0.01f * n);
        costs.head[n]   = 1e-5f;
    }
    check_room(f);
    const eagle3_session handle{std::make_unique<eagle3::session>(f.ctx, f.head.get(), N_SLOTS)};
    eagle3::session & s = *handle.impl;
    auto owned          = std::make_unique<script>();
    script & source     = *owned;
    source.right        = plain[0];
    s.add_source(std::move(owned));
    CHECK(source.id == SCRIPT);
    CHECK(chain_of_head(s, f) == chain);  // a chain is the head's alone
    s.set_plan(costs);
    check_names(handle, source);
    CHECK(check_bits(handle, source) == 0);
    const int widths[] = {1, s.can_tree() ? 4 : 1};
    for (const int n_slots : {1, N_SLOTS}) {
        for (const int width : widths) {
            source.copies = width > 1;
            const tally t = generate(s, f, source, n_slots, width);
            CHECK(t.scripted > 0 && t.tokens > t.rounds);
        }
    }
    // the last ones were right: as likely as the script says, or more
    const float believed = s.plan().accept(source.id, 1, 0.9f, 1.0f);
    CHECK(believed > 0.85f);
    CHECK(drafts_scripted(handle, f, source, costs));
    check_state(s, f, source);
    source.lies   = true;
    source.copies = false;
    generate(s, f, source, 1, 1);
    CHECK(s.plan().accept(source.id, 1, 0.9f, 1.0f) < believed - 0.1f);
    puts("ok");
    return 0;
}
