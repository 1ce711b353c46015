// Picks the instantiation for a problem. Host code only.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>

#include "xla_ffi/kernels/sm80/config.h"
#include "xla_ffi/kernels/sm80/kernels.h"
#include "xla_ffi/kernels/sm80/launch.h"

namespace magi_jax::sm80 {
namespace {

struct Instantiation {
  DType dtype;
  int head_dim, v_head_dim;
  cudaError_t (*forward)(const ForwardParams&, cudaStream_t);
  cudaError_t (*query_grad)(const BackwardParams&, cudaStream_t);
  cudaError_t (*key_grad)(const BackwardParams&, cudaStream_t);
};

#define MAGI_JAX_SM80(DTYPE, TYPE, HEAD_DIM, V_HEAD_DIM) \
  {DTYPE,                                                \
   HEAD_DIM,                                             \
   V_HEAD_DIM,                                           \
   LaunchForward<TYPE, HEAD_DIM, V_HEAD_DIM>,            \
   LaunchQueryGrad<TYPE, HEAD_DIM, V_HEAD_DIM>,          \
   LaunchKeyGrad<TYPE, HEAD_DIM, V_HEAD_DIM>},

constexpr Instantiation kInstantiations[] = {
#include "sm80_instantiations.inc"  // written by CMake
};

#undef MAGI_JAX_SM80

const Instantiation* Find(const Problem& problem) {
  for (const Instantiation& candidate : kInstantiations)
    if (candidate.dtype == problem.dtype && candidate.head_dim == problem.head_dim &&
        candidate.v_head_dim == problem.v_head_dim)
      return &candidate;
  return nullptr;
}

const char* Name(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
}

std::string Name(DType dtype, int head_dim, int v_head_dim) {
  return std::string(Name(dtype)) + " " + std::to_string(head_dim) + "/" +
         std::to_string(v_head_dim);
}

std::string Describe(const TileConfig& tile) {
  return std::to_string(tile.rows) + "x" + std::to_string(tile.columns) + " tile, " +
         std::to_string(tile.threads()) + " threads, " + std::to_string(tile.shared_bytes()) +
         " bytes of shared memory" + (tile.passes > 1 ? ", two passes" : "");
}

// Thread blocks of one launch; a tile has at least one row per thread block.
bool FitsGrid(const Problem& problem) {
  const int64_t longest = problem.q_len > problem.k_len ? problem.q_len : problem.k_len;
  const int64_t parts = (int64_t{problem.tile_size} + 63) / 64;
  const int64_t tiles = (longest + problem.tile_size - 1) / problem.tile_size + 1;
  return tiles * parts * problem.num_heads <= std::numeric_limits<int32_t>::max();
}

}  // namespace

std::string Refuse(const Problem& problem) {
  if (Find(problem) == nullptr) {
    std::string text = "sm80 has no kernel for q, k, v of " +
                       Name(problem.dtype, problem.head_dim, problem.v_head_dim) +
                       " (dtype, head dim of q and k / of v); this build has";
    const char* separator = " ";
    for (const Instantiation& other : kInstantiations) {
      text += separator + Name(other.dtype, other.head_dim, other.v_head_dim);
      separator = ", ";
    }
    return text;
  }
  if (!FitsGrid(problem))
    return "sm80 launches at most 2^31 - 1 thread blocks; " + std::to_string(problem.q_len) +
           " queries, " + std::to_string(problem.k_len) + " keys and " +
           std::to_string(problem.num_heads) + " heads make more";
  return "";
}

std::string DescribeForward(const Problem& problem) {
  if (!Refuse(problem).empty()) return "";
  return "sm80 forward, " + Name(problem.dtype, problem.head_dim, problem.v_head_dim) + ": " +
         Describe(ForwardTile(problem.head_dim, problem.v_head_dim));
}

std::string DescribeBackward(const Problem& problem) {
  if (!Refuse(problem).empty()) return "";
  return "sm80 backward, " + Name(problem.dtype, problem.head_dim, problem.v_head_dim) +
         ": dK and dV " + Describe(KeyGradTile(problem.head_dim, problem.v_head_dim)) + "; dQ " +
         Describe(QueryGradTile(problem.head_dim, problem.v_head_dim));
}

cudaError_t Forward(const ForwardParams& params, cudaStream_t stream) {
  const Instantiation* found = Find(params.problem);
  if (found == nullptr) return cudaErrorInvalidValue;
  if (params.problem.q_len == 0) return cudaSuccess;
  return found->forward(params, stream);
}

cudaError_t Backward(const BackwardParams& params, cudaStream_t stream) {
  const Instantiation* found = Find(params.problem);
  if (found == nullptr) return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  if (params.problem.k_len > 0) error = found->key_grad(params, stream);
  if (params.problem.q_len > 0 && error == cudaSuccess) error = found->query_grad(params, stream);
  return error;
}

}  // namespace magi_jax::sm80
