// Bins of whole documents, as many tokens as wanted in each and nearly equal weights:
// magi_jax/solver/dispatch/bins.py in C++.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_BINS_H_
#define MAGI_JAX_XLA_FFI_SOLVER_BINS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace magi_jax::solver {

struct BinDocuments {
  const int64_t* size;    // [D] tokens
  const int64_t* weight;  // [D]
  const bool* is_light;   // [D] whether it is one of those that even tokens out
  int64_t count;          // D
};

// Sets of a few documents of a bin, by rising size and then weight; -1 stands for none.
struct DocumentSets {
  struct Set {
    int64_t size, weight;
    int32_t index;  // in the order in which sets are made
    std::array<int32_t, 3> documents;
  };
  std::vector<Set> made, sorted;
};

class Bins {
 public:
  Bins(const BinDocuments& documents, const int64_t* tokens, int64_t num_bins, int64_t share);

  // Heaviest first, each to where most weight is missing; then light ones, to where most tokens
  // are.
  void Fill();
  // Exchanges documents until tokens are as wanted and weights nearly equal.
  void Settle();

  const std::vector<std::vector<int32_t>>& held() const { return held_; }
  // What each bin lacks of its weight and of its tokens.
  const std::vector<int64_t>& room() const { return room_; }
  const std::vector<int64_t>& left() const { return left_; }

 private:
  bool Relieve();
  bool Exchange(int64_t at, int64_t partner, int64_t tokens, int64_t weight, int64_t most);
  const DocumentSets& SetsOf(int64_t bin);
  void Move(int64_t from, int64_t to, const std::array<int32_t, 3>& documents);

  BinDocuments documents_;
  int64_t share_;
  std::vector<int64_t> room_, left_;
  std::vector<std::vector<int32_t>> held_;
  std::vector<std::optional<DocumentSets>> known_;
};

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_BINS_H_
