// The extension module magi_jax._ffi: the table of custom calls and how the library was built.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla_ffi/common/registration.h"
#ifdef MAGI_JAX_WITH_CUDA
#include <cuda_runtime_api.h>

#include "xla_ffi/handlers/group_binding_cuda.h"
#include "xla_ffi/handlers/kernels_cuda.h"
#endif
#include "xla_ffi/kernels/cpu/kernels.h"

namespace magi_jax {
namespace {

namespace py = pybind11;

void AddStage(py::dict& stages, const char* name, XLA_FFI_Handler* handler) {
  if (handler != nullptr) stages[name] = py::capsule(reinterpret_cast<void*>(handler));
}

// A list of (target, platform, {stage: capsule}).
py::list Registrations() {
  std::vector<Registration> all = CpuRegistrations();
  const auto add = [&all](const std::vector<Registration>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  add(GroupCpuRegistrations());
#ifdef MAGI_JAX_WITH_CUDA
  add(CudaRegistrations());
  add(GroupRegistrations());
#endif
  py::list table;
  for (const Registration& registration : all) {
    py::dict stages;
    AddStage(stages, "execute", registration.execute);
    AddStage(stages, "instantiate", registration.instantiate);
    AddStage(stages, "prepare", registration.prepare);
    AddStage(stages, "initialize", registration.initialize);
    table.append(py::make_tuple(registration.target, registration.platform, stages));
  }
  return table;
}

py::dict BuildInfo() {
  py::dict info;
  info["interface"] = kInterface;
  info["ffi_api_version"] = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["jaxlib_version"] = MAGI_JAX_JAXLIB_VERSION;
  info["cpu_kernels"] = cpu::SelectKernels().name;
#ifdef MAGI_JAX_WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["cuda_architectures"] = MAGI_JAX_CUDA_BUILT_FOR;
#else
  info["cuda"] = false;
#endif
  return info;
}

#ifdef MAGI_JAX_WITH_CUDA
// (description, refusal, scratch bytes), one of the texts empty. Extents and dtypes as in
// `Problem`, dtypes by name. `further` asks for row_max of a forward call, for dq in the dtype of q
// of a backward call.
py::tuple ChooseCudaKernel(const std::string& path, bool backward, const std::string& dtype,
                           const std::string& out_dtype, const std::vector<int32_t>& extents,
                           float logits_soft_cap, bool further) {
  const auto decode = [](const std::string& name) {
    if (name == "float32") return DType::kF32;
    if (name == "float16") return DType::kF16;
    if (name == "bfloat16") return DType::kBF16;
    throw py::value_error("dtype must be float32, float16 or bfloat16, got " + name);
  };
  if (extents.size() != 7) throw py::value_error("extents must be (T, S, N, K, H, Hv, tile_size)");
  Problem problem = {};
  problem.q_len = extents[0];
  problem.k_len = extents[1];
  problem.num_heads = extents[2];
  problem.num_kv_heads = extents[3];
  problem.head_dim = extents[4];
  problem.v_head_dim = extents[5];
  problem.tile_size = extents[6];
  problem.scale = 1.0f;  // any positive one is served alike
  problem.logits_soft_cap = logits_soft_cap;
  problem.dtype = decode(dtype);
  const auto choose = backward ? ChooseBackward : ChooseForward;
  const KernelChoice choice = choose(path, problem, decode(out_dtype), further);
  return py::make_tuple(choice.description, choice.refusal, choice.scratch_bytes);
}
#endif

}  // namespace

PYBIND11_MODULE(_ffi, m) {
  m.doc() = "Custom calls of magi_jax.";
  m.def("registrations", &Registrations, "List of (target, platform, {stage: capsule}).");
  m.def("build_info", &BuildInfo, "Versions that the library was built with, and its parts.");
#ifdef MAGI_JAX_WITH_CUDA
  m.def(
      "choose_cuda_kernel", &ChooseCudaKernel,
      "(description, refusal, scratch bytes) of a path for (T, S, N, K, H, Hv, tile_size); one of "
      "the texts is empty.");
  BindGroup(m);
#endif
}

}  // namespace magi_jax
