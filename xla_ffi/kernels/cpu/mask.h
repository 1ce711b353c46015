// Which cells of a block are visible, seen from the axis that a tile owns.
//
// A tile owns rows of one axis, its *lanes*, and walks the other one. With w a position on the walk
// and l one of the tile, a slice covers a cell when both are in range and low <= w - l <= high,
// whichever of the two is the query.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_MASK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_MASK_H_

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/cpu/simd.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

enum class Lanes { kQueries, kKeys };

struct Interval {
  int32_t begin, end;
};

struct LaneSlice {
  Interval lanes, walk;
  int32_t low, high;
};

template <Lanes kLanesAre>
MAGI_JAX_INLINE LaneSlice ToLanes(const Slice& s) {
  if constexpr (kLanesAre == Lanes::kQueries) {
    return {{s.q_start, s.q_end}, {s.k_start, s.k_end}, s.d_min, s.d_max};
  } else {
    return {{s.k_start, s.k_end}, {s.q_start, s.q_end}, -s.d_max, -s.d_min};
  }
}

MAGI_JAX_INLINE Interval Intersect(Interval a, Interval b) {
  return {MaxInt(a.begin, b.begin), MinInt(a.end, b.end)};
}
MAGI_JAX_INLINE bool IsEmpty(Interval a) { return a.begin >= a.end; }

// The part of `walk` in which any of `lanes` sees something through `slice`.
MAGI_JAX_INLINE Interval Reach(const LaneSlice& slice, Interval lanes, Interval walk) {
  lanes = Intersect(lanes, slice.lanes);
  if (IsEmpty(lanes)) return {0, 0};
  const Interval band = {lanes.begin + slice.low, lanes.end + slice.high};
  return Intersect(Intersect(band, slice.walk), walk);
}

// The slices of a run that can cover cells of one block, and the tile they are seen from.
struct BlockMask {
  const Slice* slices;
  const int32_t* ids;
  int32_t num_ids;
  Interval walk;  // the block
};

// Narrows a run's ids to those that can meet the block. They are ordered by where they begin in
// this tile, so the search ends at the first that begins behind the block; `*first` moves past
// those that ended before it, for the blocks to come.
template <Lanes kLanesAre>
MAGI_JAX_INLINE BlockMask MaskOfBlock(const Slice* slices, const int32_t* ids, Interval tile,
                                      Interval id_range, Interval walk, int32_t* first) {
  const Interval everything = {INT32_MIN, INT32_MAX};
  while (*first < id_range.end) {
    const LaneSlice slice = ToLanes<kLanesAre>(slices[ids[*first]]);
    if (Reach(slice, tile, everything).end > walk.begin) break;
    ++*first;
  }
  int32_t last = *first;
  while (last < id_range.end) {
    const LaneSlice slice = ToLanes<kLanesAre>(slices[ids[last]]);
    if (Reach(slice, tile, everything).begin >= walk.end) break;
    ++last;
  }
  return {slices, ids + *first, last - *first, walk};
}

// The smallest part of the block outside which no lane of the panel sees anything.
template <Lanes kLanesAre>
static Interval PanelReach(const BlockMask& mask, Interval lanes) {
  Interval hull = {INT32_MAX, INT32_MIN};
  for (int32_t i = 0; i < mask.num_ids; ++i) {
    const LaneSlice slice = ToLanes<kLanesAre>(mask.slices[mask.ids[i]]);
    const Interval reach = Reach(slice, lanes, mask.walk);
    if (IsEmpty(reach)) continue;
    hull = {MinInt(hull.begin, reach.begin), MaxInt(hull.end, reach.end)};
  }
  return hull.begin < hull.end ? hull : Interval{mask.walk.begin, mask.walk.begin};
}

// Sets visible[w - part.begin, lane] to -1 for visible cells and 0 for all others, `part` by
// kPanel.
template <Lanes kLanesAre>
static void FillVisible(const BlockMask& mask, Interval lanes, Interval part, int32_t* visible) {
  memset(visible, 0, int64_t{part.end - part.begin} * kPanel * sizeof(int32_t));
  int32_t lower[kPanel], upper[kPanel];
  for (int32_t i = 0; i < mask.num_ids; ++i) {
    const LaneSlice slice = ToLanes<kLanesAre>(mask.slices[mask.ids[i]]);
    const Interval reach = Reach(slice, lanes, part);
    if (IsEmpty(reach)) continue;
    for (int32_t j = 0; j < kPanel; ++j) {
      const int32_t lane = lanes.begin + j;
      const bool inside = lane >= slice.lanes.begin && lane < slice.lanes.end;
      lower[j] = inside ? MaxInt(slice.walk.begin, lane + slice.low) : INT32_MAX;
      upper[j] = MinInt(slice.walk.end, lane + slice.high + 1);
    }
    for (int j = 0; j < 2; ++j) {
      const IntVec low = LoadInt(lower + j * kLanes), high = LoadInt(upper + j * kLanes);
      int32_t* row = visible + int64_t{reach.begin - part.begin} * kPanel + j * kLanes;
      for (int32_t w = reach.begin; w < reach.end; ++w, row += kPanel) {
        const IntVec walk = BroadcastInt(w);
        StoreInt(row, LoadInt(row) | ((walk >= low) & (walk < high)));
      }
    }
  }
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_MASK_H_
