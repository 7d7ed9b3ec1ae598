// The memory of earlier texts: its bound and what it forgets; sessions that draft from it, whose text is
// plain decoding's; slots that do not use it see none of it.
//     text_memory_test TARGET.gguf HEAD.gguf
#include "text_fixture.hpp"
#include "text/text_memory.hpp"

#include <random>

using eagle3::text_memory;

namespace {

const tokens PROMPT = {5, 6, 7, 8, 9, 10, 11};

tokens held(const text_memory & m) {
    tokens out(m.size());
    m.copy(out.data());
    return out;
}

// Two million tokens through memories of several sizes: never more bytes, and always the last texts.
void test_bound() {
    for (const int64_t size : {text_memory::LEAST_SIZE, int64_t(1) << 20, int64_t(5) << 20}) {
        text_memory m(size);
        CHECK(m.size() == 0 && m.n_bytes() == 0);
        std::mt19937 rng(4);
        tokens all;
        int64_t least = INT64_MAX;
        while (all.size() < 2000000) {
            tokens text(1 + rng() % 300);
            for (int32_t & t : text) {
                t = (int32_t) (rng() % 1000);
            }
            m.add(text.data(), (int) text.size());
            all.insert(all.end(), text.begin(), text.end());
            all.push_back(text_memory::END);
            CHECK((int64_t) m.n_bytes() <= size);
            if (all.size() > 1000000) {
                least = std::min(least, m.size());
            }
        }
        const tokens now = held(m);
        CHECK(std::equal(now.rbegin(), now.rend(), all.rbegin()));
        CHECK(least * 80 > size);  // at worst half of its 38 bytes a token are used
    }
}

void test_long_text() {
    text_memory m(text_memory::LEAST_SIZE);
    tokens text(100000);
    for (size_t i = 0; i < text.size(); ++i) {
        text[i] = (int32_t) i;
    }
    m.add(text.data(), (int) text.size());
    const tokens now = held(m);
    CHECK(now.size() > 500 && now.size() < 2000 && now.back() == text_memory::END);
    CHECK(std::equal(now.rbegin() + 1, now.rend(), text.rbegin()));
    m.add(text.data(), 0);
    CHECK(held(m) == now);
}

void test_arguments(const fixture & f) {
    eagle3_text_memory * m = nullptr;
    CHECK(eagle3_text_memory_open(1000, &m) == EAGLE3_E_ARGUMENT && m == nullptr);
    CHECK(eagle3_text_memory_open(-1, &m) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_open(1 << 20, nullptr) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_open(int64_t(1) << 62, &m) == 0);  // is made as it fills
    const tokens bad = {1, -1};
    CHECK(eagle3_text_memory_add(m, bad.data(), 2) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_add(m, nullptr, 2) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_add(nullptr, bad.data(), 1) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_get(m, nullptr, 0) == 0);
    eagle3_text_memory_close(m);
    CHECK(eagle3_text_memory_open(1 << 20, &m) == 0);
    CHECK(eagle3_text_memory_add(m, PROMPT.data(), (int) PROMPT.size()) == 0);
    int32_t out[16];
    CHECK(eagle3_text_memory_get(m, out, 7) == EAGLE3_E_ARGUMENT);
    CHECK(eagle3_text_memory_get(m, out, 16) == 8 && out[0] == 5 && out[6] == 11 && out[7] == -1);
    eagle3_session * s = open(f, nullptr, cheap_rows());
    CHECK(eagle3_text_memory_use(s, 2, m) == EAGLE3_E_ARGUMENT && eagle3_text_memory_use(s, 0, m) == 0);
    eagle3_session_close(s);
    eagle3_text_memory_close(m);
    eagle3_text_memory_close(nullptr);
}

// What the same request was answered before is drafted, as long as the slot uses the memory.
void test_drafts(const fixture & f) {
    for (eagle3_head * head : {(eagle3_head *) nullptr, f.head}) {
        eagle3_session * s     = open(f, head, cheap_rows());
        const result plain     = generate(s, f, 0, PROMPT, 100, EAGLE3_PLAIN, 0);
        const result before    = generate(s, f, 0, PROMPT, 100, EAGLE3_PLANNED, 1);
        eagle3_text_memory * m = nullptr;
        CHECK(eagle3_text_memory_open(1 << 20, &m) == 0);
        CHECK(eagle3_text_memory_add(m, plain.text.data(), (int) plain.text.size()) == 0);
        CHECK(eagle3_text_memory_use(s, 0, m) == 0);
        CHECK(eagle3_rewind(s, 0, 0) == 0 && eagle3_rewind(s, 1, 0) == 0);
        for (int slot = 0; slot < 2; ++slot) {
            CHECK(eagle3_prefill(s, slot, plain.text.data(), 10, 0) == 0);
        }
        CHECK(eagle3_text_match(s, 0, plain.text[10]) == 11);
        CHECK(eagle3_text_match(s, 1, plain.text[10]) < 11);  // the other slot does not use it
        const result after = generate(s, f, 0, PROMPT, 100, EAGLE3_PLANNED, 1);
        CHECK(after.text == plain.text && before.text == plain.text);
        CHECK(after.rounds < before.rounds && after.rounds <= 20);
        eagle3_text_memory_close(m);  // the slot keeps it
        CHECK(generate(s, f, 0, PROMPT, 100, EAGLE3_PLANNED, 1).rounds <= 20);
        CHECK(eagle3_text_memory_use(s, 0, nullptr) == 0);
        CHECK(generate(s, f, 0, PROMPT, 100, EAGLE3_PLANNED, 1).text == plain.text);
        eagle3_session_close(s);
    }
}

// A memory that lies, and one whose texts end where the match does: the text is plain decoding's.
void test_lies(const fixture & f) {
    eagle3_session * s     = open(f, f.head, cheap_rows());
    const result plain     = generate(s, f, 0, PROMPT, 60, EAGLE3_PLAIN, 0);
    eagle3_text_memory * m = nullptr;
    CHECK(eagle3_text_memory_open(1 << 20, &m) == 0);
    for (int i = 4; i < 60; ++i) {
        tokens lie(plain.text.begin() + i - 4, plain.text.begin() + i);
        CHECK(eagle3_text_memory_add(m, lie.data(), 4) == 0);
        lie.insert(lie.end(), {1, 2, 3, (int32_t) i});
        CHECK(eagle3_text_memory_add(m, lie.data(), (int) lie.size()) == 0);
    }
    CHECK(eagle3_text_memory_use(s, 0, m) == 0);
    CHECK(generate(s, f, 0, PROMPT, 60, EAGLE3_PLANNED, 1).text == plain.text);
    eagle3_session_close(s);
    eagle3_text_memory_close(m);
}

}  // namespace

int main(int argc, char ** argv) {
    CHECK(argc == 3);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    test_bound();
    test_long_text();
    fixture f(argv[1], argv[2]);
    test_arguments(f);
    test_drafts(f);
    test_lies(f);
    puts("ok");
    return 0;
}
