// Rows that links move in each stage, and stages of transfers that cross between nodes once for
// each row: magi_jax/solver/work/two_level.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_NODE_STAGES_H_
#define MAGI_JAX_XLA_FFI_SOLVER_NODE_STAGES_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/lay_out.h"

namespace magi_jax::solver {

// Rows that each rank receives and sends in each stage, inside its node and across nodes: [S, R].
struct LinkRows {
  LinkRows(int64_t num_stages, int64_t num_ranks)
      : near_in(num_stages * num_ranks, 0),
        near_out(near_in.size(), 0),
        far_in(near_in.size(), 0),
        far_out(near_in.size(), 0) {}

  std::vector<int64_t> near_in, near_out, far_in, far_out;
};

// Of rows that go to their receivers in one step.
LinkRows CountLinkRows(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                       int64_t num_stages, int64_t ranks_per_node);

// Rows that nodes receive, whatever stages they are cut into.
struct NodeRows {
  // Rows of a range that no range before it has: its node's `place`-th to (place + count)-th
  // distinct ones.
  struct Fresh {
    int64_t src, place, count;
  };
  int64_t num_ranks, ranks_per_node;
  std::vector<RemoteRange> ranges;  // sorted by (dst, begin)
  std::vector<int64_t> place;       // of the first row of each range among those of its node
  std::vector<Fresh> fresh;         // node by node
  std::vector<int64_t> range_ptr;   // [D + 1] ranges of each node
  std::vector<int64_t> fresh_ptr;   // [D + 1]
  std::vector<int64_t> rows;        // [D] distinct rows of each node
};

NodeRows FindNodeRows(std::vector<RemoteRange> remote, int64_t num_ranks, int64_t ranks_per_node);

// Cuts the distinct rows of each node into as many stages as there are `names` for, and counts what
// both steps of their way move: first to the rank with the owner's place in the receivers' node,
// then on inside the node.
std::vector<RemoteRange> SplitNodeStages(const NodeRows& rows, const std::vector<int64_t>& names,
                                         bool turned, LinkRows* moved);

// The same with rows of the receivers' own nodes in the stages that are `near`, and all others in
// the other stages. Throws std::invalid_argument if there are rows of a kind without stages.
std::vector<RemoteRange> SplitByNode(const NodeRows& own_nodes, const NodeRows& other_nodes,
                                     const std::vector<bool>& near, LinkRows* moved);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_NODE_STAGES_H_
