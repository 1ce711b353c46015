// Attention targets on NVIDIA GPUs: decode, validate, enqueue on the stream of the call. Nothing is
// allocated, nothing waits, and nothing but kernels and memsets is enqueued, so that XLA may record
// the calls into command buffers. Tables lie in device memory: their shapes are checked here, their
// values are clamped by the kernels.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"
#include "xla_ffi/handlers/ffa_binding.h"
#include "xla_ffi/kernels/sm80/kernels.h"
#ifdef MAGI_JAX_WITH_SM90
#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/forward.h"
#endif

namespace magi_jax {
namespace {

// What the handlers need of a path. Scratch is a further result of the call.
struct Sm80 {
  static constexpr bool kOrdered = true;  // there is no other order
  static constexpr bool kRoundsDq = false;
  static std::string Refuse(const ForwardParams& params) { return sm80::Refuse(params.problem); }
  static std::string Refuse(const BackwardParams& params) { return sm80::Refuse(params.problem); }
  static size_t ForwardScratchBytes(const Problem&) { return 0; }
  static size_t BackwardScratchBytes(const Problem&, DType, bool) { return 0; }
  static cudaError_t Run(const ForwardParams& params, void*, cudaStream_t stream) {
    return sm80::Forward(params, stream);
  }
  static cudaError_t Run(const BackwardParams& params, cudaStream_t stream) {
    return sm80::Backward(params, stream);
  }
};

#ifdef MAGI_JAX_WITH_SM90
// kOrderedSums: gradients are summed in a fixed order.
template <bool kOrderedSums>
struct Sm90 {
  static constexpr bool kOrdered = kOrderedSums;
  static constexpr bool kRoundsDq = true;  // where it is wanted in the dtype of q
  static std::string Refuse(const ForwardParams& params) {
    const char* reason = sm90::RefuseForward(params);
    return reason == nullptr ? "" : reason;
  }
  static size_t ForwardScratchBytes(const Problem& problem) {
    return sm90::ForwardScratchBytes(problem);
  }
  static std::string Refuse(const BackwardParams& params) {
    const char* reason = sm90::RefuseBackward(params);
    return reason == nullptr ? "" : reason;
  }
  static size_t BackwardScratchBytes(const Problem& problem, DType dkv_dtype, bool rounds_dq) {
    return sm90::BackwardScratchBytes(problem, dkv_dtype, kOrdered, rounds_dq);
  }
  static cudaError_t Run(const ForwardParams& params, void* scratch, cudaStream_t stream) {
    return sm90::Forward(params, scratch, stream);
  }
  static cudaError_t Run(const BackwardParams& params, cudaStream_t stream) {
    return sm90::Backward(params, stream);
  }
};
#endif

ffi::Error LaunchError(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string("the attention kernel was not launched: ") +
                        cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

// Kernels move 16 bytes at a time.
ffi::Error CheckAligned(const char* name, const void* memory) {
  const auto past = reinterpret_cast<uintptr_t>(memory) % 16;
  if (past == 0) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " must be aligned to 16 bytes, its address is " +
                         std::to_string(past) + " past a multiple of them");
}

ffi::Error CheckAligned(const ForwardParams& params) {
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("q", params.q));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("k", params.k));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("v", params.v));
  return CheckAligned("out", params.out);
}

ffi::Error CheckAligned(const BackwardParams& params) {
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dout", params.dout));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("q", params.q));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("k", params.k));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("v", params.v));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dq", params.dq));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dq", params.dq_rounded));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dk", params.dk));
  return CheckAligned("dv", params.dv);
}

// The slices and the walk of a decoded problem.
template <class Params>
ffi::Error DecodeTable(Operand slices, const TileRunsOperands& by_query, Params* params) {
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(DecodeSlices(slices, &problem, &params->slices));
  return DecodeTileRuns(by_query, problem.q_len, problem.tile_size, &params->by_query);
}

// The scratch that a path asked for: one further result after `last`, or none.
ffi::Error TakeScratch(ffi::RemainingRets scratch, const char* last, size_t bytes, void** memory) {
  if (bytes == 0) {
    if (scratch.size() == 0) return ffi::Error::Success();
    return InvalidArgument("this path takes no scratch, but further results were given");
  }
  if (scratch.size() != 1)
    return InvalidArgument("one scratch result is needed after " + std::string(last));
  auto buffer = scratch.get<Operand>(0);
  if (buffer.has_error()) return buffer.error();
  if ((*buffer)->size_bytes() < bytes)
    return InvalidArgument("scratch has " + std::to_string((*buffer)->size_bytes()) + " bytes, " +
                           std::to_string(bytes) + " are needed");
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("scratch", (*buffer)->untyped_data()));
  *memory = (*buffer)->untyped_data();
  return ffi::Error::Success();
}

template <class Path>
ffi::Error RunForward(const ForwardParams& params, ffi::RemainingRets scratch,
                      cudaStream_t stream) {
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned(params));
  const std::string reason = Path::Refuse(params);
  if (!reason.empty()) return InvalidArgument(reason);
  void* memory = nullptr;
  MAGI_JAX_RETURN_IF_ERROR(
      TakeScratch(scratch, "row_max", Path::ForwardScratchBytes(params.problem), &memory));
  return LaunchError(Path::Run(params, memory, stream));
}

template <class Path>
ffi::Error Forward(cudaStream_t stream, Operand q, Operand k, Operand v, Operand slices,
                   Operand ptr, Operand runs, Operand ids, Operand order, Result out, Result lse,
                   Result row_max, ffi::RemainingRets scratch, float scale, float logits_soft_cap,
                   int32_t tile_size) {
  ForwardParams params = {};
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeForward(q, k, v, {scale, logits_soft_cap, tile_size}, {*out, *lse, *row_max}, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable(slices, {"by_query", ptr, runs, ids, order}, &params));
  return RunForward<Path>(params, scratch, stream);
}

// XLA aliases the results to out_in and lse_in; a caller that did not ask for it gets a copy.
ffi::Error Bring(Operand from, Operand to, cudaStream_t stream) {
  if (from.untyped_data() == to.untyped_data()) return ffi::Error::Success();
  return LaunchError(cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(),
                                     cudaMemcpyDeviceToDevice, stream));
}

template <class Path>
ffi::Error ForwardAccumulate(cudaStream_t stream, Operand q, Operand k, Operand v, Operand slices,
                             Operand ptr, Operand runs, Operand ids, Operand order, Operand out_in,
                             Operand lse_in, Result out, Result lse, Result row_max,
                             ffi::RemainingRets scratch, float scale, float logits_soft_cap,
                             int32_t tile_size) {
  ForwardParams params = {};
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeForward(q, k, v, {scale, logits_soft_cap, tile_size}, {*out, *lse, *row_max}, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeEarlier(out_in, lse_in, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable(slices, {"by_query", ptr, runs, ids, order}, &params));
  MAGI_JAX_RETURN_IF_ERROR(Bring(out_in, *out, stream));
  MAGI_JAX_RETURN_IF_ERROR(Bring(lse_in, *lse, stream));
  return RunForward<Path>(params, scratch, stream);
}

template <class Path>
ffi::Error RunBackward(BackwardParams& params, ffi::RemainingRets scratch, cudaStream_t stream) {
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned(params));
  const std::string reason = Path::Refuse(params);
  if (!reason.empty()) return InvalidArgument(reason);
  const size_t bytes =
      Path::BackwardScratchBytes(params.problem, params.dkv_dtype, params.dq_rounded != nullptr);
  MAGI_JAX_RETURN_IF_ERROR(TakeScratch(scratch, "dv", bytes, &params.scratch));
  return LaunchError(Path::Run(params, stream));
}

template <class Path>
ffi::Error Backward(cudaStream_t stream, Operand dout, Operand q, Operand k, Operand v, Operand lse,
                    Operand delta, Operand slices, Operand q_ptr, Operand q_runs, Operand q_ids,
                    Operand q_order, Operand k_ptr, Operand k_runs, Operand k_ids, Operand k_order,
                    Result dq, Result dk, Result dv, ffi::RemainingRets scratch, float scale,
                    float logits_soft_cap, int32_t tile_size) {
  BackwardParams params = {};
  params.fixed_order = Path::kOrdered;
  const Problem& problem = params.problem;
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeBackward(dout, q, k, v, lse, delta, {scale, logits_soft_cap, tile_size}, &params));
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeTable(slices, {"by_query", q_ptr, q_runs, q_ids, q_order}, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTileRuns({"by_key", k_ptr, k_runs, k_ids, k_order}, problem.k_len,
                                          tile_size, &params.by_key));
  MAGI_JAX_RETURN_IF_ERROR(DecodeGradients(Path::kRoundsDq, k, *dq, *dk, *dv, &params));
  return RunBackward<Path>(params, scratch, stream);
}

template <class Path>
ffi::Error BackwardAccumulate(cudaStream_t stream, Operand dout, Operand q, Operand k, Operand v,
                              Operand lse, Operand delta, Operand slices, Operand q_ptr,
                              Operand q_runs, Operand q_ids, Operand q_order, Operand k_ptr,
                              Operand k_runs, Operand k_ids, Operand k_order, Operand dq_in,
                              Result dq, Result dk, Result dv, ffi::RemainingRets scratch,
                              float scale, float logits_soft_cap, int32_t tile_size) {
  BackwardParams params = {};
  params.fixed_order = Path::kOrdered;
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeBackward(dout, q, k, v, lse, delta, {scale, logits_soft_cap, tile_size}, &params));
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeTable(slices, {"by_query", q_ptr, q_runs, q_ids, q_order}, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTileRuns({"by_key", k_ptr, k_runs, k_ids, k_order},
                                          params.problem.k_len, tile_size, &params.by_key));
  MAGI_JAX_RETURN_IF_ERROR(DecodeGradients(Path::kRoundsDq, k, *dq, *dk, *dv, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeEarlier(dq_in, &params));
  MAGI_JAX_RETURN_IF_ERROR(Bring(dq_in, *dq, stream));
  return RunBackward<Path>(params, scratch, stream);
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

// Scratch is a further result.
template <class Binding>
auto BindForwardRest(Binding&& operands) {
  return BindAttributes(BindForwardResults(std::move(operands)).RemainingRets());
}

template <class Binding>
auto BindBackwardRest(Binding&& operands) {
  return BindAttributes(BindGradients(std::move(operands)).RemainingRets());
}

auto BindForward() { return BindForwardRest(BindForwardOperands(Bind())); }
auto BindForwardAccumulate() { return BindForwardRest(BindForwardAccumulateOperands(Bind())); }
auto BindBackward() { return BindBackwardRest(BindBackwardOperands(Bind())); }
auto BindBackwardAccumulate() { return BindBackwardRest(BindBackwardAccumulateOperands(Bind())); }

constexpr auto kRecordable = {ffi::Traits::kCmdBufferCompatible};

}  // namespace

XLA_FFI_DEFINE_HANDLER(kFfaForwardSm80, Forward<Sm80>, BindForward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaForwardAccumulateSm80, ForwardAccumulate<Sm80>, BindForwardAccumulate(),
                       kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardSm80, Backward<Sm80>, BindBackward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardAccumulateSm80, BackwardAccumulate<Sm80>,
                       BindBackwardAccumulate(), kRecordable);
#ifdef MAGI_JAX_WITH_SM90
XLA_FFI_DEFINE_HANDLER(kFfaForwardSm90, Forward<Sm90<false>>, BindForward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaForwardAccumulateSm90, ForwardAccumulate<Sm90<false>>,
                       BindForwardAccumulate(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardSm90, Backward<Sm90<false>>, BindBackward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardAccumulateSm90, BackwardAccumulate<Sm90<false>>,
                       BindBackwardAccumulate(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardSm90Ordered, Backward<Sm90<true>>, BindBackward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardAccumulateSm90Ordered, BackwardAccumulate<Sm90<true>>,
                       BindBackwardAccumulate(), kRecordable);
#endif

std::vector<Registration> CudaRegistrations() {
  return {
      {"magi_jax_ffa_forward_sm80", "CUDA", kFfaForwardSm80},
      {"magi_jax_ffa_forward_accumulate_sm80", "CUDA", kFfaForwardAccumulateSm80},
      {"magi_jax_ffa_backward_sm80", "CUDA", kFfaBackwardSm80},
      {"magi_jax_ffa_backward_accumulate_sm80", "CUDA", kFfaBackwardAccumulateSm80},
#ifdef MAGI_JAX_WITH_SM90
      {"magi_jax_ffa_forward_sm90", "CUDA", kFfaForwardSm90},
      {"magi_jax_ffa_forward_accumulate_sm90", "CUDA", kFfaForwardAccumulateSm90},
      {"magi_jax_ffa_backward_sm90", "CUDA", kFfaBackwardSm90},
      {"magi_jax_ffa_backward_accumulate_sm90", "CUDA", kFfaBackwardAccumulateSm90},
      {"magi_jax_ffa_backward_sm90_ordered", "CUDA", kFfaBackwardSm90Ordered},
      {"magi_jax_ffa_backward_accumulate_sm90_ordered", "CUDA", kFfaBackwardAccumulateSm90Ordered},
#endif
  };
}

}  // namespace magi_jax
