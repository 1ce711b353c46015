// dK and dV of one key tile and one kv head, with keys in the lanes, over all query heads that read
// it. dQ comes from the same weights when asked for, as a sum over key tiles.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_CPU_KEY_WALK_H_
#define MAGI_JAX_XLA_FFI_KERNELS_CPU_KEY_WALK_H_

#include "xla_ffi/kernels/cpu/gemm.h"
#include "xla_ffi/kernels/cpu/gradients.h"
#include "xla_ffi/kernels/cpu/walk.h"

namespace magi_jax::cpu::MAGI_JAX_ISA {

struct KeyWalkScratch {
  float* k;                  // [panels, H, kPanel]
  float* v;                  // [panels, Hv, kPanel]
  float* dk;                 // [panels, H, kPanel]
  float* dv;                 // [panels, Hv, kPanel]
  float* factors;            // [panels, kPanel]
  float* k_rows;             // [tile_size, RowStride(H)]
  RowStatistics statistics;  // [kBlockRows] each
  float* q;                  // [kBlockRows, RowStride(H)]
  float* dout;               // [kBlockRows, RowStride(Hv)]
  float* dq;                 // [kBlockRows, RowStride(H)]
  float* weights;            // [kBlockRows, RowStride(panels * kPanel)]
  float* gradients;          // [kBlockRows, RowStride(panels * kPanel)]
  int32_t* visible;          // [kBlockRows, kPanel]

  static KeyWalkScratch Carve(const Problem& problem, Arena& arena) {
    const int64_t lanes = int64_t{MaxPanels(problem)} * kPanel, rows = kBlockRows;
    const int64_t stride = RowStride(problem.head_dim), v_stride = RowStride(problem.v_head_dim);
    const int64_t cell_stride = RowStride(static_cast<int32_t>(lanes));
    return {arena.Floats(lanes * problem.head_dim),
            arena.Floats(lanes * problem.v_head_dim),
            arena.Floats(lanes * problem.head_dim),
            arena.Floats(lanes * problem.v_head_dim),
            arena.Floats(lanes),
            arena.Floats(problem.tile_size * stride),
            {arena.Floats(rows), arena.Floats(rows)},
            arena.Floats(rows * stride),
            arena.Floats(rows * v_stride),
            arena.Floats(rows * stride),
            arena.Floats(rows * cell_stride),
            arena.Floats(rows * cell_stride),
            arena.Ints(rows * kPanel)};
  }
};

static int64_t KeyWalkScratchFloats(const Problem& problem) {
  Arena arena(nullptr);
  KeyWalkScratch::Carve(problem, arena);
  return arena.used();
}

// What a block's copies contain.
struct Finite {
  bool k, q, dout;
};

// Weights and gradients of a panel, and its dK and dV. Returns the rows of the block that see the
// panel.
static Interval KeyWalkPanel(const Problem& problem, const Logits& logits, const Tile& tile,
                             const Block& block, int32_t panel, Finite finite,
                             const KeyWalkScratch& s) {
  const int32_t head_dim = problem.head_dim, v_head_dim = problem.v_head_dim;
  const int64_t q_stride = RowStride(head_dim), v_stride = RowStride(v_head_dim);
  const int64_t cell_stride = RowStride(MaxPanels(problem) * kPanel);
  const Interval lanes = tile.Panel(panel);
  const Interval part = block.is_full ? block.walk : PanelReach<Lanes::kKeys>(block.mask, lanes);
  if (IsEmpty(part)) return part;

  const int32_t rows = part.end - part.begin;
  const int64_t skipped = part.begin - block.walk.begin, first_lane = int64_t{panel} * kPanel;
  const Matrix q = {s.q + skipped * q_stride, q_stride};
  const Matrix dout = {s.dout + skipped * v_stride, v_stride};
  const PanelCells cells = {s.weights + skipped * cell_stride + first_lane,
                            s.gradients + skipped * cell_stride + first_lane, cell_stride, rows,
                            block.is_full ? nullptr : s.visible};
  Gemm<Order::kRows, Into::kFresh>(rows, head_dim, q, {s.k + first_lane * head_dim, kPanel},
                                   cells.weights, cell_stride);
  Gemm<Order::kRows, Into::kFresh>(rows, v_head_dim, dout, {s.v + first_lane * v_head_dim, kPanel},
                                   cells.gradients, cell_stride);
  if (!block.is_full) FillVisible<Lanes::kKeys>(block.mask, lanes, part, s.visible);
  PanelGradients<Lanes::kKeys>(logits, cells,
                               {s.statistics.lse + skipped, s.statistics.delta + skipped});

  float* dv = s.dv + first_lane * v_head_dim;
  float* dk = s.dk + first_lane * head_dim;
  const Matrix weights = {cells.weights, cell_stride}, gradients = {cells.gradients, cell_stride};
  if (block.is_full || finite.dout) {
    Gemm<Order::kColumns, Into::kSum>(v_head_dim, rows, dout, weights, dv, kPanel);
  } else {
    GemmWhereNonzero(v_head_dim, rows, dout, weights, dv, kPanel);
  }
  if (block.is_full || finite.q) {
    Gemm<Order::kColumns, Into::kSum>(head_dim, rows, q, gradients, dk, kPanel);
  } else {
    GemmWhereNonzero(head_dim, rows, q, gradients, dk, kPanel);
  }
  return part;
}

// dQ of up to kGemmRows rows of a block from keys [keys.begin, keys.end) of the tile, without
// `scale`.
static void GroupDq(const Problem& problem, int32_t first, int32_t rows, Interval keys, bool exact,
                    const KeyWalkScratch& s) {
  const int32_t stride = RowStride(problem.head_dim);
  const int64_t cell_stride = RowStride(MaxPanels(problem) * kPanel);
  const float* gradients = s.gradients + first * cell_stride + keys.begin;
  for (int32_t column = 0; column < problem.head_dim; column += kPanel) {
    const float* k = s.k_rows + int64_t{keys.begin} * stride + column;
    float* dq = s.dq + int64_t{first} * stride + column;
    if (exact) {
      Gemm<Order::kRows, Into::kFresh>(rows, keys.end - keys.begin, {gradients, cell_stride},
                                       {k, stride}, dq, stride);
      continue;
    }
    for (int32_t r = 0; r < rows; ++r) {  // K has infinities or NaN: only visible keys may count
      memset(dq + int64_t{r} * stride, 0, sizeof(float) * kPanel);
      for (int32_t key = 0; key < keys.end - keys.begin; ++key) {
        const float g = gradients[r * cell_stride + key];
        if (g == 0.0f) continue;
        for (int32_t i = 0; i < kPanel; ++i) dq[r * stride + i] += g * k[int64_t{key} * stride + i];
      }
    }
  }
}

// Adds a block's part to dQ in memory. `reach[panel]` are the rows that see a panel's keys.
static void AddDq(const BackwardParams& params, const Tile& tile, const Block& block, int32_t head,
                  const Interval* reach, bool k_is_finite, const KeyWalkScratch& s) {
  const Problem& problem = params.problem;
  const int32_t stride = RowStride(problem.head_dim);
  const int32_t block_rows = block.walk.end - block.walk.begin;
  const HeadRows target = {nullptr, DType::kF32, problem.num_heads, head, problem.head_dim};
  for (int32_t first = 0; first < block_rows; first += kGemmRows) {
    const int32_t rows = MinInt(kGemmRows, block_rows - first);
    const int32_t begin = block.walk.begin + first;
    Interval panels = {tile.panels, 0};
    for (int32_t panel = 0; panel < tile.panels; ++panel) {
      if (IsEmpty(Intersect(reach[panel], {begin, begin + rows}))) continue;
      panels = {MinInt(panels.begin, panel), panel + 1};
    }
    if (IsEmpty(panels)) continue;
    const Interval keys = {panels.begin * kPanel, MinInt(panels.end * kPanel, tile.size())};
    GroupDq(problem, first, rows, keys, block.is_full || k_is_finite, s);
    for (int32_t r = 0; r < rows; ++r) {
      const float* from = s.dq + int64_t{first + r} * stride;
      float* to = params.dq + RowOffset(target, begin + r);
      for (int32_t i = 0; i < problem.head_dim; ++i) to[i] += from[i] * problem.scale;
    }
  }
}

static void KeyWalkBlock(const BackwardParams& params, const Logits& logits, const Tile& tile,
                         const Block& block, int32_t head, bool k_is_finite, bool add_dq,
                         const KeyWalkScratch& s) {
  const Problem& problem = params.problem;
  const int32_t rows = block.walk.end - block.walk.begin;
  const HeadRows q = {params.q, problem.dtype, problem.num_heads, head, problem.head_dim};
  const HeadRows dout = {params.dout, problem.dtype, problem.num_heads, head, problem.v_head_dim};
  Finite finite;
  finite.k = k_is_finite;
  finite.q = CopyRows(q, block.walk.begin, rows, s.q);
  finite.dout = CopyRows(dout, block.walk.begin, rows, s.dout);
  LoadStatistics(params, head, block.walk, s.statistics);
  if (!block.is_full && add_dq) {  // cells that no panel reaches count as zero for dQ
    const int64_t cell_stride = RowStride(MaxPanels(problem) * kPanel);
    memset(s.gradients, 0, sizeof(float) * rows * cell_stride);
  }
  Interval reach[kMaxTilePanels];
  for (int32_t panel = 0; panel < tile.panels; ++panel) {
    reach[panel] = KeyWalkPanel(problem, logits, tile, block, panel, finite, s);
  }
  if (add_dq) AddDq(params, tile, block, head, reach, k_is_finite, s);
}

static void KeyWalkTile(const BackwardParams& params, int32_t tile_index, int32_t kv_head,
                        bool add_dq, float* scratch) {
  const Problem& problem = params.problem;
  Arena arena(scratch);
  const KeyWalkScratch s = KeyWalkScratch::Carve(problem, arena);
  const Tile tile = TileOf(tile_index, problem.tile_size, problem.k_len);
  const int32_t kv_heads = problem.num_kv_heads, group = problem.num_heads / kv_heads;
  const HeadRows k = {params.k, problem.dtype, kv_heads, kv_head, problem.head_dim};
  const HeadRows v = {params.v, problem.dtype, kv_heads, kv_head, problem.v_head_dim};
  const Logits logits(problem);

  CopyTransposed(k, tile.rows.begin, tile.size(), s.k);
  CopyTransposed(v, tile.rows.begin, tile.size(), s.v);
  const bool k_is_finite = !add_dq || CopyRows(k, tile.rows.begin, tile.size(), s.k_rows);
  memset(s.dk, 0, sizeof(float) * tile.panels * problem.head_dim * kPanel);
  memset(s.dv, 0, sizeof(float) * tile.panels * problem.v_head_dim * kPanel);
  for (int32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    ForEachBlock<Lanes::kKeys>(
        params.slices, params.by_key, tile_index, tile, [&](const Block& block) {
          KeyWalkBlock(params, logits, tile, block, head, k_is_finite, add_dq, s);
        });
  }
  const HeadRows dk = {nullptr, params.dkv_dtype, kv_heads, kv_head, problem.head_dim};
  const HeadRows dv = {nullptr, params.dkv_dtype, kv_heads, kv_head, problem.v_head_dim};
  for (int32_t i = 0; i < tile.size(); ++i) s.factors[i] = problem.scale;
  WriteTransposed(s.dk, s.factors, dk, tile.rows.begin, tile.size(), params.dk);
  for (int32_t i = 0; i < tile.size(); ++i) s.factors[i] = 1.0f;
  WriteTransposed(s.dv, s.factors, dv, tile.rows.begin, tile.size(), params.dv);
}

}  // namespace magi_jax::cpu::MAGI_JAX_ISA

#endif  // MAGI_JAX_XLA_FFI_KERNELS_CPU_KEY_WALK_H_
