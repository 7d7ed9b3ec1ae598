// This is the seam for drafters. A source offers draft tokens; the planner chooses among those of all
// sources.
#pragma once

#include "draft/draft_tree.hpp"

#include <cstdint>
#include <vector>

namespace eagle3 {

// These tokens were decoded by the target and stay in a slot: a chunk of a prompt, or the accepted part of a
// round.
struct kept_tokens {
    int slot, pos;                // the position of the first one
    std::vector<int32_t> tokens;  // at least one
    std::vector<int32_t> rows;    // of the last target batch, one for each token
    bool prompt;                  // a chunk of a prompt, else of a round
};

// A source drafts for all slots of a session. The session calls it from one thread; slots and positions are
// valid. To write one, implement the functions below, and pass it to session::add_source.
class source {
  public:
    virtual ~source() = default;

    // Returns what statistics, metrics and the terminal call the source: a lower-case word that no other
    // source of the session has. It lives as long as the source.
    virtual const char * name() const = 0;

    // Says what offering costs: nothing, or a pass of the head for each level of the tree. The planner's
    // costs know one kind of pass, so only the head may be such a source. A source without cost offers what
    // it has in begin(), before the head does, and drafts for EAGLE3_PLANNED alone.
    virtual bool takes_passes() const { return false; }

    // Says whether there is anything to offer after a token that follows the slot's text.
    virtual bool ready(int slot) const = 0;

    // Does the work that gathered since the last draft, before the time of this one is measured. at_most
    // counts the rows of a pass that may be left for begin().
    virtual void catch_up(int /* slot */, int /* at_most */) {}

    // For each i of asks, calls g.offer() with tokens that may follow g.asks[i].token. A source with passes
    // offers one level; others may offer descendants, too.
    virtual void begin(draft_tree & g, const std::vector<int> & asks) = 0;

    // A source without passes may offer descendants of these nodes, which a source with passes offered.
    virtual void follow(draft_tree & /* g */, const std::vector<int> & /* nodes */) {}

    // A source with passes offers children of these nodes in one pass. Their parents were in the pass before,
    // but other sources may have offered them.
    virtual void extend(draft_tree & /* g */, const std::vector<int> & /* nodes */) {}
    // A source with passes returns the number of nodes of an ask that it can still extend.
    virtual int n_extensible(int /* ask */) const { return 0; }

    // These tokens stay. A rejected draft is never told.
    virtual void kept(const kept_tokens & k) = 0;
    // The positions from n_past on are gone.
    virtual void rewind(int slot, int n_past) = 0;
    // The slot now holds another text, of n_past tokens that the source was never told.
    virtual void reset(int slot, int n_past) = 0;

    // These are the source's part of a slot's saved state, `size` bytes. check returns how many of the bytes
    // at data are this source's; it throws E_FORMAT if they are damaged or another source's. restore takes
    // bytes that passed, for a slot that holds n_past tokens.
    virtual int64_t state_size(int slot) const                       = 0;
    virtual void save(int slot, int n_past, uint8_t * out) const     = 0;
    virtual int64_t check(const uint8_t * data, int64_t size) const  = 0;
    virtual void restore(int slot, int n_past, const uint8_t * data) = 0;

    // This is the number of its offers and of its statistics in the planner, see calibration.hpp, and of its
    // bit in eagle3_round_drafted. slots::add_source sets it.
    int id = 0;
};

}  // namespace eagle3
