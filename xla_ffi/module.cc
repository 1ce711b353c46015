// The extension module magi_jax._ffi: the table of custom calls and how the library was built.

#include <pybind11/pybind11.h>

#include "xla/ffi/api/c_api.h"
#include "xla_ffi/common/registration.h"
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
#ifdef MAGI_JAX_WITH_CUDA
  for (const Registration& registration : CudaRegistrations()) all.push_back(registration);
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
  info["ffi_api_version"] = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["jaxlib_version"] = MAGI_JAX_JAXLIB_VERSION;
  info["cpu_kernels"] = cpu::SelectKernels().name;
#ifdef MAGI_JAX_WITH_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_ffi, m) {
  m.doc() = "Custom calls of magi_jax.";
  m.def("registrations", &Registrations, "List of (target, platform, {stage: capsule}).");
  m.def("build_info", &BuildInfo, "Versions that the library was built with, and its parts.");
}

}  // namespace magi_jax
