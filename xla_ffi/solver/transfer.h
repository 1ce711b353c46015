// Pieces of rows that move between ranks, sorted for senders and receivers:
// magi_jax/solver/work/transfer.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_TRANSFER_H_
#define MAGI_JAX_XLA_FFI_SOLVER_TRANSFER_H_

#include <cstdint>
#include <vector>

namespace magi_jax::solver {

// The row of docs/architecture.md, "Plan".
struct MovedPiece {
  int64_t peer, src_row, dst_row, n_rows, slot;
};

// Columns of E pieces.
struct Pieces {
  const int64_t *src, *dst, *src_row, *dst_row, *n_rows;
  int64_t size;
};

struct TransferTables {
  std::vector<MovedPiece> send, recv;         // sorted by (src, dst, dst_row) and (dst, dst_row)
  std::vector<int64_t> send_rank, recv_rank;  // rank whose table the piece stands in
  int64_t pair_rows, self_rows, dst_rows;
};

// A transfer in two steps, columns as in Pieces: see magi_jax/solver/work/two_level.py.
struct StepPieces {
  std::vector<int64_t> src, dst, src_row, dst_row, n_rows;
};
struct TwoSteps {
  StepPieces across, within;
};

TwoSteps SplitSteps(const Pieces& pieces, int64_t ranks_per_node);

TransferTables SortPieces(const Pieces& pieces, int64_t num_ranks);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_TRANSFER_H_
