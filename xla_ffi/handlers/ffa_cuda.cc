// Attention targets on NVIDIA GPUs: decode, validate, enqueue on the stream of the call. Nothing is
// allocated, nothing waits, and nothing but kernels and memsets is enqueued, so that XLA may record
// the calls into command buffers. Tables lie in device memory: their shapes are checked here, their
// values are clamped by the kernels.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/common/ffa_operands.h"
#include "xla_ffi/common/registration.h"
#include "xla_ffi/kernels/sm80/kernels.h"
#ifdef MAGI_JAX_WITH_SM90
#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/forward.h"
#endif

namespace magi_jax {
namespace {

using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// What the handlers need of a path. Scratch is a further result of the call.
struct Sm80 {
  static std::string Refuse(const ForwardParams& params) { return sm80::Refuse(params.problem); }
  static std::string Refuse(const BackwardParams& params) { return sm80::Refuse(params.problem); }
  static size_t ForwardScratchBytes(const Problem&) { return 0; }
  static size_t BackwardScratchBytes(const Problem&) { return 0; }
  static cudaError_t Run(const ForwardParams& params, void*, cudaStream_t stream) {
    return sm80::Forward(params, stream);
  }
  static cudaError_t Run(const BackwardParams& params, cudaStream_t stream) {
    return sm80::Backward(params, stream);
  }
};

#ifdef MAGI_JAX_WITH_SM90
struct Sm90 {
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
  static size_t BackwardScratchBytes(const Problem& problem) {
    return sm90::BackwardScratchBytes(problem);
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
ffi::Error CheckAligned(const char* name, Operand buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  if (address % 16 == 0) return ffi::Error::Success();
  return InvalidArgument(std::string(name) + " must be aligned to 16 bytes, its address is " +
                         std::to_string(address % 16) + " past a multiple of them");
}

ffi::Error DecodeTable(Operand slices, const TileRunsOperands& walk, int32_t length,
                       Problem* problem, const Slice** rows, TileRuns* runs) {
  MAGI_JAX_RETURN_IF_ERROR(DecodeSlices(slices, rows));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTileRuns(walk, length, problem->tile_size, runs));
  problem->num_slices = static_cast<int32_t>(slices.dimensions()[0]);
  runs->num_runs = static_cast<int32_t>(walk.runs.dimensions()[0]);
  runs->num_ids = static_cast<int32_t>(walk.ids.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error DecodeForward(Operand q, Operand k, Operand v, Operand slices,
                         const TileRunsOperands& walk, const Attributes& attributes, Operand out,
                         Operand lse, ForwardParams* params) {
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(DecodeProblem(q, k, v, attributes, &problem));
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeTable(slices, walk, problem.q_len, &problem, &params->slices, &params->by_query));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("out", out, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse", lse, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse", lse));
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("out", out, &params->out_dtype));
  if (params->out_dtype != problem.dtype && params->out_dtype != DType::kF32)
    return InvalidArgument("out must be float32 or have the dtype of q");
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("q", q));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("k", k));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("v", v));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("out", out));
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->out = out.untyped_data();
  params->lse = static_cast<float*>(lse.untyped_data());
  return ffi::Error::Success();
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
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("scratch", **buffer));
  *memory = (*buffer)->untyped_data();
  return ffi::Error::Success();
}

template <class Path>
ffi::Error RunForward(const ForwardParams& params, ffi::RemainingRets scratch,
                      cudaStream_t stream) {
  const std::string reason = Path::Refuse(params);
  if (!reason.empty()) return InvalidArgument(reason);
  void* memory = nullptr;
  MAGI_JAX_RETURN_IF_ERROR(
      TakeScratch(scratch, "lse", Path::ForwardScratchBytes(params.problem), &memory));
  return LaunchError(Path::Run(params, memory, stream));
}

template <class Path>
ffi::Error Forward(cudaStream_t stream, Operand q, Operand k, Operand v, Operand slices,
                   Operand ptr, Operand runs, Operand ids, Operand order, Result out, Result lse,
                   ffi::RemainingRets scratch, float scale, float logits_soft_cap,
                   int32_t tile_size) {
  ForwardParams params = {};
  MAGI_JAX_RETURN_IF_ERROR(DecodeForward(q, k, v, slices, {"by_query", ptr, runs, ids, order},
                                         {scale, logits_soft_cap, tile_size}, *out, *lse, &params));
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
                             Operand lse_in, Result out, Result lse, ffi::RemainingRets scratch,
                             float scale, float logits_soft_cap, int32_t tile_size) {
  ForwardParams params = {};
  MAGI_JAX_RETURN_IF_ERROR(DecodeForward(q, k, v, slices, {"by_query", ptr, runs, ids, order},
                                         {scale, logits_soft_cap, tile_size}, *out, *lse, &params));
  const Problem& problem = params.problem;
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("out", *out));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("out_in", out_in));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse_in", lse_in));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("out_in", out_in, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse_in", lse_in, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(Bring(out_in, *out, stream));
  MAGI_JAX_RETURN_IF_ERROR(Bring(lse_in, *lse, stream));
  params.accumulate = true;
  return RunForward<Path>(params, scratch, stream);
}

ffi::Error DecodeGradients(Operand k, Operand dq, Operand dk, Operand dv, BackwardParams* params) {
  const Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dq", dq, {problem.q_len, problem.num_heads, problem.head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dk", dk, {problem.k_len, problem.num_kv_heads, problem.head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dv", dv, {problem.k_len, problem.num_kv_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("dq", dq));
  const ffi::DataType type = dk.element_type();
  if (dv.element_type() != type || (type != ffi::DataType::F32 && type != k.element_type()))
    return InvalidArgument("dk and dv must both be float32 or both have the dtype of k");
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("dk", dk, &params->dkv_dtype));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dq", dq));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dk", dk));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dv", dv));
  params->dq = static_cast<float*>(dq.untyped_data());
  params->dk = dk.untyped_data();
  params->dv = dv.untyped_data();
  return ffi::Error::Success();
}

ffi::Error DecodeBackward(Operand dout, Operand q, Operand k, Operand v, Operand lse, Operand delta,
                          const Attributes& attributes, BackwardParams* params) {
  Problem& problem = params->problem;
  MAGI_JAX_RETURN_IF_ERROR(DecodeProblem(q, k, v, attributes, &problem));
  MAGI_JAX_RETURN_IF_ERROR(
      CheckShape("dout", dout, {problem.q_len, problem.num_heads, problem.v_head_dim}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("lse", lse, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckShape("delta", delta, {problem.q_len, problem.num_heads}));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("lse", lse));
  MAGI_JAX_RETURN_IF_ERROR(CheckF32("delta", delta));
  DType dout_dtype;
  MAGI_JAX_RETURN_IF_ERROR(DecodeDType("dout", dout, &dout_dtype));
  if (dout_dtype != problem.dtype) return InvalidArgument("dout must have the dtype of q");
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("dout", dout));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("q", q));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("k", k));
  MAGI_JAX_RETURN_IF_ERROR(CheckAligned("v", v));
  params->dout = dout.untyped_data();
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->lse = static_cast<const float*>(lse.untyped_data());
  params->delta = static_cast<const float*>(delta.untyped_data());
  return ffi::Error::Success();
}

template <class Path>
ffi::Error Backward(cudaStream_t stream, Operand dout, Operand q, Operand k, Operand v, Operand lse,
                    Operand delta, Operand slices, Operand q_ptr, Operand q_runs, Operand q_ids,
                    Operand q_order, Operand k_ptr, Operand k_runs, Operand k_ids, Operand k_order,
                    Result dq, Result dk, Result dv, ffi::RemainingRets scratch, float scale,
                    float logits_soft_cap, int32_t tile_size) {
  BackwardParams params = {};
  Problem& problem = params.problem;
  MAGI_JAX_RETURN_IF_ERROR(
      DecodeBackward(dout, q, k, v, lse, delta, {scale, logits_soft_cap, tile_size}, &params));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable(slices, {"by_query", q_ptr, q_runs, q_ids, q_order},
                                       problem.q_len, &problem, &params.slices, &params.by_query));
  MAGI_JAX_RETURN_IF_ERROR(DecodeTable(slices, {"by_key", k_ptr, k_runs, k_ids, k_order},
                                       problem.k_len, &problem, &params.slices, &params.by_key));
  MAGI_JAX_RETURN_IF_ERROR(DecodeGradients(k, *dq, *dk, *dv, &params));
  const std::string reason = Path::Refuse(params);
  if (!reason.empty()) return InvalidArgument(reason);
  MAGI_JAX_RETURN_IF_ERROR(
      TakeScratch(scratch, "dv", Path::BackwardScratchBytes(problem), &params.scratch));
  return LaunchError(Path::Run(params, stream));
}

// Operands that all targets begin with, and what they end with.
template <class Binding>
auto BindTable(Binding&& binding) {
  return std::move(binding)
      .template Arg<Operand>()   // ptr
      .template Arg<Operand>()   // runs
      .template Arg<Operand>()   // ids
      .template Arg<Operand>();  // order
}

auto BindForwardOperands() {
  return BindTable(ffi::Ffi::Bind()
                       .Ctx<ffi::PlatformStream<cudaStream_t>>()
                       .Arg<Operand>()    // q
                       .Arg<Operand>()    // k
                       .Arg<Operand>()    // v
                       .Arg<Operand>());  // slices
}

template <class Binding>
auto BindAttributes(Binding&& binding) {
  return std::move(binding)
      .template Attr<float>("scale")
      .template Attr<float>("logits_soft_cap")
      .template Attr<int32_t>("tile_size");
}

auto BindForward() {
  return BindAttributes(BindForwardOperands()
                            .Ret<Operand>()  // out
                            .Ret<Operand>()  // lse
                            .RemainingRets());
}

auto BindForwardAccumulate() {
  return BindAttributes(BindForwardOperands()
                            .Arg<Operand>()  // out_in
                            .Arg<Operand>()  // lse_in
                            .Ret<Operand>()  // out
                            .Ret<Operand>()  // lse
                            .RemainingRets());
}

auto BindBackward() {
  return BindAttributes(BindTable(BindTable(ffi::Ffi::Bind()
                                                .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                                .Arg<Operand>()    // dout
                                                .Arg<Operand>()    // q
                                                .Arg<Operand>()    // k
                                                .Arg<Operand>()    // v
                                                .Arg<Operand>()    // lse
                                                .Arg<Operand>()    // delta
                                                .Arg<Operand>()))  // slices
                            .Ret<Operand>()                        // dq
                            .Ret<Operand>()                        // dk
                            .Ret<Operand>()                        // dv
                            .RemainingRets());
}

constexpr auto kRecordable = {ffi::Traits::kCmdBufferCompatible};

}  // namespace

XLA_FFI_DEFINE_HANDLER(kFfaForwardSm80, Forward<Sm80>, BindForward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaForwardAccumulateSm80, ForwardAccumulate<Sm80>, BindForwardAccumulate(),
                       kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardSm80, Backward<Sm80>, BindBackward(), kRecordable);
#ifdef MAGI_JAX_WITH_SM90
XLA_FFI_DEFINE_HANDLER(kFfaForwardSm90, Forward<Sm90>, BindForward(), kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaForwardAccumulateSm90, ForwardAccumulate<Sm90>, BindForwardAccumulate(),
                       kRecordable);
XLA_FFI_DEFINE_HANDLER(kFfaBackwardSm90, Backward<Sm90>, BindBackward(), kRecordable);
#endif

std::vector<Registration> CudaRegistrations() {
  return {
      {"magi_jax_ffa_forward_sm80", "CUDA", kFfaForwardSm80},
      {"magi_jax_ffa_forward_accumulate_sm80", "CUDA", kFfaForwardAccumulateSm80},
      {"magi_jax_ffa_backward_sm80", "CUDA", kFfaBackwardSm80},
#ifdef MAGI_JAX_WITH_SM90
      {"magi_jax_ffa_forward_sm90", "CUDA", kFfaForwardSm90},
      {"magi_jax_ffa_forward_accumulate_sm90", "CUDA", kFfaForwardAccumulateSm90},
      {"magi_jax_ffa_backward_sm90", "CUDA", kFfaBackwardSm90},
#endif
  };
}

}  // namespace magi_jax
