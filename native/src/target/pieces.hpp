// The bytes of tokens.
#pragma once

#include "llama.h"

#include <algorithm>
#include <string>

namespace eagle3 {

// Returns the bytes of a token, those of special tokens too.
inline std::string piece_of(const llama_vocab * vocab, llama_token token) {
    std::string out(64, '\0');
    int n = llama_token_to_piece(vocab, token, &out[0], (int) out.size(), 0, true);
    if (n < 0) {
        out.resize(-n);
        n = llama_token_to_piece(vocab, token, &out[0], (int) out.size(), 0, true);
    }
    out.resize(std::max(n, 0));
    return out;
}

}  // namespace eagle3
