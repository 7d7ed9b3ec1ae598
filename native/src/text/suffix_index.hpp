// An index is a text that grows and shrinks at its end, and knows where its last tokens stand in it already.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace eagle3 {

// For each length of ORDERS it has chains of the positions where tokens of one hash end, the last position
// first. A token that goes is the head of its chains, so going back restores exactly what was there before.
//
// It takes memory of at most 1.5 times BYTES_A_TOKEN for each token of the longest text so far, and
// BYTES_A_PLACE for each place, of which there are as many as the next power of two from the capacity on;
// nothing before the first token. An append, or a token that goes, takes 15 steps of a hash; a find compares
// at most N_VISITS times MAX_MATCH tokens for each order.
class suffix_index {
  public:
    static constexpr int N_ORDERS  = 4;
    static constexpr int MAX_MATCH = 32;  // tokens that are compared: a longer match is as good as this
    static constexpr int N_VISITS  = 8;   // places of each order that are looked at, the last ones
    static constexpr int N_FOUND   = 16;  // places that find returns at most
    static constexpr std::array<int, N_ORDERS> ORDERS = {8, 4, 2, 1};
    static constexpr int BYTES_A_TOKEN = 4 * (1 + N_ORDERS), BYTES_A_PLACE = 4 * N_ORDERS;

    explicit suffix_index(int capacity) : capacity_(capacity) {}

    int size() const { return (int) tokens_.size(); }
    int32_t operator[](int i) const { return tokens_[i]; }
    const int32_t * data() const { return tokens_.data(); }

    void append(int32_t token);  // beyond the capacity, chains become longer, and finds see less
    void truncate(int n);        // the first n tokens stay
    void clear() { truncate(0); }

    // This is a place where the last `length` tokens stand; `next` is the position of the token that follows
    // them.
    struct match {
        int32_t next, length;
    };
    // Finds places where last[0..n) ends, the longest order first and of each order the last place first, at
    // most N_FOUND. `last` need not be this text's end. Places that no token follows are left out.
    int find(const int32_t * last, int n, match * out) const;

    size_t n_bytes() const;

  private:
    size_t place(int order, const int32_t * end) const;  // for the tokens before `end`
    void begin();
    void reserve();

    int capacity_;
    std::vector<int32_t> tokens_;
    std::array<std::vector<int32_t>, N_ORDERS>
        before_;  // one for each token, the position before it in its chain
    std::array<std::vector<int32_t>, N_ORDERS> heads_;  // one for each place; -1 for none
};

}  // namespace eagle3
