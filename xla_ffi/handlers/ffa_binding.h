// Operands, results and attributes of the attention targets, in their order. A platform puts its
// context in front, and behind the results whatever else it needs.

#ifndef MAGI_JAX_XLA_FFI_HANDLERS_FFA_BINDING_H_
#define MAGI_JAX_XLA_FFI_HANDLERS_FFA_BINDING_H_

#include <cstdint>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace magi_jax {

namespace ffi = xla::ffi;

using Operand = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <class Binding>
auto BindWalk(Binding&& binding) {
  return std::move(binding)
      .template Arg<Operand>()   // ptr
      .template Arg<Operand>()   // runs
      .template Arg<Operand>()   // ids
      .template Arg<Operand>();  // order
}

template <class Binding>
auto BindForwardOperands(Binding&& binding) {
  return BindWalk(std::move(binding)
                      .template Arg<Operand>()    // q
                      .template Arg<Operand>()    // k
                      .template Arg<Operand>()    // v
                      .template Arg<Operand>());  // slices
}

template <class Binding>
auto BindForwardAccumulateOperands(Binding&& binding) {
  return BindForwardOperands(std::move(binding))
      .template Arg<Operand>()   // out_in
      .template Arg<Operand>();  // lse_in
}

template <class Binding>
auto BindForwardResults(Binding&& binding) {
  return std::move(binding)
      .template Ret<Operand>()   // out
      .template Ret<Operand>()   // lse
      .template Ret<Operand>();  // row_max
}

template <class Binding>
auto BindBackwardOperands(Binding&& binding) {
  return BindWalk(BindWalk(std::move(binding)
                               .template Arg<Operand>()     // dout
                               .template Arg<Operand>()     // q
                               .template Arg<Operand>()     // k
                               .template Arg<Operand>()     // v
                               .template Arg<Operand>()     // lse
                               .template Arg<Operand>()     // delta
                               .template Arg<Operand>()));  // slices
}

template <class Binding>
auto BindBackwardAccumulateOperands(Binding&& binding) {
  return BindBackwardOperands(std::move(binding)).template Arg<Operand>();  // dq_in
}

template <class Binding>
auto BindGradients(Binding&& binding) {
  return std::move(binding)
      .template Ret<Operand>()   // dq
      .template Ret<Operand>()   // dk
      .template Ret<Operand>();  // dv
}

template <class Binding>
auto BindAttributes(Binding&& binding) {
  return std::move(binding)
      .template Attr<float>("scale")
      .template Attr<float>("logits_soft_cap")
      .template Attr<int32_t>("tile_size");
}

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_HANDLERS_FFA_BINDING_H_
