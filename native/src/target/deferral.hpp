// The rows of logits that nobody reads cost little. On the CPU, a deferred decode leaves out the output
// matrix, and its product is computed afterwards with the rows that are needed: see
// llama_set_logits_deferred. On a device all rows are computed; they stay there until they are needed: see
// llama_set_logits_stay.
#pragma once

#include "llama-ext.h"

namespace eagle3 {

// Turns deferral on until the end of the scope, however the scope is left. If it stayed on, later callers of
// this context would get rows without logits.
class deferral {
  public:
    deferral(llama_context * ctx, bool on) : ctx_(ctx) { llama_set_logits_deferred(ctx_, on); }
    ~deferral() { llama_set_logits_deferred(ctx_, false); }

    deferral(const deferral &)             = delete;
    deferral & operator=(const deferral &) = delete;

  private:
    llama_context * ctx_;
};

// Leaves logits on the device that computes them until the end of the scope, and looks for the n_largest ones
// of each row there.
class logits_stay {
  public:
    logits_stay(llama_context * ctx, bool on, int n_largest) : ctx_(ctx) {
        llama_set_logits_stay(ctx_, on, (uint32_t) n_largest);
    }
    ~logits_stay() { llama_set_logits_stay(ctx_, false, 0); }

    logits_stay(const logits_stay &)             = delete;
    logits_stay & operator=(const logits_stay &) = delete;

  private:
    llama_context * ctx_;
};

// Computes the logits of rows [first, first + n) of the last decode, which llama_get_logits_ith then returns.
// It may be called any number of times, for any pieces, until the next decode; each row has the bits that the
// whole product has. It does nothing where the decode left nothing out. It throws an error if there are no
// such rows, or if the backend failed. With out, the logits go to [n][n_vocab] there in place of the
// context's own rows.
void compute_logits(llama_context * ctx, int first, int n, float * out = nullptr);

}  // namespace eagle3
