// A thread block's walk over the runs of its tile, and the visible columns of each row in a block.
//
// "Rows" are the axis that the thread block owns (queries for forward and dQ, keys for dK and dV),
// "columns" the axis that it walks. Tables are only ever read inside their capacities, whatever
// they hold.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_WALK_CUH_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_WALK_CUH_

#include <type_traits>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm80/product.cuh"

namespace magi_jax::sm80 {

// Rows of one thread block: part of a tile of the table when a tile is larger than the kernel's
// own.
struct RowRange {
  int tile;                  // -1: nothing to do
  int tile_begin, tile_end;  // rows of the table's tile
  int begin, end;            // rows of this thread block
};

// Thread blocks of one head, for tiles of `tile_size` rows cut to kBlockRows.
template <int kBlockRows>
__host__ __device__ inline int BlocksPerTile(int tile_size) {
  return (tile_size - 1) / kBlockRows + 1;  // tile_size is positive and may be huge
}

template <int kBlockRows>
__device__ __forceinline__ RowRange RowsOf(const TileRuns& table, int tile_size, int length,
                                           int unit) {
  const int parts = BlocksPerTile<kBlockRows>(tile_size);
  const int tile = table.order[unit / parts];
  RowRange rows{-1, 0, 0, 0, 0};
  if (tile < 0 || tile >= table.num_tiles) return rows;
  rows.tile_begin = tile * tile_size;
  rows.tile_end = min(rows.tile_begin + tile_size, length);
  rows.begin = rows.tile_begin + unit % parts * kBlockRows;
  rows.end = min(rows.begin + kBlockRows, rows.tile_end);
  if (rows.begin < rows.end) rows.tile = tile;
  return rows;
}

// The blocks of kColumns columns that a tile walks, one after the other.
template <int kColumns>
struct Walk {
  int run, end_run;
  Run now;    // the current run, inside the tables and the columns' length
  int begin;  // first column of the current block

  __device__ __forceinline__ Walk(const TileRuns& table, int tile, int length) {
    run = min(max(table.ptr[tile], 0), table.num_runs);
    end_run = min(max(table.ptr[tile + 1], 0), table.num_runs);
    Enter(table, length);
  }

  __device__ __forceinline__ bool Done() const { return run >= end_run; }

  // Whether the current block needs its slices evaluated.
  __device__ __forceinline__ bool Masked() const {
    return begin < now.full_begin || begin + kColumns > now.full_end;
  }

  __device__ __forceinline__ void Next(const TileRuns& table, int length) {
    begin += kColumns;
    if (begin < now.end) return;
    ++run;
    Enter(table, length);
  }

 private:
  __device__ __forceinline__ void Enter(const TileRuns& table, int length) {
    for (; run < end_run; ++run) {
      now = table.runs[run];
      now.end = min(now.end, length);
      now.ids_begin = max(now.ids_begin, 0);
      now.ids_end = min(now.ids_end, table.num_ids);
      begin = max(now.begin, 0);
      if (begin < now.end) return;
    }
  }
};

// One bit per column of a block.
template <int kColumns>
using ColumnBits = std::conditional_t<(kColumns > 32), uint64_t, uint32_t>;

// Bits [low, high) of a block, for any low and high.
template <int kColumns>
__device__ __forceinline__ ColumnBits<kColumns> Interval(int low, int high) {
  using Bits = ColumnBits<kColumns>;
  low = max(low, 0);
  high = min(high, kColumns);
  if (low >= high) return 0;
  return (~Bits{0} >> (static_cast<int>(sizeof(Bits)) * 8 - (high - low))) << low;
}

// A slice with rows in the place of queries; false when the id is no row of `slices`.
template <bool kRowsAreKeys>
__device__ __forceinline__ bool ReadSlice(const Slice* slices, int num_slices, int id, Slice* out) {
  if (id < 0 || id >= num_slices) return false;
  const Slice s = slices[id];
  *out = kRowsAreKeys ? Slice{s.k_start, s.k_end, s.q_start, s.q_end, -s.d_max, -s.d_min} : s;
  return true;
}

// Visible columns of the thread's rows (`first_row` plus RowOf) in the walk's current block. Slices
// of a run are ordered by their first column in the tile, so those behind the block are dropped
// from the walk.
template <bool kRowsAreKeys, int kColumns, int kRows>
__device__ __forceinline__ void VisibleColumns(ColumnBits<kColumns> (&visible)[kRows],
                                               Walk<kColumns>& walk, const TileRuns& table,
                                               const Slice* slices, int num_slices,
                                               const RowRange& rows, int first_row) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) visible[r] = 0;
  bool leading = true;
  for (int i = walk.now.ids_begin; i < walk.now.ids_end; ++i) {
    Slice s;
    if (!ReadSlice<kRowsAreKeys>(slices, num_slices, table.ids[i], &s)) continue;
    const int first = max(s.k_start, max(s.q_start, rows.tile_begin) + s.d_min);
    const int last = min(s.k_end, min(s.q_end, rows.tile_end) + s.d_max);
    if (first >= walk.begin + kColumns) break;
    if (last <= walk.begin) {
      if (leading) walk.now.ids_begin = i + 1;
      continue;
    }
    leading = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first_row + RowOf(r);
      const auto bits = Interval<kColumns>(max(s.k_start, row + s.d_min) - walk.begin,
                                           min(s.k_end, row + s.d_max + 1) - walk.begin);
      if (row >= s.q_start && row < s.q_end) visible[r] |= bits;
    }
  }
}

// Whether the thread's element (r, n, c % 2) is set in `shifted`, the row's bits moved by
// ColumnShift().
__device__ __forceinline__ int ColumnShift() { return Lane() % 4 * 2; }

template <typename Bits>
__device__ __forceinline__ bool IsVisible(Bits shifted, int n, int c) {
  return (shifted >> (n * 8 + c % 2)) & 1;
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_WALK_CUH_
