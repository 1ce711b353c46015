// What a kernel launch needs, free of any framework type. Every pointer states its shape.
//
// Letters: T, S query and key rows; N, K query and kv heads; H, Hv head dims; A slices; M tiles;
// R runs; I slice ids. All tensors are dense and row-major. See docs/architecture.md, "Slice
// table".

#ifndef MAGI_JAX_XLA_FFI_COMMON_PARAMS_H_
#define MAGI_JAX_XLA_FFI_COMMON_PARAMS_H_

#include <cstdint>

namespace magi_jax {

enum class DType : int32_t { kF32, kF16, kBF16 };

// Query q sees key k when both are in range and d_min <= k - q <= d_max.
struct Slice {
  int32_t q_start, q_end, k_start, k_end, d_min, d_max;
};

// An interval [begin, end) of the other axis that a tile walks. Blocks inside [full_begin,
// full_end) are visible to every row of the tile; elsewhere the slices ids[ids_begin:ids_end]
// decide.
struct Run {
  int32_t begin, end, full_begin, full_end, ids_begin, ids_end;
};

struct TileRuns {
  const int32_t* ptr;    // [M + 1]
  const Run* runs;       // [R]
  const int32_t* ids;    // [I], rows of `slices`
  const int32_t* order;  // [M], tiles by decreasing work
  int32_t num_tiles;     // M
  int32_t num_runs;  // R, capacity; entries of a table may be hostile, so device code clamps to it
  int32_t num_ids;   // I, likewise
};

struct Problem {
  int32_t q_len, k_len;          // T, S
  int32_t num_heads;             // N
  int32_t num_kv_heads;          // K; query head n reads kv head n / (N / K)
  int32_t head_dim, v_head_dim;  // H, Hv
  int32_t tile_size;             // rows of a tile in the slice table
  float scale;                   // logits are scale * q.k
  float logits_soft_cap;         // cap * tanh(logits / cap); 0 = none
  DType dtype;                   // of q, k, v, dout
  int32_t num_slices;            // A, capacity of `slices`
};

struct ForwardParams {
  Problem problem;
  const void* q;        // [T, N, H]
  const void* k;        // [S, K, H]
  const void* v;        // [S, K, Hv]
  const Slice* slices;  // [A]
  TileRuns by_query;
  void* out;   // [T, N, Hv], dtype out_dtype
  float* lse;  // [T, N], natural log
  // [T, N], the largest logit (after the cap) that a row sees among these keys, -inf where it sees
  // none; null: not wanted. Never merged into what was there.
  float* row_max;
  DType out_dtype;
  // `out` and `lse` hold what other calls gave. Float32 results are merged with it; others replace
  // it, in tiles whose rows have seen no key before. Tiles without runs are not written.
  bool accumulates;
};

struct BackwardParams {
  Problem problem;
  const void* dout;     // [T, N, Hv]
  const void* q;        // [T, N, H]
  const void* k;        // [S, K, H]
  const void* v;        // [S, K, Hv]
  const float* lse;     // [T, N]
  const float* delta;   // [T, N], sum(dout * out) - dlse
  const Slice* slices;  // [A]
  TileRuns by_query;
  TileRuns by_key;
  float* dq;         // [T, N, H]; null where dq_rounded is wanted
  void* dq_rounded;  // [T, N, H] in the dtype of q; null: dq. Of paths that say that they have it
  bool accumulate;   // dq is added to what is there; of dq_rounded, tiles that see no key stay
  void* dk;          // [S, K, H], dtype dkv_dtype
  void* dv;          // [S, K, Hv], dtype dkv_dtype
  DType dkv_dtype;
  bool fixed_order;  // sums are taken in one order: equal inputs give equal bits
  void* scratch;     // as much as the path's ScratchBytes() asked for, or null
};

}  // namespace magi_jax

#endif  // MAGI_JAX_XLA_FFI_COMMON_PARAMS_H_
