// Dealing two piles of documents out row by row: magi_jax/solver/dispatch/deal.py in C++.

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

// Rows of [begin, end) in the order in which they are dealt, those from `first` to `last`: one
// after another, or where it is folded from the front and from the back by turns.
struct Document {
  int64_t begin, end, first, last, folded;

  int64_t size() const { return last - first; }
  // Of the rows up to `row`, how many are from either end.
  int64_t back(int64_t row) const { return folded ? row / 2 : 0; }
  int64_t front(int64_t row) const { return row - back(row); }
};

// Rows [begin, begin + size) that a rank has.
struct RunPiece {
  int64_t begin, size, rank;
};

// What each rank is to have: tokens, and area that it has whatever is dealt.
struct Share {
  int64_t tokens, area;
};

// Pieces of all documents. Each rank takes the first rows of both piles, as many of either as bring
// it nearest to an even share of the area that is left; other documents come first where none do.
std::vector<RunPiece> DealRuns(const RowAreas& rows, std::vector<Document> dense,
                               std::vector<Document> light, const std::vector<Share>& shares);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_RUNS_H_
