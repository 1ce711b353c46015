// Pieces of a transfer, as `CommMeta` stores them, read the same way by kernels and by host code.
// A table's contents cannot be trusted on a device: every row that is taken from one is clamped.

#ifndef MAGI_JAX_XLA_FFI_COMM_PIECES_H_
#define MAGI_JAX_XLA_FFI_COMM_PIECES_H_

#include <cstdint>

#ifdef __CUDACC__
#define MAGI_JAX_HOST_DEVICE __host__ __device__ inline
#else
#define MAGI_JAX_HOST_DEVICE inline
#endif

namespace magi_jax::comm {

struct Piece {
  int32_t peer, src_row, dst_row, n_rows, slot;
};

struct PieceTable {
  const Piece* pieces;  // [num_pieces]
  int32_t num_pieces;
};

struct Extents {
  int32_t cp_size, src_rows, dst_rows;
};

// Offsets [begin, end) of a piece whose rows lie inside both buffers; empty for padding.
struct Span {
  int32_t begin, end;
};

MAGI_JAX_HOST_DEVICE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
MAGI_JAX_HOST_DEVICE int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }

MAGI_JAX_HOST_DEVICE Span InsideSpan(const Piece& piece, const Extents& extents) {
  if (piece.peer < 0 || piece.peer >= extents.cp_size || piece.n_rows <= 0) return {0, 0};
  const int64_t src = piece.src_row, dst = piece.dst_row;
  const int64_t begin = Max(0, Max(-src, -dst));
  const int64_t end = Min(piece.n_rows, Min(extents.src_rows - src, extents.dst_rows - dst));
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// Where each row of a result comes from.
//
// A cast has one source for a row: `row_of [2, rows]` holds the peer (kNobody, or kElsewhere for a
// row that another kernel writes) and its row. A
// reduce has at most one source per peer: bit `p` of the words `seen [words, rows]` tells whether
// peer `p` has a row to add, `row_of [cp, rows]` which (undefined elsewhere).
constexpr int32_t kNobody = -1, kElsewhere = -2;

struct RowMap {
  int32_t* row_of;
  uint32_t* seen;  // of a reduce
  int32_t rows;
};

MAGI_JAX_HOST_DEVICE int32_t SeenWords(int32_t cp_size) { return (cp_size + 31) / 32; }

// Enters row `offset` of a piece of the receiving side's table into the map of a cast.
MAGI_JAX_HOST_DEVICE void EnterCast(const Piece& piece, int32_t offset, const RowMap& map) {
  const int32_t row = piece.dst_row + offset;
  map.row_of[row] = piece.peer;
  map.row_of[int64_t{map.rows} + row] = piece.src_row + offset;
}

// Enters row `offset` of a piece of the owner's table into the map of a reduce, and returns the bit
// to set in `seen[piece.peer / 32 * rows + piece.src_row + offset]`.
MAGI_JAX_HOST_DEVICE uint32_t EnterReduce(const Piece& piece, int32_t offset, const RowMap& map) {
  map.row_of[int64_t{piece.peer} * map.rows + piece.src_row + offset] = piece.dst_row + offset;
  return 1u << (piece.peer % 32);
}

MAGI_JAX_HOST_DEVICE int64_t SeenIndex(const Piece& piece, int32_t offset, const RowMap& map) {
  return int64_t{piece.peer / 32} * map.rows + piece.src_row + offset;
}

// A number for a piece, equal at both ends. Numbers of the pieces between two ranks are added up,
// so that their order, which differs between the ends, does not matter.
MAGI_JAX_HOST_DEVICE uint64_t Digest(const Piece& piece) {
  if (piece.n_rows <= 0) return 0;
  uint64_t h =
      (uint64_t{static_cast<uint32_t>(piece.src_row)} << 32) ^ static_cast<uint32_t>(piece.dst_row);
  h = (h ^ (h >> 31)) * 0x7fb5d329728ea185ull;
  h ^= uint64_t{static_cast<uint32_t>(piece.n_rows)} * 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 27)) * 0x81dadef4bc2dd44dull;
  return h ^ (h >> 33);
}

}  // namespace magi_jax::comm

#endif  // MAGI_JAX_XLA_FFI_COMM_PIECES_H_
