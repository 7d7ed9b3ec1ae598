// One row of the table of architectures: what llama.cpp can take back of a target's memory, what drafts for the target,
// and whether every row of logits that stays has the bits of plain decoding.
//     drafting ARCH dense|moe on|off ROUNDS FOLDER     on, off: flash attention. The folder is for a head.
//     drafting list
// It prints lines of "name<TAB>values": memory, rollback, and for each cell
//     rounds rows differing drafted accepted rewinds refused<TAB>rejections by depth<TAB>why not
#include "drafting.hpp"
#include "random_head.hpp"

#include <cxxabi.h>

#include <functional>
#include <typeinfo>

#include "../src/llama-memory.h"

namespace {

using drafting::failure;
using drafting::kind;
using drafting::must;
using drafting::tally;

// -- what llama.cpp's memory can do -----------------------------------------------------------------------------------

// A text of nine tokens with three wrong ones behind its seventh, which way_back takes out of the memory again.
bool takes_back(llama_model * model, const llama_context_params & params, const std::function<bool(llama_context *, bool)> & way_back) {
    const std::vector<int32_t> begin = {3, 8, 13, 18, 23, 28, 33};
    std::vector<plain::logits_row> rows[2];
    for (const bool wrong : {false, true}) {
        const llama_context_ptr ctx = plain::context(model, params);
        const auto decode           = [&](const std::vector<int32_t> & tokens, int from) { return plain::decode(ctx.get(), tokens, from) == 0; };
        for (size_t i = 0; i + 1 < begin.size(); ++i) {
            if (!decode({begin[i]}, (int) i)) {
                return false;
            }
        }
        if (!wrong) {
            decode({begin.back()}, 6);
        } else if (!way_back(ctx.get(), true)) {
            return false;
        }
        for (const int at : {7, 8}) {
            if (!decode({38}, at)) {
                return false;
            }
            rows[wrong].push_back(plain::row_of(ctx.get(), 0));
        }
    }
    return plain::same(rows[0][0], rows[1][0]) && plain::same(rows[0][1], rows[1][1]);
}

const char * rollback(llama_model * model, llama_flash_attn_type flash) {
    llama_context_params params = plain::settings(flash, 1, 0);
    const auto removes          = [](llama_context * ctx, bool) {
        return plain::decode(ctx, {33, 43, 48, 53}, 6) == 0 && llama_memory_seq_rm(llama_get_memory(ctx), 0, 7, -1);
    };
    if (takes_back(model, params, removes)) {
        return "any";
    }
    params.n_rs_seq = 4;
    if (takes_back(model, params, removes)) {
        return "snapshots";
    }
    params.n_rs_seq     = 0;
    const auto restores = [](llama_context * ctx, bool) {
        const uint32_t flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
        plain::decode(ctx, {33}, 6);
        std::vector<uint8_t> state(llama_state_seq_get_size_ext(ctx, 0, flags));
        llama_state_seq_get_data_ext(ctx, state.data(), state.size(), 0, flags);
        plain::decode(ctx, {43, 48, 53}, 7);
        return llama_state_seq_set_data_ext(ctx, state.data(), state.size(), 0, flags) == state.size() &&
               llama_memory_seq_rm(llama_get_memory(ctx), 0, 7, -1);
    };
    return takes_back(model, params, restores) ? "checkpoint" : "none";
}

std::string memory_of(llama_model * model, llama_flash_attn_type flash) {
    const llama_context_ptr ctx(llama_init_from_model(model, plain::settings(flash, 1, 0)));
    const llama_memory_t memory = llama_get_memory(ctx.get());
    if (!memory) {
        return "none";
    }
    char * name = abi::__cxa_demangle(typeid(*memory).name(), nullptr, nullptr, nullptr);
    const std::string out = name;
    free(name);
    return out;
}

// -- the cells --------------------------------------------------------------------------------------------------------

struct target {
    llama_model_ptr model;
    llama_flash_attn_type flash;
    int n_rounds;
    std::unique_ptr<plain::decoding> reference;
    eagle3_head * head = nullptr;
    std::string why_no_drafts, why_no_head, why_no_tree;
    bool drafts = false, alike = true;

    ~target() { eagle3_head_close(head); }

    std::unique_ptr<drafting::session> open(int n_slots, int n_rs_seq, bool with_head, tally & t) const {
        auto s           = std::make_unique<drafting::session>(model.get(), plain::settings(flash, n_slots, n_rs_seq), *reference, with_head ? head : nullptr, t);
        s->whole_prompts = drafts;
        return s;
    }

    // What the library says of drafts, of a head's, and of trees.
    void ask() {
        tally t;
        try {
            const auto s = open(1, 0, true, t);
            s->begin(0);
            s->kinds = {drafting::HEAD_CHAIN};
            s->round({0});
        } catch (const failure & e) {
            why_no_head = e.what();
        }
        const auto s = open(1, 0, false, t);
        drafts       = s->drafts();
        why_no_drafts = drafts ? "" : why_no_head;
        if (!drafts) {
            why_no_tree = why_no_head;
        } else if (!s->can_tree()) {
            s->begin(0);
            s->kinds = {drafting::GIVEN_TREE};
            try {
                while (true) {  // one of a few tokens may be a chain
                    s->round({0});
                }
            } catch (const failure & e) {
                why_no_tree = e.what();
            }
        }
    }

    bool has_head() const { return why_no_head.empty(); }

    std::vector<kind> all_kinds() const {
        std::vector<kind> kinds = {drafting::ROW};
        const auto add          = [&](bool can, std::initializer_list<kind> more) { kinds.insert(kinds.end(), can ? more.begin() : more.end(), more.end()); };
        add(drafts, {drafting::GIVEN_CHAIN, drafting::TEXT});
        add(drafts && has_head(), {drafting::HEAD_CHAIN});
        add(why_no_tree.empty(), {drafting::GIVEN_TREE, drafting::TEXT_TREE});
        add(why_no_tree.empty() && has_head(), {drafting::HEAD_TREE});
        return kinds;
    }
};

void of_kinds(const target & t, tally & n, int n_rs_seq, bool with_head, const std::vector<kind> & kinds) {
    const auto s = t.open(1, n_rs_seq, with_head, n);
    s->kinds     = t.drafts ? kinds : std::vector<kind>{drafting::ROW};
    s->begin(0);
    for (int i = 0; i < t.n_rounds; ++i) {
        if (s->over(0)) {
            s->begin(0);
        }
        s->round({0});
    }
    s->compare(0);
}

void text(const target & t, tally & n, int n_rs_seq) {
    of_kinds(t, n, n_rs_seq, false, {drafting::TEXT, drafting::GIVEN_CHAIN});
}

void chain(const target & t, tally & n, int n_rs_seq) {
    of_kinds(t, n, n_rs_seq, true, {drafting::HEAD_CHAIN, drafting::GIVEN_CHAIN});
}

void tree(const target & t, tally & n, int n_rs_seq) {
    std::vector<kind> kinds = {drafting::GIVEN_TREE, drafting::TEXT_TREE};
    if (t.has_head()) {
        kinds.push_back(drafting::HEAD_TREE);
    }
    of_kinds(t, n, n_rs_seq, t.has_head(), kinds);
}

// Four slots, of which some take part in a round, at different positions and with different drafts.
void slots(const target & t, tally & n, int n_rs_seq) {
    const auto s = t.open(4, n_rs_seq, t.has_head(), n);
    s->kinds     = t.all_kinds();
    for (int slot = 0; slot < 4; ++slot) {
        s->begin(slot);
    }
    for (int i = 0; i < t.n_rounds; ++i) {
        std::vector<int> of;
        for (int slot = 0; slot < 4; ++slot) {
            if (s->over(slot)) {
                s->begin(slot);
            }
            if (s->rng.below(4) > 0) {
                of.push_back(slot);
            }
        }
        if (!of.empty()) {
            s->round(of);
        }
    }
    for (int slot = 0; slot < 4; ++slot) {
        s->compare(slot);
    }
}

// States are saved behind several windows, and restored after some more rounds, into the same slot and another one;
// then, at times, the restored text is cut. whole: the context's state.
void states(const target & t, tally & n, int n_rs_seq, bool whole) {
    const auto s = t.open(whole ? 1 : 2, n_rs_seq, t.has_head(), n);
    s->kinds     = t.all_kinds();
    s->begin(0);
    for (const int64_t end = n.rounds + t.n_rounds / 2; n.rounds < end;) {
        const auto go_on = [&](int slot) {
            for (int i = 2 + s->rng.below(8); i > 0 && !s->over(slot); --i) {
                s->round({slot});
            }
        };
        if (s->over(0)) {
            s->begin(0);
        }
        while (s->texts[0].tokens.size() < 70) {
            go_on(0);
        }
        const drafting::saved state = s->save(0, whole);
        go_on(0);
        const int slot = s->rng.below((int) s->texts.size());
        s->restore(slot, state, whole);
        if (s->rng.below(3) == 0) {
            s->rewind(slot, (int) s->texts[slot].tokens.size() - 1 - s->rng.below(3));
        }
        go_on(slot);
        s->compare(slot);
    }
    s->compare(0);
}

void saved(const target & t, tally & n, int n_rs_seq) {
    states(t, n, n_rs_seq, false);
    states(t, n, n_rs_seq, true);
}

// A text goes on otherwise from some place on: behind the last round, as after a stop string, or far back.
void prefix(const target & t, tally & n, int n_rs_seq) {
    const auto s = t.open(1, n_rs_seq, t.has_head(), n);
    s->kinds     = t.all_kinds();
    s->begin(0);
    for (int i = 0; i < t.n_rounds; ++i) {
        if (s->over(0)) {
            s->begin(0);
        }
        s->round({0});
        const int n_past = (int) s->texts[0].tokens.size();
        if (s->rng.below(8) == 0) {
            const bool near = s->rng.below(2) == 0;
            s->rewind(0, near ? n_past - 1 - s->rng.below(3) : n_past / 2 + s->rng.below(4));
            if (!near) {
                s->read(0, {3, 18, 33, 48, 63});
            }
        }
    }
    s->compare(0);
}

void print(const char * name, const tally & n, const std::string & why) {
    const auto sum = [](const int64_t * x, int n) { return (long long) std::accumulate(x, x + n, (int64_t) 0); };
    printf("%s\t%lld %lld %lld %lld %lld %lld %lld\t", name, (long long) n.rounds, (long long) n.rows, (long long) n.differing,
        sum(n.drafted, drafting::N_KINDS), sum(n.accepted, drafting::N_KINDS), (long long) n.rewinds, (long long) n.rewinds_refused);
    for (int depth = 0; depth < 8; ++depth) {
        printf("%lld ", (long long) n.rejected[depth]);
    }
    printf("\t%s\n", why.c_str());
    fflush(stdout);
}

void print_row(const target & t, const char * way_back) {
    using cell                                              = void (*)(const target &, tally &, int);
    const std::tuple<const char *, cell, std::string> cells[] = {{"text", text, t.why_no_drafts}, {"chain", chain, t.why_no_head}, {"tree", tree, t.why_no_tree},
        {"slots", slots, t.why_no_drafts}, {"saved", saved, t.why_no_drafts}, {"prefix", prefix, t.why_no_drafts}};
    for (const auto & [name, run, why] : cells) {
        tally n;
        std::string failed = why;
        const bool runs    = t.drafts ? why.empty() : run != chain && run != tree;
        try {
            for (const int n_rs_seq : {0, 4}) {
                if (runs && (n_rs_seq == 0 || (t.drafts && strcmp(way_back, "snapshots") == 0))) {
                    run(t, n, n_rs_seq);
                }
            }
        } catch (const std::exception & e) {
            failed = std::string("failed: ") + e.what();
        }
        print(name, n, failed);
    }
}

int row(llm_arch arch, bool moe, llama_flash_attn_type flash, int n_rounds, const std::string & folder) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    target t;
    t.model    = generator::model(arch, moe);
    t.flash    = flash;
    t.n_rounds = n_rounds;
    printf("memory\t%s\n", memory_of(t.model.get(), flash).c_str());
    {
        const llama_context_ptr ctx(llama_init_from_model(t.model.get(), plain::settings(flash, 1, 0)));
        eagle3_session * s = nullptr;
        const int code     = eagle3_session_open(ctx.get(), nullptr, 1, &s);
        eagle3_session_close(s);
        if (code < 0) {
            printf("refused\t%s\n", eagle3_last_error());
            return 0;
        }
    }
    t.reference = std::make_unique<plain::decoding>(t.model.get(), flash);
    const std::string head = folder + "/head.gguf";
    random_head::write(t.model.get(), head);
    must(eagle3_head_open(head.c_str(), t.model.get(), &t.head));
    const char * way_back = rollback(t.model.get(), flash);
    printf("rollback\t%s\n", way_back);
    fflush(stdout);
    t.ask();
    print_row(t, way_back);
    return 0;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc == 2 && strcmp(argv[1], "list") == 0) {
        for (const llm_arch & arch : llm_arch_all()) {
            if (generator::makes(arch)) {
                printf("%s\t%d\t%d\n", llm_arch_name(arch), (int) !moe_mandatory(arch), (int) moe_implemented(arch));
            }
        }
        return 0;
    }
    if (argc != 6) {
        fprintf(stderr, "usage: drafting ARCH dense|moe on|off ROUNDS FOLDER, or list\n");
        return 2;
    }
    try {
        return row(llm_arch_from_string(argv[1]), strcmp(argv[2], "moe") == 0,
            strcmp(argv[3], "on") == 0 ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED, atoi(argv[4]), argv[5]);
    } catch (const std::exception & e) {
        printf("failed\t%s\n", e.what());
        return 1;
    }
}
