// Host side of the Hopper forward: which problems it takes, and how one is dealt out over the
// device.

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "xla_ffi/kernels/sm90/forward.h"
#include "xla_ffi/kernels/sm90/forward_launch.h"
#include "xla_ffi/kernels/sm90/kernel_params.h"
#include "xla_ffi/kernels/sm90/split_plan.cuh"

namespace magi_jax::sm90 {
namespace {

constexpr int kBlockM = 128;     // rows of a work tile, in all instantiations
constexpr int kMaxPackLog2 = 3;  // at most 8 heads in a work tile
// Keys and values of one section of kv heads should stay in L2 (50 MiB or more) beside queries and
// outputs.
constexpr int64_t kSectionBytes = int64_t{24} << 20;
// A row's reference point moves only when its maximum has grown by more than this, in powers of
// two: probabilities stay below 2^8, which costs no precision in floating point, and most blocks
// leave the accumulators alone. The result does not depend on the reference point but for rounding.
// Where the maxima themselves are asked for, references follow them.
constexpr float kMoveThreshold = 8.0f;

// Most tiles of a block of the grid that are dealt out without a counter.
constexpr int kFixedRounds = 8;

struct Instantiation {
  DType dtype;
  int head_dim, v_head_dim;
  const char* name;
  int block_keys;             // of a block, where there are many keys
  const char* few_keys_name;  // of the kernel for calls with few keys, if they have one
  LaunchForwardFunction* launch;
};

constexpr Instantiation kInstantiations[] = {
    {DType::kBF16, 64, 64, "sm90 hdim64 bf16 128x192", 192, "sm90 hdim64 bf16 128x128",
     LaunchForwardHdim64Bf16},
    {DType::kF16, 64, 64, "sm90 hdim64 f16 128x192", 192, "sm90 hdim64 f16 128x128",
     LaunchForwardHdim64F16},
    {DType::kBF16, 96, 96, "sm90 hdim96 bf16 128x128", 128, nullptr, LaunchForwardHdim96Bf16},
    {DType::kF16, 96, 96, "sm90 hdim96 f16 128x128", 128, nullptr, LaunchForwardHdim96F16},
    {DType::kBF16, 128, 128, "sm90 hdim128 bf16 128x144", 144, "sm90 hdim128 bf16 128x128",
     LaunchForwardHdim128Bf16},
    {DType::kF16, 128, 128, "sm90 hdim128 f16 128x144", 144, "sm90 hdim128 f16 128x128",
     LaunchForwardHdim128F16},
    {DType::kBF16, 192, 128, "sm90 hdim192x128 bf16 128x96", 96, nullptr,
     LaunchForwardHdim192x128Bf16},
    {DType::kF16, 192, 128, "sm90 hdim192x128 f16 128x96", 96, nullptr,
     LaunchForwardHdim192x128F16},
    {DType::kBF16, 256, 256, "sm90 hdim256 bf16 128x64", 64, nullptr, LaunchForwardHdim256Bf16},
    {DType::kF16, 256, 256, "sm90 hdim256 f16 128x64", 64, nullptr, LaunchForwardHdim256F16},
};

const Instantiation* Find(const Problem& problem) {
  for (const Instantiation& candidate : kInstantiations) {
    if (candidate.dtype == problem.dtype && candidate.head_dim == problem.head_dim &&
        candidate.v_head_dim == problem.v_head_dim && candidate.launch != nullptr) {
      return &candidate;
    }
  }
  return nullptr;
}

// Heads of a group that share a work tile: the largest power of two that divides the group.
int PackLog2(const Problem& problem) {
  const int group = problem.num_heads / problem.num_kv_heads;
  int log2 = 0;
  while (log2 < kMaxPackLog2 && group % (2 << log2) == 0) ++log2;
  return log2;
}

// Thread blocks that share keys: two where a table tile has an even number of tiles, but in calls
// that are too short for what it takes them to meet.
int NumPartners(const Problem& problem) {
  const bool is_even = problem.tile_size / (kBlockM >> PackLog2(problem)) % 2 == 0;
  return is_even && problem.k_len > kFewKeys ? 2 : 1;
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

KernelParams MakeKernelParams(const ForwardParams& forward) {
  constexpr float kLog2e = 1.4426950408889634f;
  const Problem& problem = forward.problem;
  KernelParams params{};
  params.slices = forward.slices;
  params.by_query = forward.by_query;
  params.q = forward.q;
  params.k = forward.k;
  params.v = forward.v;
  params.out = forward.out;
  params.lse = forward.lse;
  params.row_max = forward.row_max;
  params.q_len = problem.q_len;
  params.k_len = problem.k_len;
  params.num_heads = problem.num_heads;
  params.num_slices = problem.num_slices;
  params.scale = problem.scale;
  params.move_threshold = forward.row_max == nullptr ? kMoveThreshold : 0.0f;
  params.out_is_f32 = forward.out_dtype == DType::kF32;
  params.accumulates = forward.accumulates;
  params.merges = forward.accumulates && params.out_is_f32;
  const float cap = problem.logits_soft_cap;
  params.transform = NeedsTransform(problem);
  params.transform_scale =
      cap != 0.0f ? 2.0f * kLog2e * problem.scale / cap : kLog2e * problem.scale;
  params.cap_log2 = cap * kLog2e;

  params.pack_log2 = PackLog2(problem);
  const int pack = 1 << params.pack_log2;
  params.num_kv_heads = problem.num_kv_heads;
  params.parts_per_group = problem.num_heads / problem.num_kv_heads / pack;
  params.tile_tokens = kBlockM / pack;
  params.partners = NumPartners(problem);
  params.item_tokens = params.partners * params.tile_tokens;
  params.parts_per_tile = problem.tile_size / params.item_tokens;
  params.table_tile_size = problem.tile_size;
  const int64_t kv_head_bytes =
      int64_t{2} * problem.k_len * (problem.head_dim + problem.v_head_dim);
  params.section_kv_heads = static_cast<int>(std::clamp<int64_t>(
      kSectionBytes / std::max<int64_t>(kv_head_bytes, 1), 1, problem.num_kv_heads));
  params.num_work = forward.by_query.num_tiles * problem.num_kv_heads * params.parts_per_group *
                    params.parts_per_tile;
  return params;
}

// Enqueues the making of a plan, after which `params` follow it.
cudaError_t PlanSplits(const ForwardParams& forward, void* scratch, int num_blocks, int block_keys,
                       KernelParams* params, cudaStream_t stream) {
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const int most_pieces = MostPieces(NumItems(forward.problem));
  const SplitScratch split = {
      static_cast<int32_t*>(scratch), reinterpret_cast<SplitPlan*>(bytes + kPlanOffset),
      reinterpret_cast<int32_t*>(bytes + kArrivalsOffset),
      reinterpret_cast<float2*>(bytes + kLseOffset),
      reinterpret_cast<float4*>(bytes + kLseOffset + most_pieces * kPieceLseBytes)};
  const int partners = params->partners;
  const SplitPlanParams plan = {split,
                                block_keys,
                                num_blocks / partners,
                                most_pieces / partners,
                                most_pieces * kSplitWarps,
                                forward.accumulates};
  const int threads = std::max(128, (params->by_query.num_tiles + 31) / 32 * 32);
  MakeSplitPlan<<<1, threads, 0, stream>>>(*params, plan);
  params->counter = split.counter;
  params->split = split;
  return cudaGetLastError();
}

}  // namespace

const char* RefuseForward(const ForwardParams& forward) {
  const Problem& problem = forward.problem;
  if (problem.dtype != DType::kBF16 && problem.dtype != DType::kF16) {
    return "sm90 forward takes bfloat16 and float16 q, k, v";
  }
  if (Find(problem) == nullptr)
    return "sm90 forward takes head dims (of q and k, of v) 64, 96, 128, 256, and 192 with 128, "
           "each in one type alone where MAGI_JAX_CUDA_KERNELS was ci";
  if (problem.num_kv_heads <= 0 || problem.num_heads % problem.num_kv_heads != 0) {
    return "sm90 forward needs a number of heads that is a multiple of the number of kv heads";
  }
  if (problem.num_heads > kMostHeads) return "sm90 forward takes at most 65535 heads";
  if (problem.tile_size <= 0 || problem.tile_size % (kBlockM >> PackLog2(problem)) != 0) {
    return "sm90 forward needs a slice table whose tile size is a multiple of 128";
  }
  if (forward.out_dtype != DType::kF32 && forward.out_dtype != problem.dtype) {
    return "sm90 forward writes float32 or the type of q";
  }
  if (!IsAligned(forward.q) || !IsAligned(forward.k) || !IsAligned(forward.v) ||
      !IsAligned(forward.out)) {
    return "sm90 forward needs q, k, v and out aligned to 16 bytes";
  }
  return nullptr;
}

size_t ForwardScratchBytes(const Problem& problem) {
  if (!MaySplit(problem)) return sizeof(int);
  return kLseOffset + MostPieces(NumItems(problem)) * PieceBytes(problem.v_head_dim);
}

void DescribeForward(const Problem& problem, char* text, size_t size) {
  const Instantiation* found = Find(problem);
  const char* name = found == nullptr ? "none" : found->name;
  if (found != nullptr && found->few_keys_name != nullptr && TakesFewKeys(problem))
    name = found->few_keys_name;
  std::snprintf(text, size, "%s, %d heads x %d tokens a tile%s", name, 1 << PackLog2(problem),
                kBlockM >> PackLog2(problem), NumPartners(problem) > 1 ? ", in pairs" : "");
}

cudaError_t Forward(const ForwardParams& forward, void* scratch, cudaStream_t stream) {
  const Problem& problem = forward.problem;
  const Instantiation* instantiation = Find(problem);
  if (instantiation == nullptr || scratch == nullptr) return cudaErrorInvalidValue;
  if (problem.q_len == 0) return cudaSuccess;
  KernelParams params = MakeKernelParams(forward);
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (MaySplit(problem) && !params.transform && forward.row_max == nullptr) {
    error = PlanSplits(forward, scratch, num_sms, instantiation->block_keys, &params, stream);
    if (error != cudaSuccess) return error;
    return instantiation->launch(forward, params, num_sms / params.partners * params.partners,
                                 stream);
  }
  const int workers = std::min(params.num_work, num_sms / params.partners);
  const int grid = workers * params.partners;
  // Clearing the counter costs as much as a tenth of a call of 1024 tokens. Without it a block of
  // the grid that must wait for a multiprocessor does all its tiles late, so long calls always have
  // it.
  const bool is_fixed = problem.k_len <= kFewKeys && params.num_work <= kFixedRounds * workers;
  if (params.num_work > workers && !is_fixed) {
    params.counter = static_cast<int*>(scratch);
    error = cudaMemsetAsync(scratch, 0, sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  return instantiation->launch(forward, params, grid, stream);
}

}  // namespace magi_jax::sm90
