// dQ of one query tile and one head, with queries in the lanes: the second of two walks, for when
// there are too few kv heads to give every thread its own.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_QUERY_WALK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_QUERY_WALK_H_

#include "xla_ffi/kernels/cpu/gemm.h"
#include "xla_ffi/kernels/cpu/gradients.h"
#include "xla_ffi/kernels/cpu/walk.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

struct QueryWalkScratch {
  float* q;                  // [panels, H, kPanel]
  float* dout;               // [panels, Hv, kPanel]
  float* dq;                 // [panels, H, kPanel]
  float* factors;            // [panels, kPanel], all 1
  RowStatistics statistics;  // [panels, kPanel] each
  float* k;                  // [kBlockRows, RowStride(H)]
  float* v;                  // [kBlockRows, RowStride(Hv)]
  float* weights;            // [kBlockRows, kPanel]
  float* gradients;          // [kBlockRows, kPanel]
  int32_t* visible;          // [kBlockRows, kPanel]

  static QueryWalkScratch Carve(const Problem& problem, Arena& arena) {
    const int64_t lanes = int64_t{MaxPanels(problem)} * kPanel;
    return {arena.Floats(lanes * problem.head_dim),
            arena.Floats(lanes * problem.v_head_dim),
            arena.Floats(lanes * problem.head_dim),
            arena.Floats(lanes),
            {arena.Floats(lanes), arena.Floats(lanes)},
            arena.Floats(int64_t{kBlockRows} * RowStride(problem.head_dim)),
            arena.Floats(int64_t{kBlockRows} * RowStride(problem.v_head_dim)),
            arena.Floats(kBlockRows * kPanel),
            arena.Floats(kBlockRows * kPanel),
            arena.Ints(kBlockRows * kPanel)};
  }
};

static int64_t QueryWalkScratchFloats(const Problem& problem) {
  Arena arena(nullptr);
  QueryWalkScratch::Carve(problem, arena);
  return arena.used();
}

static void QueryWalkBlock(const Problem& problem, const Logits& logits, const Tile& tile,
                           const Block& block, bool k_is_finite, const QueryWalkScratch& s) {
  const int32_t head_dim = problem.head_dim, v_head_dim = problem.v_head_dim;
  const int32_t k_stride = RowStride(head_dim), v_stride = RowStride(v_head_dim);
  for (int32_t panel = 0; panel < tile.panels; ++panel) {
    const Interval lanes = tile.Panel(panel);
    const Interval part =
        block.is_full ? block.walk : PanelReach<Lanes::kQueries>(block.mask, lanes);
    if (IsEmpty(part)) continue;
    const int32_t rows = part.end - part.begin;
    const int64_t skipped = part.begin - block.walk.begin;
    const Matrix k = {s.k + skipped * k_stride, k_stride};
    const Matrix v = {s.v + skipped * v_stride, v_stride};
    const int64_t first_lane = int64_t{panel} * kPanel;
    Gemm<Order::kRows, Into::kFresh>(rows, head_dim, k, {s.q + first_lane * head_dim, kPanel},
                                     s.weights, kPanel);
    Gemm<Order::kRows, Into::kFresh>(
        rows, v_head_dim, v, {s.dout + first_lane * v_head_dim, kPanel}, s.gradients, kPanel);
    if (!block.is_full) FillVisible<Lanes::kQueries>(block.mask, lanes, part, s.visible);
    const PanelCells cells = {s.weights, s.gradients, kPanel, rows,
                              block.is_full ? nullptr : s.visible};
    PanelGradients<Lanes::kQueries>(
        logits, cells, {s.statistics.lse + first_lane, s.statistics.delta + first_lane});
    float* dq = s.dq + first_lane * head_dim;
    if (block.is_full || k_is_finite) {
      Gemm<Order::kColumns, Into::kSum>(head_dim, rows, k, {s.gradients, kPanel}, dq, kPanel);
    } else {
      GemmWhereNonzero(head_dim, rows, k, {s.gradients, kPanel}, dq, kPanel);
    }
  }
}

static void QueryWalkTile(const BackwardParams& params, int32_t tile_index, int32_t head,
                          float* scratch) {
  const Problem& problem = params.problem;
  Arena arena(scratch);
  const QueryWalkScratch s = QueryWalkScratch::Carve(problem, arena);
  const Tile tile = TileOf(tile_index, problem.tile_size, problem.q_len);
  const int32_t heads = problem.num_heads, kv_heads = problem.num_kv_heads;
  const int32_t kv_head = head / (heads / kv_heads);
  const HeadRows q = {params.q, problem.dtype, heads, head, problem.head_dim};
  const HeadRows dout = {params.dout, problem.dtype, heads, head, problem.v_head_dim};
  const HeadRows k = {params.k, problem.dtype, kv_heads, kv_head, problem.head_dim};
  const HeadRows v = {params.v, problem.dtype, kv_heads, kv_head, problem.v_head_dim};
  const Logits logits(problem);

  CopyTransposed(q, tile.rows.begin, tile.size(), s.q);
  CopyTransposed(dout, tile.rows.begin, tile.size(), s.dout);
  LoadStatistics(params, head, tile.rows, s.statistics);
  for (int32_t i = 0; i < tile.panels * kPanel; ++i) {
    s.factors[i] = 1.0f;
    if (i >= tile.size()) s.statistics.lse[i] = kInfinity, s.statistics.delta[i] = 0.0f;
  }
  const int64_t count = int64_t{tile.panels} * problem.head_dim * kPanel;
  memset(s.dq, 0, sizeof(float) * count);
  ForEachBlock<Lanes::kQueries>(params.slices, params.by_query, tile_index, tile,
                                [&](const Block& block) {
                                  const int32_t rows = block.walk.end - block.walk.begin;
                                  const bool k_is_finite = CopyRows(k, block.walk.begin, rows, s.k);
                                  CopyRows(v, block.walk.begin, rows, s.v);
                                  QueryWalkBlock(problem, logits, tile, block, k_is_finite, s);
                                });
  for (int64_t i = 0; i < count; ++i) s.dq[i] *= problem.scale;
  const HeadRows dq = {params.dq, DType::kF32, heads, head, problem.head_dim};
  if (params.accumulate) {  // `q` is done with
    CopyTransposed(dq, tile.rows.begin, tile.size(), s.q);
    for (int64_t i = 0; i < count; ++i) s.dq[i] += s.q[i];
  }
  WriteTransposed(s.dq, s.factors, dq, tile.rows.begin, tile.size(), params.dq);
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_QUERY_WALK_H_
