// Tile sizes of the sm80 kernels for each pair of head dims. Plain C++, so that hosts can print
// them.
//
// Every choice fits the 99 KiB of shared memory of the smallest chips served (compute
// capability 8.6, 8.9 and 12.0) and the 255 registers of a thread.

#ifndef MAGI_JAX_XLA_FFI_KERNELS_SM80_CONFIG_H_
#define MAGI_JAX_XLA_FFI_KERNELS_SM80_CONFIG_H_

namespace magi_jax::sm80 {

struct TileConfig {
  int rows;                                  // of a thread block, on the axis that owns the result
  int columns;                               // of a block of the walk
  int warps;                                 // they split the rows
  int row_bytes_resident, row_bytes_walked;  // per row and per column, with all stages
  int passes;                                // launches that share the work

  constexpr int threads() const { return warps * 32; }
  constexpr int row_tiles() const { return rows / (16 * warps); }  // 16-row operand tiles of a warp
  // 512 bytes past the tiles hold row statistics and flags.
  constexpr int shared_bytes() const {
    return rows * row_bytes_resident + columns * row_bytes_walked + 512;
  }
};

// Queries stay, keys and values walk, each in one stage: V arrives under Q.K, the next K under P.V.
constexpr TileConfig ForwardTile(int head_dim, int v_head_dim) {
  const bool wide = head_dim > 192;
  const int columns = head_dim > 128 ? 32 : 64;
  return {wide ? 64 : 128, columns, 4, 2 * head_dim, 2 * (head_dim + v_head_dim), 1};
}

// Queries and dout stay, keys and values walk in two stages.
constexpr TileConfig QueryGradTile(int head_dim, int v_head_dim) {
  const bool wide = head_dim > 128;
  const int columns = head_dim > 192 ? 16 : 32;
  const int both = 2 * (head_dim + v_head_dim);
  return {wide ? 64 : 128, columns, 4, both, 2 * both, 1};
}

// Keys and values stay, queries and dout walk in two stages with lse and delta. Accumulators of dK
// and dV of head dim 256 do not fit together: one pass makes dK, another dV.
constexpr TileConfig KeyGradTile(int head_dim, int v_head_dim) {
  const bool wide = head_dim > 128;
  const int columns = head_dim > 192 ? 16 : head_dim > 64 ? 32 : 64;
  const int both = 2 * (head_dim + v_head_dim);
  return {wide ? 64 : 128, columns, wide ? 4 : 8, both, 2 * (both + 8), head_dim > 192 ? 2 : 1};
}

}  // namespace magi_jax::sm80

#endif  // MAGI_JAX_XLA_FFI_KERNELS_SM80_CONFIG_H_
