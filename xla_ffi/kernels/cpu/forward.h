// Forward pass of one query tile and one head: blockwise online softmax with queries in the lanes.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_FORWARD_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_FORWARD_H_

#include "xla_ffi/kernels/cpu/gemm.h"
#include "xla_ffi/kernels/cpu/walk.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

// Running softmax of one panel of queries; [kPanel] each.
struct Softmax {
  float *max, *top, *sum;
};

struct ForwardScratch {
  float* q;          // [panels, H, kPanel]
  float* out;        // [panels, Hv, kPanel], not yet divided by sum
  float* max;        // [panels, kPanel], base 2, of everything merged so far
  float* top;        // [panels, kPanel], base 2, of the keys of this call
  float* sum;        // [panels, kPanel]
  float* k;          // [kBlockRows, RowStride(H)]
  float* v;          // [kBlockRows, RowStride(Hv)]
  float* weights;    // [kBlockRows, kPanel]
  int32_t* visible;  // [kBlockRows, kPanel]

  static ForwardScratch Carve(const Problem& problem, Arena& arena) {
    const int64_t lanes = int64_t{MaxPanels(problem)} * kPanel;
    return {arena.Floats(lanes * problem.head_dim),
            arena.Floats(lanes * problem.v_head_dim),
            arena.Floats(lanes),
            arena.Floats(lanes),
            arena.Floats(lanes),
            arena.Floats(int64_t{kBlockRows} * RowStride(problem.head_dim)),
            arena.Floats(int64_t{kBlockRows} * RowStride(problem.v_head_dim)),
            arena.Floats(kBlockRows * kPanel),
            arena.Ints(kBlockRows * kPanel)};
  }

  Softmax SoftmaxOf(int32_t panel) const {
    const int32_t first = panel * kPanel;
    return {max + first, top + first, sum + first};
  }
};

static int64_t ForwardScratchFloats(const Problem& problem) {
  Arena arena(nullptr);
  ForwardScratch::Carve(problem, arena);
  return arena.used();
}

// Starts from nothing, or from what other calls gave.
static void StartRows(const ForwardParams& params, const Tile& tile, int32_t head,
                      const ForwardScratch& s) {
  const Problem& problem = params.problem;
  if (params.accumulates) {
    CopyTransposed({params.out, params.out_dtype, problem.num_heads, head, problem.v_head_dim},
                   tile.rows.begin, tile.size(), s.out);
  } else {
    memset(s.out, 0, sizeof(float) * tile.panels * problem.v_head_dim * kPanel);
  }
  for (int32_t i = 0; i < tile.panels * kPanel; ++i) {
    const bool has_part = params.accumulates && i < tile.size();
    const int64_t row = int64_t{tile.rows.begin} + i;
    const float lse = has_part ? params.lse[row * problem.num_heads + head] : -kInfinity;
    s.max[i] = lse * kLog2E;
    s.top[i] = -kInfinity;
    s.sum[i] = lse == -kInfinity ? 0.0f : 1.0f;
  }
}

// Turns raw products into softmax weights relative to the new maximum, and rescales what was summed
// before.
static void UpdateSoftmax(const Logits& logits, const int32_t* visible, int32_t rows, int32_t v_dim,
                          float* weights, const Softmax& state, float* out) {
  Vec old_max[2], new_max[2], top[2], shift[2], total[2];
  for (int j = 0; j < 2; ++j) {
    old_max[j] = Load(state.max + j * kLanes);
    top[j] = Load(state.top + j * kLanes);
  }
  for (int32_t w = 0; w < rows; ++w) {
    for (int j = 0; j < 2; ++j) {
      const int64_t cell = int64_t{w} * kPanel + j * kLanes;
      Vec x = logits(Load(weights + cell));
      if (visible != nullptr) x = Select(LoadInt(visible + cell), x, Broadcast(-kInfinity));
      top[j] = Max(top[j], x);
      Store(weights + cell, x);
    }
  }
  for (int j = 0; j < 2; ++j) {
    Store(state.top + j * kLanes, top[j]);
    new_max[j] = Max(old_max[j], top[j]);
    // A lane that has seen nothing yet has the maximum -inf; any finite shift gives it weights of
    // zero.
    shift[j] = Select(new_max[j] == -kInfinity, Vec{}, new_max[j]);
    total[j] = Vec{};
  }
  for (int32_t w = 0; w < rows; ++w) {
    for (int j = 0; j < 2; ++j) {
      const int64_t cell = int64_t{w} * kPanel + j * kLanes;
      const Vec weight = Exp2(Load(weights + cell) - shift[j]);
      total[j] += weight;
      Store(weights + cell, weight);
    }
  }
  for (int j = 0; j < 2; ++j) {
    const Vec rescale = Exp2(old_max[j] - shift[j]);
    Store(state.max + j * kLanes, new_max[j]);
    Store(state.sum + j * kLanes, Load(state.sum + j * kLanes) * rescale + total[j]);
    for (int32_t i = 0; i < v_dim; ++i) {
      float* cell = out + int64_t{i} * kPanel + j * kLanes;
      Store(cell, Load(cell) * rescale);
    }
  }
}

static void ForwardBlock(const Problem& problem, const Logits& logits, const Tile& tile,
                         const Block& block, bool v_is_finite, const ForwardScratch& s) {
  const int32_t k_stride = RowStride(problem.head_dim), v_stride = RowStride(problem.v_head_dim);
  for (int32_t panel = 0; panel < tile.panels; ++panel) {
    const Interval lanes = tile.Panel(panel);
    const Interval part =
        block.is_full ? block.walk : PanelReach<Lanes::kQueries>(block.mask, lanes);
    if (IsEmpty(part)) continue;
    const int32_t rows = part.end - part.begin, skipped = part.begin - block.walk.begin;
    const float* q = s.q + int64_t{panel} * problem.head_dim * kPanel;
    float* out = s.out + int64_t{panel} * problem.v_head_dim * kPanel;
    Gemm<Order::kRows, Into::kFresh>(rows, problem.head_dim,
                                     {s.k + int64_t{skipped} * k_stride, k_stride}, {q, kPanel},
                                     s.weights, kPanel);
    if (!block.is_full) FillVisible<Lanes::kQueries>(block.mask, lanes, part, s.visible);
    UpdateSoftmax(logits, block.is_full ? nullptr : s.visible, rows, problem.v_head_dim, s.weights,
                  s.SoftmaxOf(panel), out);
    const Matrix v = {s.v + int64_t{skipped} * v_stride, v_stride};
    if (block.is_full || v_is_finite) {
      Gemm<Order::kColumns, Into::kSum>(problem.v_head_dim, rows, v, {s.weights, kPanel}, out,
                                        kPanel);
    } else {
      GemmWhereNonzero(problem.v_head_dim, rows, v, {s.weights, kPanel}, out, kPanel);
    }
  }
}

static void ForwardTile(const ForwardParams& params, int32_t tile_index, int32_t head,
                        float* scratch) {
  const Problem& problem = params.problem;
  const int32_t* const runs = params.by_query.ptr + tile_index;
  const bool keeps = params.accumulates && runs[0] >= runs[1];
  if (keeps && params.row_max == nullptr) return;
  Arena arena(scratch);
  const ForwardScratch s = ForwardScratch::Carve(problem, arena);
  const Tile tile = TileOf(tile_index, problem.tile_size, problem.q_len);
  const int32_t kv_heads = problem.num_kv_heads, kv_head = head / (problem.num_heads / kv_heads);
  const HeadRows q = {params.q, problem.dtype, problem.num_heads, head, problem.head_dim};
  const HeadRows k = {params.k, problem.dtype, kv_heads, kv_head, problem.head_dim};
  const HeadRows v = {params.v, problem.dtype, kv_heads, kv_head, problem.v_head_dim};
  const Logits logits(problem);

  StartRows(params, tile, head, s);
  CopyTransposed(q, tile.rows.begin, tile.size(), s.q);
  ForEachBlock<Lanes::kQueries>(params.slices, params.by_query, tile_index, tile,
                                [&](const Block& block) {
                                  const int32_t rows = block.walk.end - block.walk.begin;
                                  CopyRows(k, block.walk.begin, rows, s.k);
                                  const bool v_is_finite = CopyRows(v, block.walk.begin, rows, s.v);
                                  ForwardBlock(problem, logits, tile, block, v_is_finite, s);
                                });

  for (int32_t i = 0; i < tile.size(); ++i) {
    const int64_t row = int64_t{tile.rows.begin} + i;
    const bool sees_nothing = s.sum[i] == 0.0f;
    params.lse[row * problem.num_heads + head] =
        sees_nothing ? -kInfinity : s.max[i] * kLn2 + __builtin_logf(s.sum[i]);
    if (params.row_max != nullptr) params.row_max[row * problem.num_heads + head] = s.top[i] * kLn2;
    s.sum[i] = sees_nothing ? 0.0f : 1.0f / s.sum[i];
  }
  WriteTransposed(s.out, s.sum,
                  {nullptr, params.out_dtype, problem.num_heads, head, problem.v_head_dim},
                  tile.rows.begin, tile.size(), params.out);
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_FORWARD_H_
