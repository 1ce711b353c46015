// Stretches of tiles that the same slices meet.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_TILE_SWEEP_H_
#define MAGI_JAX_XLA_FFI_SOLVER_TILE_SWEEP_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "xla_ffi/solver/bands.h"

namespace magi_jax::solver {

// Goes through the tiles of one part in stretches, all tiles of which the same slices meet: with
// long keys and few slices, as under a causal mask, hundreds of them.
class Sweep {
 public:
  Sweep(int64_t tile_size, int64_t num_tiles) : tile_size_(tile_size), num_tiles_(num_tiles) {}

  // Calls visit(begin, end, ids) for each stretch of tiles [begin, end), with rising ids of slices.
  template <typename Visit>
  void Run(const BandSlice* slices, int64_t num_slices, const Visit& visit) {
    SortByFirstTile(slices, num_slices);
    active_.clear();
    const auto last_tile = [&](int32_t id) { return (slices[id].q_end - 1) / tile_size_; };
    auto next = begins_.begin();
    for (int64_t tile = 0; tile < num_tiles_;) {
      const auto ended = [&](int32_t id) { return last_tile(id) < tile; };
      active_.erase(std::remove_if(active_.begin(), active_.end(), ended), active_.end());
      const size_t kept = active_.size();
      for (; next != begins_.end() && next->tile == tile; ++next) active_.push_back(next->id);
      if (kept > 0 && kept < active_.size())
        std::inplace_merge(active_.begin(), active_.begin() + kept, active_.end());
      int64_t end = next == begins_.end() ? num_tiles_ : next->tile;
      for (int32_t id : active_) end = std::min(end, last_tile(id) + 1);
      visit(tile, end, active_);
      tile = end;
    }
  }

 private:
  struct Begin {
    int32_t tile, id;
  };

  void SortByFirstTile(const BandSlice* slices, int64_t num_slices) {
    begins_.resize(num_slices);
    bool sorted = true;
    for (int64_t i = 0; i < num_slices; ++i) {
      begins_[i] = {static_cast<int32_t>(slices[i].q_start / tile_size_), static_cast<int32_t>(i)};
      sorted &= i == 0 || begins_[i - 1].tile <= begins_[i].tile;
    }
    if (sorted) return;
    if (num_slices < num_tiles_) {
      std::sort(begins_.begin(), begins_.end(), [](const Begin& a, const Begin& b) {
        return a.tile < b.tile || (a.tile == b.tile && a.id < b.id);
      });
      return;
    }
    place_.assign(num_tiles_ + 1, 0);
    for (const Begin& begin : begins_) ++place_[begin.tile + 1];
    std::partial_sum(place_.begin(), place_.end(), place_.begin());
    unsorted_.swap(begins_);
    begins_.resize(num_slices);
    for (const Begin& begin : unsorted_) begins_[place_[begin.tile]++] = begin;
  }

  int64_t tile_size_, num_tiles_;
  std::vector<Begin> begins_, unsorted_;
  std::vector<int64_t> place_;
  std::vector<int32_t> active_;
};

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_TILE_SWEEP_H_
