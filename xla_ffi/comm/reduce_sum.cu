// Adds up rows at their owner, which reads the parts where its peers have them. Every element is
// added up by one thread, in the order of `PartWalk`: equal parts give equal bits.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "xla_ffi/comm/call.cuh"
#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/parts.cuh"
#include "xla_ffi/comm/stream.cuh"

namespace magi_jax::comm {
namespace {

constexpr int kThreads = kStreamWarps * 32;
constexpr int kUnroll = 4;
constexpr int kVectorBytes = 16;

__device__ float Add(float a, float b) { return a + b; }
__device__ int32_t Add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
__device__ bool Add(bool a, bool b) { return a || b; }

// Elements that are moved together.
template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Pack {
  T values[kElements];
};

template <class T, class Sum, int kElements>
__device__ void SumLeaf(const Meeting& meeting, const Move& move, const Leaf& leaf,
                        const Sources& sources) {
  const RowMap& map = move.map;
  using Part = Pack<T, kElements>;
  const uint32_t per_row = leaf.row_elements / kElements;
  const int32_t words = SeenWords(meeting.extents.cp_size);
  auto* result = static_cast<Sum*>(leaf.result);
  ForEachChunk<kUnroll>(per_row * map.rows, [&](const auto& index, const auto& valid) {
    Sum sums[kUnroll][kElements] = {};
    uint32_t column[kUnroll];
    PartWalk walk[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t row = index[u] / per_row;
      column[u] = index[u] - row * per_row;
      walk[u].Start(map, meeting.rank, static_cast<int32_t>(row));
    }
    for (bool more = true; more;) {
      Part part[kUnroll];
      bool have[kUnroll];
      more = false;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t peer = walk[u].Next(map, meeting.rank, words);
        have[u] = peer >= 0;
        if (!have[u]) continue;
        more = true;
        const int32_t row = walk[u].RowAt(map, peer);
        part[u] = sources.Row<Part>(peer, row, leaf.row_bytes)[column[u]];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!have[u]) continue;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          sums[u][e] = Add(sums[u][e], ToSum(part[u].values[e]));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!valid[u]) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        Sum* const to = result + int64_t{index[u]} * kElements + e;
        *to = move.adds ? Add(*to, sums[u][e]) : sums[u][e];
      }
    }
  });
}

// The parts of a row, with the place of the next one at hand.
struct SumCursor {
  const RowMap& map;
  int32_t rank, words;
  PartWalk walk;
  int32_t peer, part_row;

  __device__ SumCursor(const RowMap& map, const Meeting& meeting, uint32_t row, bool valid)
      : map(map), rank(meeting.rank), words(SeenWords(meeting.extents.cp_size)), peer(-1) {
    if (!valid) return;
    walk.Start(map, rank, static_cast<int32_t>(row));
    Advance();
  }

  __device__ void Advance() {
    peer = walk.Next(map, rank, words);
    if (peer >= 0) part_row = walk.RowAt(map, peer);
  }
};

template <class T, class Sum, int kElements>
__device__ void StreamLeaf(const Meeting& meeting, const Move& move, const Leaf& leaf,
                           const Sources& sources, Ring& ring) {
  const RowMap& map = move.map;
  using Part = Pack<T, kElements>;
  using Total = Pack<Sum, 16 / sizeof(Sum)>;
  constexpr int kTotals = kElements * sizeof(Sum) / 16;
  auto* result = static_cast<Sum*>(leaf.result);
  const uint32_t lane = threadIdx.x % 32;
  Sum sums[kLaneVectors][kElements];
  const auto store = [&](uint32_t row, uint32_t begin, uint32_t bytes) {
#pragma unroll
    for (int k = 0; k < kLaneVectors; ++k) {
      const uint32_t i = k * 32 + lane;
      const int64_t first = int64_t{row} * leaf.row_elements + begin / sizeof(T) + i * kElements;
#pragma unroll
      for (int t = 0; t < kTotals; ++t) {
        Total total;
#pragma unroll
        for (int e = 0; e < 16 / static_cast<int>(sizeof(Sum)); ++e) {
          total.values[e] = sums[k][t * (16 / sizeof(Sum)) + e];
        }
        if (i * 16 >= bytes) continue;
        Total* const to = reinterpret_cast<Total*>(result + first) + t;
        if (move.adds) {
          const Total before = *to;
#pragma unroll
          for (int e = 0; e < 16 / static_cast<int>(sizeof(Sum)); ++e) {
            total.values[e] = Add(before.values[e], total.values[e]);
          }
        }
        *to = total;
      }
    }
  };
  StreamRows(
      ring, map.rows, leaf.row_bytes,
      [&](uint32_t row, bool valid) { return SumCursor(map, meeting, row, valid); },
      [&](int32_t peer, int32_t row) { return sources.Row<char>(peer, row, leaf.row_bytes); },
      [&](const SlotNote& note, uint32_t bytes) {
        if (!move.adds || lane != 0) return;
        const int64_t first = int64_t{note.row} * leaf.row_elements + note.begin / sizeof(T);
        BulkPrefetch(result + first, bytes / sizeof(T) * sizeof(Sum));
      },
      [&](const char* memory, const SlotNote& note, uint32_t bytes) {
        const auto* parts = reinterpret_cast<const Part*>(memory);
#pragma unroll
        for (int k = 0; k < kLaneVectors; ++k) {
          if (note.first) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) sums[k][e] = Sum{};
          }
          const uint32_t i = k * 32 + lane;
          if (i * 16 >= bytes) continue;
          const Part part = parts[i];
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            sums[k][e] = Add(sums[k][e], ToSum(part.values[e]));
          }
        }
        if (note.last) store(note.row, note.begin, bytes);
      });
}

template <class T, class Sum>
__device__ void SumLeaves(const Meeting& meeting, const Move& move, Sources& sources, Ring& ring) {
  constexpr int kElements = sizeof(T) == 1 ? 1 : kVectorBytes / sizeof(T);
  for (int i = 0; i < move.num_leaves; ++i) {
    const Leaf& leaf = move.leaves[i];
    sources.Fill(meeting, leaf.operand, i);
    if (sizeof(T) > 1 && IsStreamed(move, leaf)) {
      if constexpr (sizeof(T) > 1) {
        StreamLeaf<T, Sum, kElements>(meeting, move, leaf, sources, ring);
      }
    } else if (leaf.row_elements % kElements == 0) {
      SumLeaf<T, Sum, kElements>(meeting, move, leaf, sources);
    } else {
      SumLeaf<T, Sum, 1>(meeting, move, leaf, sources);
    }
  }
}

extern __shared__ __align__(128) char ring_memory[];

// One kind of element each: with all of them in one kernel, registers would spill.
template <class T, class Sum>
__global__ void __launch_bounds__(kThreads)
    ReduceSumKernel(const __grid_constant__ Meeting meeting, const __grid_constant__ Move move) {
  __shared__ CallShared shared;
  Ring ring(ring_memory);
  if (move.stream) ring.Initialize();
  RunCall<SumMap>(meeting, move, shared,
                  [&] { SumLeaves<T, Sum>(meeting, move, shared.sources[0], ring); });
}

CallKernel SumKernelOf(Element element) {
  switch (element) {
    case Element::kF32:
      return ReduceSumKernel<float, float>;
    case Element::kF16:
      return ReduceSumKernel<__half, float>;
    case Element::kBF16:
      return ReduceSumKernel<__nv_bfloat16, float>;
    case Element::kS32:
      return ReduceSumKernel<int32_t, int32_t>;
    case Element::kPred:
      return ReduceSumKernel<bool, bool>;
  }
  return nullptr;
}

constexpr Element kElementKinds[] = {Element::kF32, Element::kF16, Element::kBF16, Element::kS32,
                                     Element::kPred};

}  // namespace

cudaError_t ReduceSum(const Meeting& meeting, const Move& move, cudaStream_t stream) {
  const LaunchShape shape = {move.num_blocks, kThreads, move.stream ? kStreamBytes : 0};
  return LaunchCall(SumKernelOf(move.leaves[0].element), shape, meeting, move, stream);
}

cudaError_t LoadReduceSumKernels(bool stream) {
  for (const Element element : kElementKinds) {
    if (cudaError_t error = LoadKernel(SumKernelOf(element), stream)) return error;
  }
  return cudaSuccess;
}

}  // namespace magi_jax::comm
