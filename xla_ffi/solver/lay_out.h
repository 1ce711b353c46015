// Which keys each rank needs from others, in which stage they travel, and what each rank computes
// in each stage: magi_jax/solver/work/remote.py and stages.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_LAY_OUT_H_
#define MAGI_JAX_XLA_FFI_SOLVER_LAY_OUT_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/bands.h"
#include "xla_ffi/solver/join.h"

namespace magi_jax::solver {

// Segment g of the sequence is [edges[g], edges[g + 1]) and lies at its owner from row
// edges[g] + offset[g] on.
struct Layout {
  const int64_t* edges;   // [G + 1] from 0, rising
  const int64_t* owner;   // [G]
  const int64_t* offset;  // [G]
  int64_t num_segments;   // G
  int64_t num_ranks;      // R
};

// Slices cut at the query segments of a layout, sorted by rank.
struct QueryCut {
  std::vector<BandSlice> slices;  // [B] in global coordinates
  std::vector<int64_t> rank;      // [B] owner of the queries
  std::vector<int64_t> q_offset;  // [B] takes a global query to its local row
};

// The same, where it is kept.
struct QueryCutView {
  const BandSlice* slices;
  const int64_t* rank;
  const int64_t* q_offset;
  int64_t size;  // B
};

// Key rows [begin, end) of one segment that travel from src to dst. Sorted by (dst, begin).
struct RemoteRange {
  int64_t dst, src, begin, end, src_row, stage, dst_row;
};

// Received rows [begin, end), counted in global order, which land in the buffer of one stage from
// row `offset` on.
struct StageCell {
  int64_t begin, end, stage, offset;
};

// Stages of equal size of `rows` rows, from row `start` on and round to it again; rising.
std::vector<StageCell> StageCells(int64_t rows, int64_t start, int64_t num_stages);

QueryCut CutQueries(const BandSlice* slices, int64_t num_slices, const Layout& layout);

// Exactly the distinct keys that each rank sees and does not own, all in stage 0. Here and below
// the layout is that of the keys.
std::vector<RemoteRange> FindRemote(const QueryCut& cut, const Layout& layout);

// Cuts the rows of each rank into stages of nearly equal size. Turned ones start at another place
// on each rank, so that the senders of one stage are not the same for all. A buffer keeps global
// order.
std::vector<RemoteRange> SplitStages(const std::vector<RemoteRange>& remote, int64_t num_ranks,
                                     int64_t num_stages, bool turned);

// Keys that lie together in one buffer of a rank: those that it owns, or those of a remote stage.
struct KeySegment {
  int64_t begin, end, stage, k_offset;
};

// Own keys of rank r: segments[ptr[r]:ptr[r + 1]].
struct OwnKeys {
  std::vector<KeySegment> segments;
  std::vector<int64_t> ptr;  // [R + 1]
};

OwnKeys FindOwnKeys(const Layout& layout);

// What ranks see of their own keys, whatever stages the others come in.
struct HomeCut {
  std::vector<GroupedSlice> home;  // local coordinates, sorted by rank: stage 0
  QueryCut beyond;                 // slices that see keys of other ranks, too
};

HomeCut CutHome(const QueryCutView& cut, const OwnKeys& own);

// Slices of remote stages in local coordinates, those of stage i on rank r with group
// i * num_ranks + r, sorted by group: they read what stage i brings.
std::vector<GroupedSlice> CutStages(const HomeCut& cut, const std::vector<RemoteRange>& remote,
                                    int64_t num_ranks, int64_t num_remote_stages);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_LAY_OUT_H_
