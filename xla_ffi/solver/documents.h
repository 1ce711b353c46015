// Documents, parts of a sequence that share no visible pair, in groups of neighbours:
// magi_jax/solver/dispatch/documents.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_DOCUMENTS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_DOCUMENTS_H_

#include <cstdint>
#include <vector>

#include "xla_ffi/solver/bands.h"

namespace magi_jax::solver {

struct DocumentGroups {
  std::vector<int64_t> edges;        // [G + 1] from 0 to the end of the sequence
  std::vector<int64_t> area;         // [G] of documents of up to `step` rows
  std::vector<int64_t> long_slices;  // of longer documents, rising
};

// Documents longer than `step` are groups of their own; of the others those that begin between two
// multiples of `step`, with no longer one between them, are one.
DocumentGroups GroupDocuments(const BandSlice* slices, int64_t num_slices, int64_t seq_len,
                              int64_t step);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_DOCUMENTS_H_
