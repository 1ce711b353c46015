// Attention targets on the CPU: decode, validate, and hand units of work to XLA's threads.

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"
#include "xla_ffi/common/table_check.h"
#include "xla_ffi/handlers/ffa_binding.h"
#include "xla_ffi/kernels/cpu/kernels.h"
#include "xla_ffi/kernels/cpu/parallel.h"

namespace magi_jax {
namespace {

struct TableOperands {
  Operand slices;
  TileRunsOperands by_query;
};

ffi::Error OutOfMemory(int64_t floats) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "no memory for " + std::to_string(floats * 4) + " bytes of scratch per thread");
}

// What offsets inside of scratch, int32, have room for.
ffi::Error CheckSizes(const Problem& problem) {
  if (problem.tile_size > cpu::kMaxTileSize) {
    return InvalidArgument("the CPU kernels take tiles of up to " +
                           std::to_string(cpu::kMaxTileSize) + " rows, got tile_size " +
                           std::to_string(problem.tile_size));
  }
  if (std::max(problem.head_dim, problem.v_head_dim) > cpu::kMaxHeadDim) {
    return InvalidArgument(
        "the CPU kernels take head dims of up to " + std::to_string(cpu::kMaxHeadDim) + ", got " +
        std::to_string(problem.head_dim) + " and " + std::to_string(problem.v_head_dim));
  }
  return ffi::Error::Success();
}

// A walk and the slices that it speaks of, values included: tables are in host memory here.
ffi::Error DecodeWalk(const TileRunsOperands& operands, int32_t length, int32_t walk_len,
                      const Problem& problem, TileRuns* runs) {
  MAGI_JAX_RETURN_IF_ERROR(DecodeTileRuns(operands, length, problem.tile_size, runs));
  return CheckTileRunValues(operands.name, *runs, problem.num_slices, walk_len);
}

// Of a decoded problem, which is checked against what these kernels take.
template <typename Params>
ffi::Error DecodeTable(const TableOperands& table, Params* params) {
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(CheckSizes(problem));
  MAGI_JAX_RETURN_IF_ERROR(DecodeSlices(table.slices, &problem, &params->slices));
  MAGI_JAX_RETURN_IF_ERROR(CheckSliceValues(params->slices, problem));
  return DecodeWalk(table.by_query, problem.q_len, problem.k_len, problem, &params->by_query);
}

ffi::Error RunForward(const ForwardParams& params, ffi::ThreadPool& pool) {
  const cpu::Kernels& kernels = cpu::SelectKernels();
  const int64_t scratch_floats = kernels.forward_scratch(params.problem);
  const int32_t heads = params.problem.num_heads;
  const bool ok =
      cpu::ParallelFor(pool, int64_t{params.by_query.num_tiles} * heads, [&](int64_t unit) {
        float* scratch = cpu::ThreadScratch::Get(scratch_floats);
        if (scratch == nullptr) return false;
        kernels.forward(params, params.by_query.order[unit / heads],
                        static_cast<int32_t>(unit % heads), scratch);
        return true;
      });
  return ok ? ffi::Error::Success() : OutOfMemory(scratch_floats);
}

// XLA may give an aliased operand and its result different memory.
void Bring(Operand from, Operand to) {
  if (from.untyped_data() == to.untyped_data()) return;
  std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
}

// Exceptions (no memory, no thread) must not reach XLA.
template <typename Body>
ffi::Error Guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error Forward(ffi::ThreadPool pool, Operand q, Operand k, Operand v, Operand slices,
                   Operand ptr, Operand runs, Operand ids, Operand order, Result out, Result lse,
                   Result row_max, float scale, float logits_soft_cap, int32_t tile_size) {
  return Guarded([&]() -> ffi::Error {
    ForwardParams params = {};
    MAGI_JAX_RETURN_IF_ERROR(DecodeForward(q, k, v, {scale, logits_soft_cap, tile_size},
                                           {*out, *lse, *row_max}, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeTable({slices, {"by_query", ptr, runs, ids, order}}, &params));
    return RunForward(params, pool);
  });
}

ffi::Error ForwardAccumulate(ffi::ThreadPool pool, Operand q, Operand k, Operand v, Operand slices,
                             Operand ptr, Operand runs, Operand ids, Operand order, Operand out_in,
                             Operand lse_in, Result out, Result lse, Result row_max, float scale,
                             float logits_soft_cap, int32_t tile_size) {
  return Guarded([&]() -> ffi::Error {
    ForwardParams params = {};
    MAGI_JAX_RETURN_IF_ERROR(DecodeForward(q, k, v, {scale, logits_soft_cap, tile_size},
                                           {*out, *lse, *row_max}, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeEarlier(out_in, lse_in, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeTable({slices, {"by_query", ptr, runs, ids, order}}, &params));
    Bring(out_in, *out);
    Bring(lse_in, *lse);
    return RunForward(params, pool);
  });
}

// One walk does five products per block, but its threads divide kv heads among them; two walks do
// seven and divide tiles. Both have a fixed order of sums.
bool OneWalkIsFaster(const Problem& problem, int64_t threads) {
  threads = std::max<int64_t>(threads, 1);
  const int64_t rounds = (problem.num_kv_heads + threads - 1) / threads;
  return 5 * rounds * threads <= 7 * int64_t{problem.num_kv_heads};
}

bool RunOneWalk(const BackwardParams& params, ffi::ThreadPool& pool, int64_t scratch_floats) {
  const cpu::Kernels& kernels = cpu::SelectKernels();
  const Problem& problem = params.problem;
  const size_t dq_bytes =
      sizeof(float) * problem.q_len * static_cast<size_t>(problem.num_heads) * problem.head_dim;
  if (!params.accumulate) std::memset(params.dq, 0, dq_bytes);
  return cpu::ParallelFor(pool, problem.num_kv_heads, [&](int64_t kv_head) {
    float* scratch = cpu::ThreadScratch::Get(scratch_floats);
    if (scratch == nullptr) return false;
    for (int32_t tile = 0; tile < params.by_key.num_tiles; ++tile) {
      kernels.key_walk(params, tile, static_cast<int32_t>(kv_head), /*add_dq=*/true, scratch);
    }
    return true;
  });
}

bool RunTwoWalks(const BackwardParams& params, ffi::ThreadPool& pool, int64_t scratch_floats) {
  const cpu::Kernels& kernels = cpu::SelectKernels();
  const int32_t heads = params.problem.num_heads, kv_heads = params.problem.num_kv_heads;
  const int64_t key_units = int64_t{params.by_key.num_tiles} * kv_heads;
  const int64_t query_units = int64_t{params.by_query.num_tiles} * heads;
  return cpu::ParallelFor(pool, key_units + query_units, [&](int64_t unit) {
    float* scratch = cpu::ThreadScratch::Get(scratch_floats);
    if (scratch == nullptr) return false;
    if (unit < key_units) {
      kernels.key_walk(params, params.by_key.order[unit / kv_heads],
                       static_cast<int32_t>(unit % kv_heads), /*add_dq=*/false, scratch);
    } else {
      unit -= key_units;
      kernels.query_walk(params, params.by_query.order[unit / heads],
                         static_cast<int32_t>(unit % heads), scratch);
    }
    return true;
  });
}

ffi::Error RunBackward(const BackwardParams& params, ffi::ThreadPool& pool) {
  const cpu::Kernels& kernels = cpu::SelectKernels();
  const int64_t scratch_floats = std::max(kernels.key_walk_scratch(params.problem),
                                          kernels.query_walk_scratch(params.problem));
  const bool ok = OneWalkIsFaster(params.problem, pool.num_threads())
                      ? RunOneWalk(params, pool, scratch_floats)
                      : RunTwoWalks(params, pool, scratch_floats);
  return ok ? ffi::Error::Success() : OutOfMemory(scratch_floats);
}

ffi::Error Backward(ffi::ThreadPool pool, Operand dout, Operand q, Operand k, Operand v,
                    Operand lse, Operand delta, Operand slices, Operand q_ptr, Operand q_runs,
                    Operand q_ids, Operand q_order, Operand k_ptr, Operand k_runs, Operand k_ids,
                    Operand k_order, Result dq, Result dk, Result dv, float scale,
                    float logits_soft_cap, int32_t tile_size) {
  return Guarded([&]() -> ffi::Error {
    BackwardParams params = {};
    const Problem& problem = params.problem;
    MAGI_JAX_RETURN_IF_ERROR(
        DecodeBackward(dout, q, k, v, lse, delta, {scale, logits_soft_cap, tile_size}, &params));
    MAGI_JAX_RETURN_IF_ERROR(
        DecodeTable({slices, {"by_query", q_ptr, q_runs, q_ids, q_order}}, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeWalk({"by_key", k_ptr, k_runs, k_ids, k_order}, problem.k_len,
                                        problem.q_len, problem, &params.by_key));
    MAGI_JAX_RETURN_IF_ERROR(DecodeGradients(false, k, *dq, *dk, *dv, &params));
    return RunBackward(params, pool);
  });
}

ffi::Error BackwardAccumulate(ffi::ThreadPool pool, Operand dout, Operand q, Operand k, Operand v,
                              Operand lse, Operand delta, Operand slices, Operand q_ptr,
                              Operand q_runs, Operand q_ids, Operand q_order, Operand k_ptr,
                              Operand k_runs, Operand k_ids, Operand k_order, Operand dq_in,
                              Result dq, Result dk, Result dv, float scale, float logits_soft_cap,
                              int32_t tile_size) {
  return Guarded([&]() -> ffi::Error {
    BackwardParams params = {};
    const Problem& problem = params.problem;
    MAGI_JAX_RETURN_IF_ERROR(
        DecodeBackward(dout, q, k, v, lse, delta, {scale, logits_soft_cap, tile_size}, &params));
    MAGI_JAX_RETURN_IF_ERROR(
        DecodeTable({slices, {"by_query", q_ptr, q_runs, q_ids, q_order}}, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeWalk({"by_key", k_ptr, k_runs, k_ids, k_order}, problem.k_len,
                                        problem.q_len, problem, &params.by_key));
    MAGI_JAX_RETURN_IF_ERROR(DecodeGradients(false, k, *dq, *dk, *dv, &params));
    MAGI_JAX_RETURN_IF_ERROR(DecodeEarlier(dq_in, &params));
    Bring(dq_in, *dq);
    return RunBackward(params, pool);
  });
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

auto BindForward() { return BindAttributes(BindForwardResults(BindForwardOperands(Bind()))); }

auto BindForwardAccumulate() {
  return BindAttributes(BindForwardResults(BindForwardAccumulateOperands(Bind())));
}

auto BindBackward() { return BindAttributes(BindGradients(BindBackwardOperands(Bind()))); }

auto BindBackwardAccumulate() {
  return BindAttributes(BindGradients(BindBackwardAccumulateOperands(Bind())));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kFfaForwardCpu, Forward, BindForward());
XLA_FFI_DEFINE_HANDLER(kFfaForwardAccumulateCpu, ForwardAccumulate, BindForwardAccumulate());
XLA_FFI_DEFINE_HANDLER(kFfaBackwardCpu, Backward, BindBackward());
XLA_FFI_DEFINE_HANDLER(kFfaBackwardAccumulateCpu, BackwardAccumulate, BindBackwardAccumulate());

std::vector<Registration> CpuRegistrations() {
  return {{"magi_jax_ffa_forward", "cpu", kFfaForwardCpu},
          {"magi_jax_ffa_forward_accumulate", "cpu", kFfaForwardAccumulateCpu},
          {"magi_jax_ffa_backward", "cpu", kFfaBackwardCpu},
          {"magi_jax_ffa_backward_accumulate", "cpu", kFfaBackwardAccumulateCpu}};
}

}  // namespace magi_jax
