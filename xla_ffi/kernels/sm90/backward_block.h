// What a consumer warpgroup does with its 64 keys and a block of queries, in whatever order:
// products, statistics, masks, and handing on dQ.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_BLOCK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_BLOCK_H_

#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_poison.h"
#include "xla_ffi/kernels/sm90/backward_producer.h"
#include "xla_ffi/kernels/sm90/backward_store.h"
#include "xla_ffi/kernels/sm90/mask.h"
#include "xla_ffi/kernels/sm90/softmax.h"
#include "xla_ffi/kernels/sm90/wgmma.h"

namespace magi_jax::sm90 {

// Named barriers of the two consumers; 0 is __syncthreads.
constexpr int kGradientBarrier = 1;  // dS is in shared memory
constexpr int kVoteBarrier = 2;
constexpr int kTurnBarrier = 3;  // and 4: of one warpgroup

constexpr int kSpoiledKeys = 1, kSpoiledValues = 2;

template <typename TraitsT>
struct BlockConsumer {
  using Traits = TraitsT;
  using Element = typename Traits::Element;
  static constexpr int kM = Traits::kBlockM;
  static constexpr int kLogits = kM / 2;  // accumulators of a thread
  static constexpr int kQChunkBytes = kM * Traits::kRowBytes;
  static constexpr int kKChunkBytes = Traits::kBlockN * Traits::kRowBytes;

  const BackwardKernelParams& params;
  BackwardStorage<Traits>& shared;
  const int thread;      // of the thread block
  const int warpgroup;   // 0 or 1
  const int thread_row;  // this thread's first key in the tile
  const float scale_log2;

  StageRing<Traits::kStages> ring;           // of the block whose logits were started last
  StageRing<Traits::kDoutStages> dout_ring;  // of the block whose dP is made
  uint32_t kv_parity = 0;
  uint32_t vote_parity = 0;  // of a pair
  int flags;                 // of the block whose logits were started last
  int spoiled;               // of kSpoiledKeys, kSpoiledValues: some of the tile are not finite

  __device__ __forceinline__ BlockConsumer(const BackwardKernelParams& params,
                                           BackwardStorage<Traits>& shared)
      : params(params),
        shared(shared),
        thread(ThreadIndex()),
        warpgroup(__shfl_sync(0xFFFFFFFF, thread / 128 - 1, 0)),
        thread_row(Traits::kBlockN / Traits::kConsumers * (Traits::kPaired ? 0 : warpgroup) +
                   thread % 128 / 32 * 16 + thread % 32 / 4),
        scale_log2(params.scale * kLog2e) {}

  // --- probabilities and their gradients ---

  // Half of a thread's logits, as statistics of both halves would take too many registers.
  template <int kHalf>
  __device__ __forceinline__ void ToProbabilities(float (&s)[kLogits],
                                                  const float2 (&lse)[kLogits / 8],
                                                  const RowMask<kLogits / 2> (&rows)[2]) {
    if constexpr (kHalf == 0) {
      if (__builtin_expect(spoiled & kSpoiledKeys, false)) SpoilRows(s);
      if constexpr (Traits::kSoftCap) TransformLogits(s, params.transform_scale, params.cap_log2);
    }
#pragma unroll
    for (int i = kHalf * kLogits / 2; i < (kHalf + 1) * kLogits / 2; i += 4) {
      const float2 reference = lse[i / 4 - kHalf * kLogits / 8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float minus = j % 2 ? -reference.y : -reference.x;
        s[i + j] = Exp2(Traits::kSoftCap ? s[i + j] + minus : fmaf(s[i + j], scale_log2, minus));
      }
    }
    if (kHalf == 1 && flags & kMaskedBlock) Hide(s, rows);
  }

  // Half of dp = p (dp - delta), times scale where kScaledDifference.
  template <int kHalf>
  __device__ __forceinline__ void TimesDifference(const float (&p)[kLogits],
                                                  const float2 (&delta)[kLogits / 8],
                                                  float (&dp)[kLogits]) const {
#pragma unroll
    for (int i = kHalf * kLogits / 2; i < (kHalf + 1) * kLogits / 2; i += 4) {
      const float2 mean = delta[i / 4 - kHalf * kLogits / 8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float minus = j % 2 ? -mean.y : -mean.x;
        dp[i + j] = p[i + j] * (Traits::kScaledDifference ? fmaf(dp[i + j], params.scale, minus)
                                                          : dp[i + j] + minus);
      }
    }
  }

  // dS of capped logits c tanh(x / c) is that times 1 - tanh^2, with the tanh that the probability
  // tells, so that no register keeps it.
  __device__ __forceinline__ float CapFactor(float p, float lse) const {
    const float logit = Log2(p) + lse;
    // Clamped: a probability of 0 has no logarithm, and its dS is 0 whatever the factor.
    const float tanh = fminf(fmaxf(logit * (1.0f / params.cap_log2), -1.0f), 1.0f);
    return fmaf(-tanh, tanh, 1.0f);
  }

  __device__ __forceinline__ void ScaleByCap(const float (&p)[kLogits], float (&ds)[kLogits]) {
    const float2* lse = reinterpret_cast<const float2*>(shared.lse[ring.slot]) + thread % 4;
#pragma unroll
    for (int i = 0; i < kLogits; i += 4) {
      const float2 reference = lse[i];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ds[i + j] *= CapFactor(p[i + j], j % 2 ? reference.y : reference.x);
    }
  }

  // dP to dS in its place; `delta` comes with its first half.
  __device__ __forceinline__ void ToLogitGradients(const float (&p)[kLogits],
                                                   float2 (&delta)[kLogits / 8],
                                                   const RowMask<kLogits / 2> (&rows)[2],
                                                   float (&dp)[kLogits]) {
    TimesDifference<0>(p, delta, dp);
    LoadStats<1>(delta, shared.delta[dout_ring.slot]);
    TimesDifference<1>(p, delta, dp);
    if constexpr (Traits::kSoftCap) ScaleByCap(p, dp);
    // Else dS of a hidden cell is 0 because its probability is.
    if (__builtin_expect(
            flags & kSuspectBlock || (flags & kMaskedBlock && spoiled & kSpoiledValues), false))
      Hide(dp, rows);
  }

  // --- products; each function commits its own group ---

  // 64 rows of `left` [keys, kDepth] times `right` [kBlockM, kDepth], transposed.
  template <int kDepth>
  __device__ __forceinline__ void IssueTransposed(float (&result)[kLogits], uint32_t left,
                                                  uint32_t right) {
    const Operand left_operand = Opaque(OperandOfRows(left));
    const Operand right_operand = Opaque(OperandOfRows(right));
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      const int chunk = step / 4, column_bytes = step % 4 * 32;
      Wgmma<kM>::template SharedShared<false>(
          result, left_operand.Advance(chunk * kKChunkBytes + column_bytes),
          right_operand.Advance(chunk * kQChunkBytes + column_bytes), step > 0, Element{});
    }
    WgmmaCommit();
  }

  // sum += left [64 keys, kBlockM] rows [kBlockM, columns].
  template <int kCount>
  __device__ __forceinline__ void IssueAccumulate(float (&sum)[kCount],
                                                  const uint32_t (&left)[kLogits / 2],
                                                  uint32_t rows) {
    const Operand operand = Opaque(OperandOfColumns(rows, kQChunkBytes));
#pragma unroll
    for (int step = 0; step < kM / 16; ++step) {
      Wgmma<2 * kCount>::RegistersShared(
          sum, left + 4 * step, operand.Advance(step * 2 * kSwizzleAtomBytes), true, Element{});
    }
    WgmmaCommit();
  }

  // dq = dS [queries, kBlockN] K [kBlockN, some columns], from the first query and column on, or
  // its transpose.
  template <int kCount>
  __device__ __forceinline__ void IssueQueryGradient(float (&dq)[kCount], uint32_t queries,
                                                     uint32_t columns) {
    WgmmaFence();
    const Operand ds_operand = Opaque(OperandOfRows(queries));
    const Operand k_operand = Opaque(OperandOfColumns(columns, kKChunkBytes));
#pragma unroll
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      const Operand ds_step = ds_operand.Advance(step / 4 * kM * 128 + step % 4 * 32);
      const Operand k_step = k_operand.Advance(step * 2 * kSwizzleAtomBytes);
      if constexpr (Traits::kTransposed) {
        Wgmma<kM>::template SharedShared<false, true>(dq, k_step, ds_step, step > 0, Element{});
      } else {
        Wgmma<2 * kCount>::template SharedShared<true>(dq, ds_step, k_step, step > 0, Element{});
      }
    }
    WgmmaCommit();
  }

  // --- shared memory ---

  // Writes dS as rows of queries, in a chunk of 64 keys.
  __device__ __forceinline__ void StoreLogitGradients(const uint32_t (&ds_words)[kLogits / 2],
                                                      uint8_t* chunk) {
    const int lane = thread % 32, warp = thread / 32 % 4;
    const int matrix = lane / 8, row = Traits::kTransposed ? lane % 8 : RowOfQuery(lane % 8);
    const int unit = 2 * warp + (matrix & 1);  // of 8 keys
    const uint32_t address =
        SharedAddress(chunk) + (8 * (matrix >> 1) + row) * 128 + ((unit ^ row) << 4);
#pragma unroll
    for (int step = 0; step < kM / 16; ++step)
      StoreMatricesTransposed(address + step * 16 * 128, ds_words + 4 * step);
  }

  // Writes this warpgroup's columns of dQ where the copy engine finds them.
  template <int kCount>
  __device__ __forceinline__ void PlaceQueryGradient(const float (&dq)[kCount], uint32_t address) {
    const float factor = Traits::kScaledDifference ? 1.0f : params.scale;
    if constexpr (Traits::kTransposed) {
      // Groups of 8 queries; a thread has two of each, in columns c and c + 8.
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t place = address ^ ((i / 2 % 2 * 2 ^ i % 2) << 4);
        StoreFloat(place + (i / 4 * 8 + i % 2) * 128, dq[i] * factor);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const int group = i / 4;  // of 8 columns
        const uint32_t place =
            (address ^ (group % 4 << 5)) + group / 4 * Traits::kGradientRows * 128;
        StorePair(place, dq[i] * factor, dq[i + 1] * factor);
        StorePair(place + 8 * 128, dq[i + 2] * factor, dq[i + 3] * factor);
      }
    }
    if constexpr (!Traits::kLong) FenceAsyncProxy();
    Release(&shared.dq_full[warpgroup]);
  }

  // Where this thread's first pair of dQ goes.
  __device__ __forceinline__ uint32_t PlaceOfQueryGradient() const {
    const int lane = thread % 32, warp = thread / 32 % 4;
    if constexpr (Traits::kTransposed) {
      const int query = lane % 4 * 2, unit = 4 * (warp % 2) + lane / 16;  // of 16 bytes
      return SharedAddress(shared.dq[warpgroup]) + (warp / 2 * kM + query) * 128 +
             ((unit ^ query) << 4) + lane / 4 % 4 * 4;
    }
    const int row = QueryOfRow(lane / 4);  // in its group of 8
    return SharedAddress(shared.dq[warpgroup]) + (16 * warp + row) * 128 +
           ((lane % 4 / 2 ^ row) << 4) + lane % 2 * 8;
  }

  // Half of what this thread needs of the statistics of a block: those of queries
  // 8j + 2 (thread % 4) + {0, 1}.
  template <int kHalf>
  __device__ __forceinline__ void LoadStats(float2 (&values)[kLogits / 8],
                                            const float (&stats)[kM]) const {
#pragma unroll
    for (int j = 0; j < kLogits / 8; ++j)
      values[j] =
          reinterpret_cast<const float2*>(stats)[4 * (j + kHalf * kLogits / 8) + thread % 4];
  }

  __device__ __forceinline__ void Release(uint64_t* barrier) {
    if constexpr (!kEveryLaneArrives) __syncwarp();
    if (kEveryLaneArrives || thread % 32 == 0) BarrierArrive(barrier);
  }

  // Until all consumers are here. The warpgroups of a pair come from different places, where a
  // named barrier would have to be the same instruction.
  __device__ __forceinline__ void AwaitConsumers() {
    if constexpr (Traits::kPaired) {
      Release(&shared.pair.vote);
      BarrierWait(&shared.pair.vote, vote_parity);
      vote_parity ^= 1;
    } else {
      NamedBarrierSync(kVoteBarrier, Traits::kConsumerThreads);
    }
  }

  // --- masks ---

  __device__ __forceinline__ void FindVisible(RowMask<kLogits / 2> (&rows)[2]) {
    const QueryBlockNote<Traits>& note = shared.notes[ring.slot];
    const QueryBlockHeader& block = note.header;
    if (!(flags & kMaskedBlock)) return;
    const int keys[2] = {block.key_start + thread_row, block.key_start + thread_row + 8};
    const int lane_column = thread % 4 * 2;
    rows[0].Clear();
    rows[1].Clear();
    if constexpr (Traits::kDocuments) {
      // One slice, which leaves nothing where it does not touch the block.
      const Slice slice = note.slices[0];
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows[row].Add(slice, keys[row], block.query_start, lane_column);
      return;
    }
    const bool inline_slices = block.num_slices >= 0;
    const int count = inline_slices ? block.num_slices : -block.num_slices;
    for (int i = 0; i < count; ++i) {
      Slice slice;
      if (inline_slices) {
        slice = note.slices[i];
      } else {
        const int id = params.by_key.ids[block.ids_begin + i];
        slice = Transposed(params.slices[min(max(id, 0), params.num_slices - 1)]);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row)
        rows[row].Add(slice, keys[row], block.query_start, lane_column);
    }
  }

  static __device__ __forceinline__ void Hide(float (&values)[kLogits],
                                              const RowMask<kLogits / 2> (&rows)[2]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      values[i] = rows[i / 2 % 2].Has(i / 4 * 2 + i % 2) ? values[i] : 0.0f;
    }
  }

  // --- what is not finite, see backward_poison.h ---

  // Both consumers, once per tile.
  __device__ __forceinline__ void CleanKeys() {
    constexpr int kRowThreads = Traits::kConsumerThreads / Traits::kBlockN;
    static_assert(kRowThreads >= Traits::kChunks && kRowThreads >= Traits::kVChunks);
    const int row = (thread - 128) / kRowThreads, chunk = thread % kRowThreads;
    const int at = chunk * kKChunkBytes + row * Traits::kRowBytes;
    bool found = false, value_found = false;
    if (chunk < Traits::kChunks) found = CleanRow<Element>(shared.k + at, row);
    if (chunk < Traits::kVChunks) value_found = CleanRow<Element, false>(shared.v + at, row);
    int bits = (found ? kSpoiledKeys : 0) | (value_found ? kSpoiledValues : 0);
#pragma unroll
    for (int other = 1; other < kRowThreads; other *= 2)
      bits |= __shfl_xor_sync(0xFFFFFFFF, bits, other);
    if (chunk == 0) shared.spoiled_keys[row] = bits;
    FenceAsyncProxy();
    AwaitConsumers();
    bits = 0;
#pragma unroll
    for (int i = thread % 32; i < Traits::kBlockN; i += 32) bits |= shared.spoiled_keys[i];
    spoiled = __reduce_or_sync(0xFFFFFFFF, bits);
  }

  __device__ __forceinline__ void SpoilRows(float (&s)[kLogits]) {
    const bool spoiled[2] = {(shared.spoiled_keys[thread_row] & kSpoiledKeys) != 0,
                             (shared.spoiled_keys[thread_row + 8] & kSpoiledKeys) != 0};
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = spoiled[i / 2 % 2] ? NAN : s[i];
  }
  // Both consumers come here with the same blocks, where each makes S and dP of its own keys.
  __device__ __forceinline__ void CleanQueries(float (&p)[kLogits], const float (&dp)[kLogits]) {
    AwaitConsumers();  // S and dP are done
    // The next loop stays rolled up: its addresses would take registers from the loop of blocks.
#pragma unroll 1
    for (int i = thread - 128; i < 2 * Traits::kChunks * kM; i += Traits::kConsumerThreads) {
      const int row = i % kM, part = i / kM;
      uint8_t* const tile =
          part < Traits::kChunks ? shared.q[ring.slot] : shared.dout[dout_ring.slot];
      CleanRow<Element, true, 1>(
          tile + part % Traits::kChunks * kQChunkBytes + row * Traits::kRowBytes, row);
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) p[i] = dp[i] - dp[i] == 0.0f ? p[i] : NAN;
    FenceAsyncProxy();
    AwaitConsumers();
  }
};

// Lets a consumer call what it has of BlockConsumer by its name.
#define MAGI_BLOCK_CONSUMER(Base)   \
  using typename Base::Element;     \
  using Base::dout_ring;            \
  using Base::flags;                \
  using Base::kKChunkBytes;         \
  using Base::kLogits;              \
  using Base::kM;                   \
  using Base::kQChunkBytes;         \
  using Base::kv_parity;            \
  using Base::params;               \
  using Base::ring;                 \
  using Base::shared;               \
  using Base::spoiled;              \
  using Base::thread;               \
  using Base::thread_row;           \
  using Base::warpgroup;            \
  using Base::AwaitConsumers;       \
  using Base::CleanKeys;            \
  using Base::FindVisible;          \
  using Base::Hide;                 \
  using Base::IssueAccumulate;      \
  using Base::IssueTransposed;      \
  using Base::LoadStats;            \
  using Base::PlaceOfQueryGradient; \
  using Base::PlaceQueryGradient;   \
  using Base::Release;              \
  using Base::StoreLogitGradients;  \
  using Base::ToLogitGradients;     \
  using Base::ToProbabilities

}  // namespace magi_jax::sm90

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM90_BACKWARD_BLOCK_H_
