// Rounds without drafts in one call: the text is that of single rounds, with and without a head. They end at
// a draft, at a token that ends generation, in time, and at a failure, which costs no token.
//     plain_rounds_test TARGET.gguf HEAD.gguf
#include "asks.hpp"
#include "check.hpp"
#include "script.hpp"
#include "text_fixture.hpp"

namespace {

const tokens PROMPT   = {5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 12, 5, 6, 7};
constexpr float HOURS = 1e4f;

tokens repeated(const tokens & t, int n) {
    tokens all;
    for (int i = 0; i < n; ++i) {
        all.insert(all.end(), t.begin(), t.end());
    }
    return all;
}

eagle3_run run_of(int n, float seconds = HOURS) {
    eagle3_run run = {};
    run.n          = n;
    run.seconds    = seconds;
    return run;
}

void prompt(eagle3_session * s, int slot) {
    CHECK(eagle3_rewind(s, slot, 0) == 0);
    CHECK(eagle3_prefill(s, slot, PROMPT.data(), (int) PROMPT.size(), 0) == 0);
}

// Generates as text_fixture's generate, by runs of up to `most` rounds. What a run drafts is decoded.
result generate_runs(eagle3_session * s, const fixture & f, int n, int kind, int most) {
    result r;
    prompt(s, 0);
    r.text.push_back(eagle3_sample(s, f.greedy, -1));
    while ((int) r.text.size() < n) {
        eagle3_ask a   = ask_for(0, r.text.back(), kind, EAGLE3_MAX_DRAFT, EAGLE3_MAX_DRAFT, 4);
        a.text         = 1;
        eagle3_run run = run_of(most);
        CHECK(eagle3_plain_rounds(s, &a, f.greedy, &run) == 0);
        CHECK(run.n_tokens == most || run.drafted > 0);
        CHECK(run.target_s >= 0.0f && run.verify_s >= 0.0f && run.draft_s >= 0.0f);
        r.text.insert(r.text.end(), run.tokens, run.tokens + run.n_tokens);
        r.rounds += run.n_tokens;
        CHECK(eagle3_n_past(s, 0) == (int) (PROMPT.size() + r.text.size()) - 1);
        if (run.drafted > 0) {
            int32_t out[EAGLE3_MAX_ROWS];
            CHECK(eagle3_round_decode(s) == 0);
            const int count = verify(s, f.greedy, out);
            CHECK(count > 0 && commit(s, count) == 0);
            r.text.insert(r.text.end(), out, out + count);
            r.of_text += run.drafted;
            ++r.rounds;
        }
    }
    r.text.resize(n);
    return r;
}

void test_same_text(const fixture & f) {
    for (eagle3_head * head : {(eagle3_head *) nullptr, f.head}) {
        eagle3_session * s = open(f, head, cheap_rows());
        const result one   = generate(s, f, 0, PROMPT, 150, EAGLE3_PLAIN, 0);
        for (const int most : {1, 2, 7, (int) EAGLE3_MAX_ROWS}) {
            CHECK(generate_runs(s, f, 150, EAGLE3_PLAIN, most).text == one.text);
            const result planned = generate_runs(s, f, 150, EAGLE3_PLANNED, most);
            CHECK(planned.text == one.text && planned.of_text > 0);
        }
        eagle3_session_close(s);
    }
}

// A token that ends generation is a run's last, and no round begins that would end too late. No draft goes
// beyond what is left of the text.
void test_ends(const fixture & f) {
    eagle3_session * s = open(f, nullptr, cheap_rows());
    const int32_t end  = llama_vocab_eos(llama_model_get_vocab(f.model));
    script says(repeated({20, 21, 22, end, 23, 24}, 60));
    const eagle3_ask plain = ask_for(0, 9, EAGLE3_PLAIN);
    prompt(s, 0);
    eagle3_run run = run_of(64);
    CHECK(eagle3_plain_rounds(s, &plain, says.sampler, &run) == 0);
    CHECK(run.n_tokens == 4 && run.tokens[3] == end && run.drafted == 0 && says.next == 4);
    CHECK(eagle3_n_past(s, 0) == (int) PROMPT.size() + 4);
    for (const float none : {0.0f, -1.0f, 1e-9f}) {
        run = run_of(64, none);
        CHECK(eagle3_plain_rounds(s, &plain, says.sampler, &run) == 0 && run.n_tokens == 1);
    }
    for (const int n : {0, -3, 1}) {
        run = run_of(n);
        CHECK(eagle3_plain_rounds(s, &plain, says.sampler, &run) == 0 && run.n_tokens == 1);
    }
    // the text goes on as its beginning did, but what is left of it is too short for a draft
    script again(repeated({8, 9, 10, 11, 5, 6, 7, 8, 9, 12}, 10));
    for (const int left : {2, 3, 5}) {
        prompt(s, 0);
        again.next     = 0;
        eagle3_ask a   = ask_for(0, 100, EAGLE3_PLANNED, EAGLE3_MAX_DRAFT, EAGLE3_MAX_DRAFT, 1);
        a.text         = 1;
        run            = run_of(left);
        run.max_tokens = left;
        CHECK(eagle3_plain_rounds(s, &a, again.sampler, &run) == 0);
        CHECK(left > 2 || (run.n_tokens == left && run.drafted == 0));
        CHECK(run.drafted <= std::max(left - run.n_tokens - 1, 0));
    }
    eagle3_session_close(s);
    // drafts of the other kinds
    s                    = open(f, f.head, cheap_rows());
    const int32_t ids[3] = {20, 21, 22}, parents[3] = {-1, 0, 1}, ranks[3] = {0, 0, 0};
    const eagle3_ask kinds[] = {ask_for(0, 9, EAGLE3_CHAIN, 3), ask_for(0, 9, EAGLE3_TREE, 3, 3, 2),
        ask_choices(0, 9, parents, ranks, 3), ask_given(0, 9, ids, 3)};
    for (const eagle3_ask & a : kinds) {
        for (const int left : {0, 1, 2, 3, 4}) {
            prompt(s, 0);
            run            = run_of(1);
            run.max_tokens = left;
            CHECK(eagle3_plain_rounds(s, &a, says.sampler, &run) == 0);
            CHECK(run.drafted == (left > 0 && a.kind != EAGLE3_GIVEN ? std::min(left - 1, 3) : 3));
            CHECK(run.n_tokens == (run.drafted == 0));
        }
    }
    eagle3_session_close(s);
}

// What was sampled before the failure is told, the slot holds it, and the next call fails at once, or goes
// on.
void test_failures(const fixture & f) {
    eagle3_session * s = open(f, nullptr, cheap_rows());
    script says(repeated({20, 21, 22, 23, 24}, 60));
    eagle3_ask a = ask_for(0, 9, EAGLE3_PLAIN);
    prompt(s, 0);
    says.throws_at = 3;
    eagle3_run run = run_of(64);
    CHECK(eagle3_plain_rounds(s, &a, says.sampler, &run) == EAGLE3_E_INTERNAL);
    CHECK(strstr(eagle3_last_error(), "the script's") && run.n_tokens == 3 && run.drafted == 0);
    CHECK(eagle3_n_past(s, 0) == (int) PROMPT.size() + 3);
    a.token = run.tokens[2];
    CHECK(eagle3_plain_rounds(s, &a, says.sampler, &run) == EAGLE3_E_INTERNAL && run.n_tokens == 0);
    CHECK(eagle3_n_past(s, 0) == (int) PROMPT.size() + 3);
    says.throws_at = SIZE_MAX;
    run            = run_of(2);
    CHECK(eagle3_plain_rounds(s, &a, says.sampler, &run) == 0 && run.tokens[0] == 23 && run.tokens[1] == 24);
    // the slot fills up
    const int room = 256 - eagle3_n_past(s, 0);
    int n          = 0;
    for (int code = 0; code == 0; n += run.n_tokens) {
        run  = run_of(64);
        code = eagle3_plain_rounds(s, &a, says.sampler, &run);
        CHECK(code == 0 || code == EAGLE3_E_ARGUMENT);
    }
    CHECK(n == room && eagle3_n_past(s, 0) == 256);
    CHECK(eagle3_plain_rounds(s, &a, says.sampler, &run) == EAGLE3_E_ARGUMENT && run.n_tokens == 0);
    CHECK(eagle3_plain_rounds(s, nullptr, says.sampler, &run) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_plain_rounds(s, &a, nullptr, &run) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_plain_rounds(s, &a, says.sampler, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_plain_rounds(nullptr, &a, says.sampler, &run) == EAGLE3_E_ARGUMENT);
    eagle3_session_close(s);
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    fixture f(argv[1], argv[2]);
    test_same_text(f);
    test_ends(f);
    test_failures(f);
    puts("ok");
    return 0;
}
