// From raw products of one panel to softmax weights and gradients of the raw products.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_GRADIENTS_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_GRADIENTS_H_

#include "xla_ffi/kernels/cpu/walk.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

// Statistics of query rows: lse in base 2 with +inf for rows that see nothing (their weights become
// zero), and delta.
struct RowStatistics {
  float* lse;
  float* delta;
};

static void LoadStatistics(const BackwardParams& params, int32_t head, Interval rows,
                           RowStatistics out) {
  const int32_t heads = params.problem.num_heads;
  for (int32_t i = 0; i < rows.end - rows.begin; ++i) {
    const int64_t source = (int64_t{rows.begin} + i) * heads + head;
    const float lse = params.lse[source];
    out.lse[i] = lse == -kInfinity ? kInfinity : lse * kLog2E;
    out.delta[i] = params.delta[source];
  }
}

// A panel of a block: `rows` walk positions by kPanel lanes, with the given stride between rows.
struct PanelCells {
  float* weights;    // in: q.k; out: softmax weights
  float* gradients;  // in: dout.v; out: gradients of q.k, before the factor `scale`
  int64_t stride;
  int32_t rows;
  const int32_t* visible;  // [rows, kPanel], or null when all are
};

// `statistics` starts at the panel's first lane when queries are the lanes, else at its first row.
template <Lanes kLanesAre>
static void PanelGradients(const Logits& logits, const PanelCells& cells,
                           RowStatistics statistics) {
  const bool capped = logits.cap_log2 > 0.0f;
  const float inverse_cap = capped ? 1.0f / logits.cap_log2 : 0.0f;
  for (int32_t w = 0; w < cells.rows; ++w) {
    for (int j = 0; j < 2; ++j) {
      const int64_t cell = w * cells.stride + j * kLanes;
      Vec lse, delta;
      if constexpr (kLanesAre == Lanes::kQueries) {
        lse = Load(statistics.lse + j * kLanes);
        delta = Load(statistics.delta + j * kLanes);
      } else {
        lse = Broadcast(statistics.lse[w]);
        delta = Broadcast(statistics.delta[w]);
      }
      const Vec x = logits(Load(cells.weights + cell));
      Vec weight = Exp2(x - lse);
      Vec gradient = weight * (Load(cells.gradients + cell) - delta);
      if (capped) {
        const Vec t = x * inverse_cap;  // tanh: its derivative is 1 - t^2
        gradient *= 1.0f - t * t;
      }
      if (cells.visible != nullptr) {
        const IntVec visible = LoadInt(cells.visible + int64_t{w} * kPanel + j * kLanes);
        weight = Select(visible, weight, Vec{});
        gradient = Select(visible, gradient, Vec{});
      }
      Store(cells.weights + cell, weight);
      Store(cells.gradients + cell, gradient);
    }
  }
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_GRADIENTS_H_
