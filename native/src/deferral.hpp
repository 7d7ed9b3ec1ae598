// Decodes that leave the output matrix out: see llama_set_logits_deferred.
#pragma once

#include "llama-ext.h"

namespace eagle3 {

// On while it lives, however its scope is left: a context that it stayed on in would give others rows without
// logits.
class deferral {
  public:
    deferral(llama_context * ctx, bool on) : ctx_(ctx) { llama_set_logits_deferred(ctx_, on); }
    ~deferral() { llama_set_logits_deferred(ctx_, false); }

    deferral(const deferral &)             = delete;
    deferral & operator=(const deferral &) = delete;

  private:
    llama_context * ctx_;
};

}  // namespace eagle3
