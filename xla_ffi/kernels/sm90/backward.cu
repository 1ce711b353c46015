// Host side of the Hopper backward: which problems it takes, and how one is dealt out over the
// device.

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/backward_documents.h"
#include "xla_ffi/kernels/sm90/backward_launch.h"
#include "xla_ffi/kernels/sm90/backward_params.h"
#include "xla_ffi/kernels/sm90/backward_prepare.cuh"

namespace magi_jax::sm90 {
namespace {

constexpr int kTileMultiple = 128;  // of the table's tiles
// Items dealt out before the next kv heads begin. Tiles in flight should be of few heads, whose
// queries and gradients stay in L2, but a section must be long enough for its longest items not to
// be the last to finish. Where heads are not grouped, each item in flight side by side is of
// another head, so that fewer are enough.
constexpr int kSectionItems = 1024, kUngroupedSectionItems = 256;
// Blocks of an item, where splitting a tile by heads allows: more cost less, fewer balance better.
constexpr int kLeastItemBlocks = 32, kItemBlocks = 160;
// Where a group's tiles walk more than kLongWalk queries, they do so kSegmentQueries at a time, as
// what thread blocks read of longer walks would not fit in L2.
constexpr int kSegmentQueries = 16384, kLongWalk = 2 * kSegmentQueries;
// What the launch that prepares clears: of dQ, what takes it no longer than a memset of its own;
// sums of dK and dV, whether their tiles are split or not, where that takes less than a launch.
constexpr int64_t kMostQueryWords = (int64_t{128} << 20) / sizeof(float4);
constexpr int64_t kMostSumWords = (int64_t{32} << 20) / sizeof(float4);
// The numbers of slices for which a mask may be documents.
constexpr int kMostDocuments = 4096, kLongestMeanDocument = 2048;
constexpr size_t kCounterBytes = 128;  // of scratch, before the rest
using Documents = BackwardTraits<__nv_bfloat16, 2 * kChunk, 2 * kChunk, false, false, false, true>;

struct BackwardInstantiation {
  DType dtype;
  int head_dim, v_head_dim;
  const char* name;
  LaunchBackwardFunction* launch;
};

constexpr BackwardInstantiation kInstantiations[] = {
    {DType::kBF16, 64, 64, "sm90 hdim64 bf16", LaunchBackwardHdim64Bf16},
    {DType::kF16, 64, 64, "sm90 hdim64 f16", LaunchBackwardHdim64F16},
    {DType::kBF16, 96, 96, "sm90 hdim96 bf16", LaunchBackwardHdim96Bf16},
    {DType::kF16, 96, 96, "sm90 hdim96 f16", LaunchBackwardHdim96F16},
    {DType::kBF16, 128, 128, "sm90 hdim128 bf16", LaunchBackwardHdim128Bf16},
    {DType::kF16, 128, 128, "sm90 hdim128 f16", LaunchBackwardHdim128F16},
    {DType::kBF16, 192, 128, "sm90 hdim192x128 bf16", LaunchBackwardHdim192x128Bf16},
    {DType::kF16, 192, 128, "sm90 hdim192x128 f16", LaunchBackwardHdim192x128F16},
    {DType::kBF16, 256, 256, "sm90 hdim256 bf16", LaunchBackwardHdim256Bf16},
    {DType::kF16, 256, 256, "sm90 hdim256 f16", LaunchBackwardHdim256F16},
};

const BackwardInstantiation* Find(const Problem& problem) {
  for (const BackwardInstantiation& candidate : kInstantiations) {
    if (candidate.dtype == problem.dtype && candidate.head_dim == problem.head_dim &&
        candidate.v_head_dim == problem.v_head_dim && candidate.launch != nullptr) {
      return &candidate;
    }
  }
  return nullptr;
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Of a tile's walk.
int SegmentQueries(const Problem& problem, bool fixed_order) {
  const bool cuts = CutsWalks(problem.head_dim, problem.logits_soft_cap != 0.0f) && !fixed_order &&
                    problem.num_heads > problem.num_kv_heads && problem.q_len > kLongWalk;
  return cuts ? kSegmentQueries : std::max(problem.q_len, 1);
}

int NumTiles(const Problem& problem) {
  const int table_tiles = (problem.k_len + problem.tile_size - 1) / problem.tile_size;
  return table_tiles * (problem.tile_size / TileKeys(problem.head_dim));
}

// Places of the parts of scratch, in bytes from its start.
struct ScratchLayout {
  size_t lse, delta, suspects, items, parts, dk_sum, dv_sum, dq_sum;
  size_t progress, turns, tile_order, first_queries, end;
};

bool TakesDocuments(const Problem& problem, bool fixed_order, bool rounds_dq) {
  return sm90::TakesDocuments(problem.head_dim, problem.logits_soft_cap != 0.0f) && !fixed_order &&
         rounds_dq;
}

bool MayBeDocuments(const Problem& problem, bool fixed_order, bool rounds_dq) {
  return TakesDocuments(problem, fixed_order, rounds_dq) && problem.num_slices <= kMostDocuments &&
         problem.num_slices * int64_t{problem.num_heads} >= kDocumentsPerSm * kDocumentBlocks &&
         problem.q_len / problem.num_slices <= kLongestMeanDocument;
}

bool TakesShortRuns(const Problem& problem, bool fixed_order) {
  return sm90::TakesShortRuns(problem.head_dim, problem.logits_soft_cap != 0.0f) && !fixed_order &&
         problem.q_len <= kMostShortQueries;
}

size_t QueryGradientBytes(const Problem& problem) {
  return sizeof(float) * problem.q_len * problem.num_heads * problem.head_dim;
}

ScratchLayout LayOutScratch(const Problem& problem, DType dkv_dtype, bool fixed_order,
                            bool rounds_dq) {
  const auto align = [](size_t bytes) { return (bytes + 127) / 128 * 128; };
  const size_t stats = static_cast<size_t>(problem.num_heads) * StatRows(problem.q_len);
  const int group = problem.num_heads / problem.num_kv_heads;
  // Tiles of a head that is alone in its group are never split, and float32 results are sums
  // themselves.
  const bool has_sums = group > 1 && dkv_dtype != DType::kF32;
  const size_t key_floats =
      has_sums ? static_cast<size_t>(problem.k_len) * problem.num_kv_heads : 0;
  ScratchLayout at;
  at.lse = kCounterBytes;
  at.delta = at.lse + align(stats * sizeof(float));
  at.suspects = at.delta + align(stats * sizeof(float));
  at.items = at.suspects + align(stats / kStatTile * sizeof(uint32_t));
  const int segment = SegmentQueries(problem, fixed_order);
  const size_t segments = (problem.q_len + segment - 1) / segment;
  // Documents may have more tiles than the keys, since each may end with a part of one.
  const int most_documents =
      TakesDocuments(problem, fixed_order, rounds_dq) ? std::min(problem.q_len, kMostDocuments) : 0;
  const size_t tiles =
      std::max<size_t>(segments * NumTiles(problem), NumTiles(problem) + most_documents);
  at.parts = at.items + align(tiles * group * sizeof(WorkItem));
  at.dk_sum = at.parts + align(NumTiles(problem) * sizeof(int));
  at.dv_sum = at.dk_sum + align(key_floats * problem.head_dim * sizeof(float));
  at.dq_sum = at.dv_sum + align(key_floats * problem.v_head_dim * sizeof(float));
  at.progress = at.dq_sum + align(rounds_dq ? QueryGradientBytes(problem) : 0);
  const size_t ordered_tiles = fixed_order ? NumTiles(problem) : 0;
  at.turns = at.progress + align(2 * ordered_tiles * problem.num_heads * sizeof(Progress));
  at.tile_order = at.turns + align(2 * ordered_tiles * problem.num_kv_heads * sizeof(int));
  at.first_queries = at.tile_order + align(ordered_tiles * sizeof(int));
  at.end = at.first_queries + align(ordered_tiles * sizeof(int));
  return at;
}

// Whether tiles of queries that see no key keep what the rounded dQ has; no dQ is added to then.
bool KeepsTiles(const BackwardParams& backward) {
  return backward.accumulate && backward.dq_rounded != nullptr;
}

BackwardKernelParams MakeKernelParams(const BackwardParams& backward) {
  const Problem& problem = backward.problem;
  char* const scratch = static_cast<char*>(backward.scratch);
  const bool rounds_dq = backward.dq_rounded != nullptr;
  const ScratchLayout at =
      LayOutScratch(problem, backward.dkv_dtype, backward.fixed_order, rounds_dq);
  BackwardKernelParams params{};
  params.slices = backward.slices;
  params.by_key = backward.by_key;
  params.counter = reinterpret_cast<int*>(scratch) + kItemsTaken;
  params.num_items = params.counter + kItems;
  params.lse = reinterpret_cast<float*>(scratch + at.lse);
  params.delta = reinterpret_cast<float*>(scratch + at.delta);
  params.suspects = reinterpret_cast<uint32_t*>(scratch + at.suspects);
  params.items = reinterpret_cast<WorkItem*>(scratch + at.items);
  params.parts = reinterpret_cast<int*>(scratch + at.parts);
  if (backward.fixed_order) {
    params.progress = reinterpret_cast<Progress*>(scratch + at.progress);
    params.turns = reinterpret_cast<int*>(scratch + at.turns);
    params.tile_order = reinterpret_cast<int*>(scratch + at.tile_order);
    params.first_queries = reinterpret_cast<int*>(scratch + at.first_queries);
  }
  if (MayBeDocuments(problem, backward.fixed_order, rounds_dq)) {
    params.num_document_items = params.counter + kDocumentItems;
    params.document_counter = params.counter + kDocumentItemsTaken;
    // dQ itself is not used then.
    static_assert(Documents::kConsumers == kDocumentConsumers);
    const size_t places = size_t{kDocumentConsumers} * problem.num_heads;  // of a block
    const size_t slots =
        QueryGradientBytes(problem) / (places * (Documents::kGradientBytes + sizeof(int)));
    params.sum_slots = static_cast<int>(slots);
    params.query_sums = reinterpret_cast<uint8_t*>(scratch + at.dq_sum);
    params.sum_flags =
        reinterpret_cast<int*>(params.query_sums + slots * places * Documents::kGradientBytes);
    params.most_document_items = static_cast<int>((at.parts - at.items) / sizeof(WorkItem));
  }
  params.dq_rounded = backward.dq_rounded;
  if (KeepsTiles(backward)) {
    params.query_ptr = backward.by_query.ptr;
    params.query_tile_size = problem.tile_size;
  }
  params.stat_rows = StatRows(problem.q_len);
  params.dk = backward.dk;
  params.dv = backward.dv;
  params.gradients_are_f32 = backward.dkv_dtype == DType::kF32;
  params.dk_sum = params.gradients_are_f32 ? static_cast<float*>(backward.dk)
                                           : reinterpret_cast<float*>(scratch + at.dk_sum);
  params.dv_sum = params.gradients_are_f32 ? static_cast<float*>(backward.dv)
                                           : reinterpret_cast<float*>(scratch + at.dv_sum);
  params.scale = problem.scale;
  params.cap_log2 = problem.logits_soft_cap * kLog2e;
  params.transform_scale = 2.0f * kLog2e * problem.scale / problem.logits_soft_cap;
  params.q_len = problem.q_len;
  params.k_len = problem.k_len;
  params.num_heads = problem.num_heads;
  params.num_kv_heads = problem.num_kv_heads;
  params.num_slices = problem.num_slices;
  params.parts_per_tile = problem.tile_size / TileKeys(problem.head_dim);
  params.section_items =
      problem.num_heads > problem.num_kv_heads ? kSectionItems : kUngroupedSectionItems;
  params.segment_queries = SegmentQueries(problem, backward.fixed_order);
  if (params.segment_queries < problem.q_len) {
    params.num_cut_items = params.counter + kCutItems;
    params.cut_counter = params.counter + kCutItemsTaken;
  }
  if (TakesShortRuns(problem, backward.fixed_order)) {
    params.num_short_items = params.counter + kShortItems;
    params.short_counter = params.counter + kShortItemsTaken;
  }
  params.least_item_blocks = kLeastItemBlocks;
  params.item_blocks = kItemBlocks;
  return params;
}

cudaError_t ClearGradient(void* gradient, DType dtype, int rows, int heads, int head_dim,
                          cudaStream_t stream) {
  const size_t bytes =
      static_cast<size_t>(rows) * heads * head_dim * (dtype == DType::kF32 ? 4 : 2);
  return bytes == 0 ? cudaSuccess : cudaMemsetAsync(gradient, 0, bytes, stream);
}

// What the kernel reads besides the operands, and zeros where it adds.
cudaError_t Prepare(const BackwardParams& backward, const BackwardKernelParams& params, int num_sms,
                    cudaStream_t stream) {
  const Problem& problem = backward.problem;
  const int64_t key_rows = int64_t{problem.k_len} * problem.num_kv_heads;
  const int64_t key_words = key_rows * problem.head_dim / 4,
                value_words = key_rows * problem.v_head_dim / 4;
  const bool has_sums = problem.num_heads > problem.num_kv_heads;
  const bool clears_sums = has_sums && key_words + value_words <= kMostSumWords;
  const int64_t query_words = int64_t{problem.q_len} * problem.num_heads * problem.head_dim / 4;
  const bool adds = backward.accumulate && !KeepsTiles(backward);
  const bool clears_queries = !backward.accumulate && query_words <= kMostQueryWords;
  // Documents do not use dQ.
  const bool clears_by_plan =
      KeepsTiles(backward) || (!clears_queries && params.num_document_items != nullptr);
  if (!adds && !clears_queries && !clears_by_plan) {
    const cudaError_t cleared = ClearGradient(backward.dq, DType::kF32, problem.q_len,
                                              problem.num_heads, problem.head_dim, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const Preparation preparation = {
      {backward.lse, backward.delta, const_cast<float*>(params.lse),
       const_cast<float*>(params.delta), const_cast<uint32_t*>(params.suspects),
       problem.dtype == DType::kBF16 ? problem.scale : 1.0f, problem.q_len, problem.num_heads,
       params.stat_rows},
      {{reinterpret_cast<float4*>(backward.dq), clears_queries ? query_words : 0},
       {reinterpret_cast<float4*>(params.dk_sum), clears_sums ? key_words : 0},
       {reinterpret_cast<float4*>(params.dv_sum), clears_sums ? value_words : 0}},
      BlockQueries(problem.head_dim),
      num_sms};
  PrepareBackward<<<num_sms + 1, kPlanThreads, 0, stream>>>(params, preparation);
  const cudaError_t error = cudaGetLastError();
  const bool clears_split = has_sums && !clears_sums;
  if (error != cudaSuccess || !(clears_split || clears_by_plan)) return error;
  const dim3 tiles(NumTiles(problem), MergeBlocks(NumTiles(problem)));
  const Zeros queries = {reinterpret_cast<float4*>(backward.dq), clears_by_plan ? query_words : 0};
  return LaunchNext(ClearByPlan, tiles, kMergeThreads, 0, stream, params,
                    TileKeys(problem.head_dim), problem.head_dim, problem.v_head_dim, clears_split,
                    queries);
}

// Sums to results.
cudaError_t Finish(const BackwardParams& backward, const BackwardKernelParams& params,
                   cudaStream_t stream) {
  const Problem& problem = backward.problem;
  const bool has_sums = !params.gradients_are_f32 && problem.num_heads > problem.num_kv_heads;
  if (!has_sums && params.dq_rounded == nullptr) return cudaSuccess;
  const auto kernel =
      problem.dtype == DType::kF16 ? FinishBackward<__half> : FinishBackward<__nv_bfloat16>;
  const dim3 tiles(NumTiles(problem), MergeBlocks(NumTiles(problem)));
  const auto* const sums = reinterpret_cast<const float4*>(backward.dq);
  return LaunchNext(kernel, tiles, kMergeThreads, 0, stream, params, TileKeys(problem.head_dim),
                    problem.head_dim, problem.v_head_dim, has_sums, sums,
                    static_cast<int64_t>(QueryGradientBytes(problem) / sizeof(float4)));
}

}  // namespace

const char* RefuseBackward(const BackwardParams& backward) {
  const Problem& problem = backward.problem;
  if (problem.dtype != DType::kBF16 && problem.dtype != DType::kF16) {
    return "sm90 backward takes bfloat16 and float16 q, k, v";
  }
  if (Find(problem) == nullptr) {
    return "sm90 backward takes head dims (q and k, v): 64, 64; 96, 96; 128, 128; 192, 128; 256, "
           "256; each in one type alone where MAGI_JAX_CUDA_KERNELS was ci";
  }
  if (problem.num_kv_heads <= 0 || problem.num_heads % problem.num_kv_heads != 0) {
    return "sm90 backward needs a number of heads that is a multiple of the number of kv heads";
  }
  if (problem.tile_size <= 0 || problem.tile_size % kTileMultiple != 0) {
    return "sm90 backward needs a slice table whose tile size is a multiple of 128";
  }
  if (backward.dkv_dtype != DType::kF32 && backward.dkv_dtype != problem.dtype) {
    return "sm90 backward writes dk and dv in float32 or the type of k";
  }
  if (!IsAligned(backward.dout) || !IsAligned(backward.q) || !IsAligned(backward.k) ||
      !IsAligned(backward.v) || !IsAligned(backward.dq) || !IsAligned(backward.dk) ||
      !IsAligned(backward.dv)) {
    return "sm90 backward needs dout, q, k, v, dq, dk and dv aligned to 16 bytes";
  }
  return nullptr;
}

size_t BackwardScratchBytes(const Problem& problem, DType dkv_dtype, bool fixed_order,
                            bool rounds_dq) {
  return LayOutScratch(problem, dkv_dtype, fixed_order, rounds_dq).end;
}

void DescribeBackward(const Problem& problem, bool fixed_order, char* text, size_t size) {
  const BackwardInstantiation* found = Find(problem);
  const bool takes_short = TakesShortRuns(problem, fixed_order);
  const bool takes_long = SharingOf(problem.head_dim) == Sharing::kColumns &&
                          !(takes_short && problem.q_len < kLongRun);
  const int queries = takes_long ? kLongQueries : BlockQueries(problem.head_dim);
  std::snprintf(text, size, "%s backward, tiles of %d keys, blocks of %d queries%s",
                found == nullptr ? "none" : found->name, TileKeys(problem.head_dim), queries,
                takes_long && takes_short ? ", 64 where runs are short" : "");
}

cudaError_t Backward(const BackwardParams& given, cudaStream_t stream) {
  BackwardParams backward = given;
  const Problem& problem = backward.problem;
  const BackwardInstantiation* instantiation = Find(problem);
  if (instantiation == nullptr) return cudaErrorInvalidValue;
  if (problem.k_len == 0 && backward.dq_rounded != nullptr && !backward.accumulate) {
    return ClearGradient(backward.dq_rounded, problem.dtype, problem.q_len, problem.num_heads,
                         problem.head_dim, stream);
  }
  if (problem.k_len == 0) {
    return backward.accumulate ? cudaSuccess
                               : ClearGradient(backward.dq, DType::kF32, problem.q_len,
                                               problem.num_heads, problem.head_dim, stream);
  }
  if (problem.q_len == 0) {
    const cudaError_t error = ClearGradient(backward.dk, backward.dkv_dtype, problem.k_len,
                                            problem.num_kv_heads, problem.head_dim, stream);
    if (error != cudaSuccess) return error;
    return ClearGradient(backward.dv, backward.dkv_dtype, problem.k_len, problem.num_kv_heads,
                         problem.v_head_dim, stream);
  }
  if (backward.scratch == nullptr) return cudaErrorInvalidValue;
  if (backward.dq_rounded != nullptr) {
    const ScratchLayout at = LayOutScratch(problem, backward.dkv_dtype, backward.fixed_order, true);
    backward.dq = reinterpret_cast<float*>(static_cast<char*>(backward.scratch) + at.dq_sum);
  }
  const BackwardKernelParams params = MakeKernelParams(backward);
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = Prepare(backward, params, num_sms, stream);
  if (error != cudaSuccess) return error;
  const int group = problem.num_heads / problem.num_kv_heads;
  const int64_t most_work = int64_t{NumTiles(problem)} * problem.num_kv_heads * group;
  const int blocks = static_cast<int>(std::min<int64_t>(most_work, num_sms));
  error = instantiation->launch(backward, params, blocks, stream);
  if (error != cudaSuccess) return error;
  return Finish(backward, params, stream);
}

}  // namespace magi_jax::sm90
