// The candidates: a tree under construction for each slot of a round.
#pragma once

#include "eagle3.h"
#include "planner/planner.hpp"

#include <algorithm>
#include <array>
#include <vector>

namespace eagle3 {

using ask        = eagle3_ask;
using trust_list = std::array<float, N_RECORDS>;  // a slot's trust in each source

// This is the evidence on which each source offered a node: its own estimate, in 0..1, of the probability
// that the token follows its parent, or NOT_OFFERED. The planner learns what the estimates of each source are
// worth.
using evidence_list         = std::array<float, N_RECORDS>;
constexpr float NOT_OFFERED = -1.0f;

// Returns how many parents are above each of n nodes. A parent comes before its children; -1 stands for none.
std::vector<int> depths(const int32_t * parents, size_t n);

struct draft_tree {
    struct node {
        int32_t token;
        int ask;
        int parent;   // node, -1 for the root
        int depth;    // rows below the root's
        float prob;   // calibrated, given its parent: of the source that is most confident
        float reach;  // that verification gets to it by the whole path, and accepts it
        int choice;   // which of EAGLE3_CHOICES it is; else -1
        evidence_list evidence;
        unsigned below = 0;  // sources that offered children of it, a bit each
    };

    const planner * plan = nullptr;
    std::vector<ask> asks;                        // those that grow; n_max is what there is room for
    std::vector<int> n_past;                      // one for each ask's slot
    std::vector<const trust_list *> trust;        // one for each ask's slot
    std::vector<node> nodes;                      // a parent comes before its children
    std::vector<int> level;                       // nodes that the last pass offered
    int n_asks                        = 0;        // in the round, those without a draft too
    int n_given                       = 0;        // draft tokens that callers brought
    int most_rows                     = 0;        // in the round: those that wait need the others
    bool mixed                        = false;    // other sources than the head offered
    const std::vector<int32_t> * ends = nullptr;  // tokens that end a generation; null: none is known

    // A source offers a token that may follow node `parent` (-1: the ask's own token). rank counts the
    // siblings that it offers from 0, the most probable first. Returns the node. If another source offered
    // the token there before, that node gets the evidence of both.
    int offer(int source, int ask, int parent, int32_t token, float evidence, int rank);

    // Returns the children of a node (-1: the ask's own token) that the source of passes did not offer: it
    // can extend them too.
    std::vector<int> children_of_others(int ask, int parent) const;

    // Returns the nodes for which want(node) holds, the likeliest first.
    template <typename F> std::vector<int> by_reach(F && want) const {
        std::vector<int> order;
        for (int i = 0; i < (int) nodes.size(); ++i) {
            if (want(nodes[i])) {
                order.push_back(i);
            }
        }
        sort(order);
        return order;
    }
    // Returns the same of the last pass.
    template <typename F> std::vector<int> level_by_reach(F && want) const {
        std::vector<int> order;
        std::copy_if(
            level.begin(), level.end(), std::back_inserter(order), [&](int i) { return want(nodes[i]); });
        sort(order);
        return order;
    }

    // Says whether tokens after a node of a planned ask may be of use: none are after the most that the ask
    // wants, nor after the end of the text.
    bool goes_on(const node & v) const {
        const ask & a = asks[v.ask];
        return v.depth < (a.depth > 0 ? a.depth : a.n_max) &&
               !(ends && std::find(ends->begin(), ends->end(), v.token) != ends->end());
    }
    bool is_planned(const node & v) const { return asks[v.ask].kind == EAGLE3_PLANNED; }
    // Says whether it reaches its ask's p_min: in a chain its own probability does, in a tree that of the
    // whole path.
    bool is_likely(const node & v) const {
        return (asks[v.ask].kind == EAGLE3_CHAIN ? v.evidence[0] : v.reach) >= asks[v.ask].p_min;
    }
    int widest() const;

    // Returns the nodes of the planned asks, the likeliest first. Of siblings from several sources, it keeps
    // as many as the ask's width allows: those whose best path is expected to bring most tokens.
    std::vector<int> planned() const;

  private:
    void sort(std::vector<int> & order) const;
    void update_reach(int from);
    float accept(const node & v, int source) const;
    void settle(int ask, int parent);

    std::vector<unsigned> below_;  // one for each ask's own token, as node::below
};

}  // namespace eagle3
