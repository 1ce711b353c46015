// Dealing two piles of documents out row by row: magi_jax/solver/dispatch/runs.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_RUNS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_RUNS_H_

#include <cstdint>
#include <vector>

namespace magi_jax::solver {

// Visible keys of every row: linear between points `at` [P], of which the first is 0.
struct RowAreas {
  const int64_t* at;
  const int64_t* keys;   // of the row `at`
  const int64_t* slope;  // more keys of each row after it
  const int64_t* total;  // keys of all rows before it
  int64_t num_points;

  int64_t Before(int64_t row) const;
};

// Documents in the order in which they are dealt.
struct Pile {
  const int64_t* first;   // [D + 1] rows of the pile before each document
  const int64_t* area;    // [D + 1] area before each document
  const int64_t* begin;   // [D] rows of the document in the sequence
  const int64_t* end;     // [D]
  const int64_t* folded;  // [D] 1: rows are dealt from both ends
  int64_t num_documents;

  int64_t num_rows() const { return first[num_documents]; }
  // Of the first rows of the pile, `taken` of them.
  int64_t Area(int64_t taken, const RowAreas& rows) const;
};

// How many rows of the dense pile the first ranks have together, [R + 1], when they have `tokens`
// [R + 1] of both piles: as many as bring each rank nearest to an even share of the area that is
// left.
std::vector<int64_t> DealRuns(const RowAreas& rows, const Pile& dense, const Pile& light,
                              const int64_t* tokens, int64_t num_ranks);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_RUNS_H_
