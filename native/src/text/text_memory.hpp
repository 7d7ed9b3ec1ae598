// A memory has texts of earlier requests, for slots that may draft from them. It is bounded, and the oldest
// go first.
#pragma once

#include "text/suffix_index.hpp"

#include <array>
#include <cstdint>
#include <vector>

namespace eagle3 {

// It has two halves: texts go into the one, and when it is full, it takes the other's place, whose texts are
// forgotten. Thus nothing is ever taken out of the middle of an index.
class text_memory {
  public:
    static constexpr int32_t END        = -1;       // stands behind each text: no token
    static constexpr int64_t LEAST_SIZE = 1 << 16;  // bytes

    explicit text_memory(int64_t n_bytes);  // E_ARGUMENT below LEAST_SIZE

    // Appends a text, or its end if it is longer than a half. If memory runs out, the newer half is empty.
    void add(const int32_t * tokens, int n);

    // Returns the older half, then the newer one. They stay where they are as long as the memory lives.
    std::array<const suffix_index *, 2> halves() const { return {&older_, &newer_}; }

    int64_t size() const { return (int64_t) older_.size() + newer_.size(); }  // tokens, each END included
    void copy(int32_t * out) const;                                           // size() of them, oldest first
    size_t n_bytes() const { return older_.n_bytes() + newer_.n_bytes(); }

  private:
    void turn();

    int places_, most_;  // in a half: places of its index, tokens
    suffix_index older_, newer_;
};

}  // namespace eagle3
