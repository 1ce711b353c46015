// A placement of units on ranks with all its loads, and the exact change of an exchange of two
// units.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_PLACEMENT_H_
#define MAGI_JAX_XLA_FFI_SOLVER_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_ffi/solver/problem.h"

namespace magi_jax::solver {

class Placement {
 public:
  Placement(const Problem& problem, const int32_t* owner);

  const std::vector<int32_t>& owner() const { return owner_; }
  const std::vector<int64_t>& area() const { return area_; }
  const std::vector<int64_t>& loads() const { return loads_; }

  // Computes how the loads change when units u and v trade ranks: fills `touched` and `change`.
  void Price(int32_t u, int32_t v);
  // Carries out the exchange that was priced last.
  void Apply(int32_t u, int32_t v);
  // Forgets the last price.
  void Forget();

  std::vector<int32_t> touched;  // loads that the priced exchange changes (perhaps by 0)
  std::vector<int64_t> change;   // [2 R + 2 D], 0 where not touched

 private:
  // Pointers past the end, to nothing, where there is no span.
  int32_t* counts(int32_t rank) {
    return counts_.data() + static_cast<size_t>(rank) * p_.num_spans;
  }
  int32_t* node_counts(int32_t node) {
    return node_counts_.data() + static_cast<size_t>(node) * p_.num_spans;
  }
  int32_t recv(int32_t rank) const { return rank; }
  int32_t send(int32_t rank) const { return p_.num_ranks + rank; }
  int32_t node_recv(int32_t node) const { return 2 * p_.num_ranks + node; }
  int32_t node_send(int32_t node) const { return 2 * p_.num_ranks + p_.num_nodes() + node; }

  void Add(int32_t load, int64_t rows) {
    if (!marked_[load]) marked_[load] = 1, touched.push_back(load);
    change[load] += rows;
  }
  bool Needs(int32_t unit, int32_t span) const;
  void Differences(int32_t u, int32_t v);
  void PriceNeeds(const std::vector<Interval>& spans, int32_t from, int32_t to, int32_t u,
                  int32_t v);
  void PriceOwned(int32_t unit, int32_t other, int32_t from, int32_t to);
  void MoveNeeds(const std::vector<Interval>& spans, int32_t from, int32_t to);

  const Problem& p_;
  std::vector<int32_t>
      node_of_;  // [R] looked up, since a division costs as much as the rest of a step
  std::vector<int32_t> owner_;             // [U]
  std::vector<int32_t> span_owner_;        // [V] rank
  std::vector<int32_t> counts_;            // [R, V] units of the rank that need the span
  std::vector<int32_t> node_counts_;       // [D, V] ranks of the node that need the span
  std::vector<int32_t> ranks_;             // [V] ranks that need the span
  std::vector<int32_t> nodes_;             // [V] nodes that need the span
  std::vector<int64_t> loads_;             // [2 R + 2 D]
  std::vector<int64_t> area_;              // [R]
  std::vector<uint8_t> marked_;            // [2 R + 2 D]
  std::vector<Interval> only_u_, only_v_;  // needs of one unit that the other does not share
};

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_PLACEMENT_H_
