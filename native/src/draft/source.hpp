// This is the seam for drafters. A source offers draft tokens; the planner chooses among those of all
// sources. A session has any number of sources without cost, and at most one that takes passes of a model.
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
    std::vector<int32_t> rows;    // in the last target batch, one for each token
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

    // Says whether there is anything to offer after a token that follows the slot's text.
    virtual bool ready(int slot) const = 0;

    // For each i of asks, calls g.offer() with tokens that may follow g.asks[i].token, and with descendants
    // of these. A source without cost does so before the one that takes passes, and for EAGLE3_PLANNED alone.
    virtual void begin(draft_tree & g, const std::vector<int> & asks) = 0;

    // May offer descendants of these nodes, which the source that takes passes offered.
    virtual void follow(draft_tree & /* g */, const std::vector<int> & /* nodes */) {}

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

// This is a source whose offers cost passes of a model: the head, or another context. The planner's costs are
// those of its passes.
class pass_source : public source {
  public:
    // Rows of the slot's next first pass: what waits there, and the token itself.
    virtual int n_pending(int slot) const = 0;
    // Does the work that gathered since the last draft, before the time of this one is measured. at_most
    // counts the rows of a pass that may be left for begin().
    virtual void catch_up(int slot, int at_most) = 0;
    // begin() runs the first pass, which offers one level. extend() offers children of these nodes in one
    // pass. Their parents were in the pass before, but other sources may have offered them.
    virtual void extend(draft_tree & g, const std::vector<int> & nodes) = 0;
    // Returns the number of nodes of an ask that it can still extend.
    virtual int n_extensible(int ask) const = 0;

    // These say what it needs of the target's decodes, each before the next one. While it is off, a decode
    // costs what it costs without the source, and a slot that decodes drafts nothing until it can again.
    virtual void set_on(bool on) = 0;
    virtual void expect(int /* n */) {}                      // the next decode has n rows
    virtual bool needs_all_logits() const { return false; }  // each of its rows must ask for logits

    // Returns the seconds that a pass of n rows takes behind n_past positions of the slot, or a further step
    // of a draft: see eagle3_measure_pass and eagle3_measure_step.
    virtual float measure(int slot, int n_past, int n) = 0;
    virtual float measure_step(int slot, int n_past, int n) { return measure(slot, n_past, n); }
    virtual void forget_graphs() {}  // those of passes that are larger than drafts'

    // Bytes of its weights, of what it keeps of texts, and of what its passes compute in.
    struct bytes {
        size_t weights = 0, cache = 0, compute = 0;
    };
    virtual bytes memory() const = 0;
};

}  // namespace eagle3
