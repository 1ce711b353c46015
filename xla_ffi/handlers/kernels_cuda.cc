#include "xla_ffi/handlers/kernels_cuda.h"

#include "xla_ffi/kernels/sm80/kernels.h"
#ifdef MAGI_JAX_WITH_SM90
#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/forward.h"
#endif

namespace magi_jax {
namespace {

KernelChoice Refused(std::string reason) { return {"", std::move(reason), 0}; }

KernelChoice NoPath(const std::string& path, const char* direction) {
  return Refused("this build has no " + std::string(direction) + " kernel of path '" + path + "'");
}

}  // namespace

KernelChoice ChooseForward(const std::string& path, const Problem& problem, DType out_dtype,
                           bool row_max) {
  if (path == "sm80") {
    const std::string reason = sm80::Refuse(problem);
    return reason.empty() ? KernelChoice{sm80::DescribeForward(problem), "", 0} : Refused(reason);
  }
#ifdef MAGI_JAX_WITH_SM90
  if (path == "sm90") {
    ForwardParams params = {};
    params.problem = problem;
    params.out_dtype = out_dtype;
    float wanted;
    params.row_max = row_max ? &wanted : nullptr;
    const char* reason = sm90::RefuseForward(params);
    if (reason != nullptr) return Refused(reason);
    char text[256];
    sm90::DescribeForward(problem, text, sizeof(text));
    return {text, "", sm90::ForwardScratchBytes(problem)};
  }
#endif
  (void)out_dtype;
  (void)row_max;
  return NoPath(path, "forward");
}

KernelChoice ChooseBackward(const std::string& path, const Problem& problem, DType dkv_dtype,
                            bool rounds_dq) {
  if (path == "sm80") {
    const std::string reason = sm80::Refuse(problem);
    return reason.empty() ? KernelChoice{sm80::DescribeBackward(problem), "", 0} : Refused(reason);
  }
#ifdef MAGI_JAX_WITH_SM90
  if (const bool ordered = path == "sm90_ordered"; ordered || path == "sm90") {
    BackwardParams params = {};
    params.problem = problem;
    params.dkv_dtype = dkv_dtype;
    const char* reason = sm90::RefuseBackward(params);
    if (reason != nullptr) return Refused(reason);
    char text[256];
    sm90::DescribeBackward(problem, ordered, text, sizeof(text));
    return {text + std::string(ordered ? ", in a fixed order of sums" : ""), "",
            sm90::BackwardScratchBytes(problem, dkv_dtype, ordered, rounds_dq)};
  }
#endif
  (void)dkv_dtype;
  (void)rounds_dq;
  return NoPath(path, "backward");
}

}  // namespace magi_jax
