// Set-up of symmetric memory from Python; see magi_jax/comm/symmetric.py.

#include "xla_ffi/handlers/group_binding_cuda.h"

#include <pybind11/stl.h>

#include "xla_ffi/comm/pool.h"

namespace magi_jax {
namespace {

namespace py = pybind11;

void ThrowIfError(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

std::shared_ptr<comm::Member> FindMember(int32_t pool, int32_t device) {
  auto member = comm::Pools::Get().Find(pool, device);
  if (member != nullptr) return member;
  throw py::value_error("symmetric memory " + std::to_string(pool) + " has no part on device " +
                        std::to_string(device));
}

void AddMember(int32_t pool, int32_t device, int32_t rank, int32_t cp_size, int64_t staging_bytes,
               double timeout_s, int32_t num_blocks, uintptr_t memory) {
  ThrowIfError(comm::Pools::Get().Add({pool, device, rank, cp_size, staging_bytes,
                                       static_cast<int64_t>(timeout_s * 1e9), num_blocks,
                                       reinterpret_cast<void*>(memory)}));
}

py::bytes Export(int32_t pool, int32_t device) {
  std::string error;
  const std::string handle = FindMember(pool, device)->Export(&error);
  ThrowIfError(error);
  return py::bytes(handle);
}

void ConnectLocal(int32_t pool, int32_t device, int32_t peer_rank, int32_t peer_device) {
  const auto peer = FindMember(pool, peer_device);
  ThrowIfError(FindMember(pool, device)->ConnectLocal(peer_rank, peer_device, peer->memory()));
}

void ConnectExported(int32_t pool, int32_t device, int32_t peer_rank, const std::string& handle) {
  ThrowIfError(FindMember(pool, device)->ConnectExported(peer_rank, handle));
}

void ConnectMapped(int32_t pool, int32_t device, int32_t peer_rank, uintptr_t memory) {
  FindMember(pool, device)->ConnectMapped(peer_rank, reinterpret_cast<void*>(memory));
}

void FinishConnecting(int32_t pool, int32_t device) {
  ThrowIfError(FindMember(pool, device)->FinishConnecting());
}

int64_t AllocatedBytes(int32_t pool, int32_t device) {
  return FindMember(pool, device)->allocated_bytes();
}

}  // namespace

void BindGroup(py::module_& m) {
  m.def("next_pool", [] { return comm::Pools::Get().NextNumber(); }, "A number not given before.");
  m.def("add_member", &AddMember,
        "Makes one device's part of a pool, in memory of its own (0) or given.", py::arg("pool"),
        py::arg("device"), py::arg("rank"), py::arg("cp_size"), py::arg("staging_bytes"),
        py::arg("timeout_s"), py::arg("num_blocks"), py::arg("memory") = 0);
  m.def("member_bytes", &comm::MemberBytes, "Device memory that a part needs.");
  m.def("export_member", &Export, "Bytes with which another process opens the part.");
  m.def("connect_local", &ConnectLocal, "Tells a part of a peer in this process.");
  m.def("connect_exported", &ConnectExported, "Tells a part of a peer in another process.");
  m.def("connect_mapped", &ConnectMapped, "Tells a part of a peer whose memory is mapped here.");
  m.def("finish_connecting", &FinishConnecting, "Gives the table of peers to the device.");
  m.def("allocated_bytes", &AllocatedBytes, "Device memory of one part.");
  m.def("pool_failure", &comm::PoolFailure, "What went wrong, or an empty string.");
  m.def(
      "remove_pool", [](int32_t pool) { comm::Pools::Get().Remove(pool); },
      py::call_guard<py::gil_scoped_release>(), "Frees a pool when its devices are idle.");
}

}  // namespace magi_jax
