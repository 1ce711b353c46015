// A call, as all its kernels run it: map the rows, meet the peers, move, leave.

#ifndef MAGI_JAX_XLA_FFI_COMM_CALL_CUH_
#define MAGI_JAX_XLA_FFI_COMM_CALL_CUH_

#include "xla_ffi/comm/meeting.cuh"
#include "xla_ffi/comm/sources.cuh"

namespace magi_jax::comm {

constexpr int kWarpSize = 32;

__device__ inline uint64_t ArrivedAt(const Meeting& meeting, int barrier, int num_blocks) {
  return meeting.arrived_before + static_cast<uint64_t>(barrier) * num_blocks;
}

__device__ inline void Arrive(const Meeting& meeting) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(reinterpret_cast<unsigned long long*>(meeting.arrived), 1ull);
}

// Waits until all blocks have arrived at a barrier, 1 to kBarriers.
__device__ inline void AwaitBlocks(const Meeting& meeting, int barrier) {
  if (threadIdx.x == 0) {
    while (LoadAcquire(meeting.arrived) < ArrivedAt(meeting, barrier, gridDim.x)) {
    }
  }
  __syncthreads();
}

// All threads of the grid set `words` to `value`.
template <class T>
__device__ void Set(T* words, int64_t count, T value) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    words[i] = value;
  }
}

// Calls `enter(piece, offset)` for every row of every piece, a warp of the grid per piece.
template <class EnterRow>
__device__ void ForEachRow(const PieceTable& table, const Extents& extents, EnterRow enter) {
  const int lane = threadIdx.x % kWarpSize;
  const int warps = gridDim.x * blockDim.x / kWarpSize;
  for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize; i < table.num_pieces;
       i += warps) {
    const Piece piece = table.pieces[i];
    const Span span = InsideSpan(piece, extents);
    for (int32_t offset = span.begin + lane; offset < span.end; offset += kWarpSize) {
      enter(piece, offset);
    }
  }
}

struct CastMap {
  static constexpr bool kHasGaps = true;
  __device__ static void Clear(const Meeting&, const RowMap& map) {
    Set(map.row_of, map.rows, kNobody);
  }
  __device__ static void Fill(const Meeting& meeting, const Move& move) {
    const RowMap& map = move.map;
    ForEachRow(meeting.recv, meeting.extents, [&](const Piece& piece, int32_t offset) {
      EnterCast(piece, offset, map);
      const bool stays = move.own_rows > 0 && piece.peer == meeting.rank;
      if (stays) map.row_of[piece.dst_row + offset] = kElsewhere;
    });
  }
  __device__ static bool IsGap(const Meeting&, const RowMap& map, int64_t row) {
    return map.row_of[row] == kNobody;
  }
  __device__ static const PieceTable& Table(const Meeting& meeting) { return meeting.recv; }
};

struct ReduceMap {
  __device__ static void Clear(const Meeting& meeting, const RowMap& map) {
    Set(map.seen, int64_t{SeenWords(meeting.extents.cp_size)} * map.rows, 0u);
  }
  __device__ static void Fill(const Meeting& meeting, const Move& move) {
    const RowMap& map = move.map;
    ForEachRow(meeting.send, meeting.extents, [&](const Piece& piece, int32_t offset) {
      const uint32_t bit = EnterReduce(piece, offset, map);
      atomicOr(&map.seen[SeenIndex(piece, offset, map)], bit);
    });
  }
  __device__ static bool IsGap(const Meeting& meeting, const RowMap& map, int64_t row) {
    uint32_t seen = 0;
    for (int word = 0; word < SeenWords(meeting.extents.cp_size); ++word)
      seen |= map.seen[int64_t{word} * map.rows + row];
    return seen == 0;
  }
  __device__ static const PieceTable& Table(const Meeting& meeting) { return meeting.send; }
};

struct SumMap : ReduceMap {
  static constexpr bool kHasGaps = true;
};

// Rows without parts have an lse of their own, and are written with the others.
struct LseMap : ReduceMap {
  static constexpr bool kHasGaps = false;
};

// Writes zeros to a row of all results, all lanes of a warp together.
__device__ inline void ClearRow(const Move& move, int64_t row) {
  const int lane = threadIdx.x % kWarpSize;
  for (int i = 0; i < move.num_leaves; ++i) {
    const auto bytes = static_cast<uint32_t>(move.leaves[i].result_bytes / move.map.rows);
    char* const to = static_cast<char*>(move.leaves[i].result) + row * bytes;
    if (bytes % 16 == 0) {
      auto* const vectors = reinterpret_cast<uint4*>(to);
      for (uint32_t k = lane; k < bytes / 16; k += kWarpSize) vectors[k] = uint4{};
    } else {
      for (uint32_t k = lane; k < bytes; k += kWarpSize) to[k] = 0;
    }
  }
}

// Once all rows are entered those that nobody sends become zero, while block 0 meets the peers: a
// rank that comes early has done it when they come, and keeps none of them waiting.
template <class Map>
__device__ void FillGaps(const Meeting& meeting, const Move& move) {
  constexpr int kBatch = 4;  // looked up together, by each lane
  const int first_block = gridDim.x > 1 ? 1 : 0;
  if (static_cast<int>(blockIdx.x) < first_block) return;
  const int block_warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp = (blockIdx.x - first_block) * block_warps + threadIdx.x / kWarpSize;
  const int64_t step = int64_t{kBatch * kWarpSize} * block_warps * (gridDim.x - first_block);
  const int64_t rows = move.map.rows;
  for (int64_t base = int64_t{kBatch * kWarpSize} * warp; base < rows; base += step) {
    bool is_gap[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t row = base + u * kWarpSize + lane;
      is_gap[u] = row < rows && Map::IsGap(meeting, move.map, row);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      for (unsigned left = __ballot_sync(~0u, is_gap[u]); left != 0; left &= left - 1) {
        ClearRow(move, base + u * kWarpSize + __ffs(static_cast<int>(left)) - 1);
      }
    }
  }
}

// Whether this rank has rows to bring in besides those that another kernel copies. All threads of a
// block together, with the same result in all blocks.
template <class Map>
__device__ bool HasRows(const Meeting& meeting, const Move& move) {
  const PieceTable& table = Map::Table(meeting);
  bool any = false;
  for (int i = threadIdx.x; i < table.num_pieces; i += blockDim.x) {
    const Piece piece = table.pieces[i];
    const Span span = InsideSpan(piece, meeting.extents);
    any |= span.begin < span.end && !(move.own_rows > 0 && piece.peer == meeting.rank);
  }
  return __syncthreads_or(static_cast<int>(any)) != 0;
}

// The first piece of a rank that comes after this one: rows are moved from there on, and then from
// the first. Pieces are in the order of ranks or nearly so, and if all ranks began with the first
// they would all turn to one of them at a time. All threads of a block together.
__device__ inline int FirstPiece(const Meeting& meeting, const PieceTable& table) {
  if (meeting.extents.cp_size <= 2) return 0;
  __shared__ unsigned first;
  if (threadIdx.x == 0) first = ~0u;
  __syncthreads();
  unsigned mine = ~0u;
  for (int i = threadIdx.x; i < table.num_pieces && mine == ~0u; i += blockDim.x) {
    const Piece piece = table.pieces[i];
    const Span span = InsideSpan(piece, meeting.extents);
    if (span.begin < span.end && piece.peer > meeting.rank) mine = i;
  }
  mine = __reduce_min_sync(~0u, mine);
  if (threadIdx.x % kWarpSize == 0) atomicMin(&first, mine);
  __syncthreads();
  return first == ~0u ? 0 : static_cast<int>(first);
}

// What blocks need at different times.
union CallShared {
  __device__ CallShared() {}
  Digests digests;
  Sources sources[2];
};

// `move_rows(shared)` computes the results from the operands of all ranks.
template <class Map, class MoveRows>
__device__ void RunCall(const Meeting& meeting, const Move& move, CallShared& shared,
                        MoveRows move_rows) {
  Map::Clear(meeting, move.map);
  Arrive(meeting);
  AwaitBlocks(meeting, 1);
  Map::Fill(meeting, move);
  Arrive(meeting);
  if (blockIdx.x == 0) Enter(meeting, shared.digests);
  if constexpr (Map::kHasGaps) {
    AwaitBlocks(meeting, 2);
    if (!move.adds) FillGaps<Map>(meeting, move);
    // Who waits for a peer does not keep SMs that attention beside it can have.
    if (blockIdx.x != 0 && !HasRows<Map>(meeting, move)) {
      Arrive(meeting);
      Arrive(meeting);
      return;
    }
  }
  Arrive(meeting);
  AwaitBlocks(meeting, 3);
  if (!IsBroken(meeting)) move_rows();
  Arrive(meeting);
  if (blockIdx.x != 0) return;
  AwaitBlocks(meeting, 4);
  Leave(meeting, move);
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_CALL_CUH_
