// Units dealt out in the order of the sequence, from a list of heavy ones and a list of light ones.

#include <algorithm>
#include <vector>

#include "xla_ffi/solver/problem.h"

namespace magi_jax::solver {
namespace {

// Heavy or light units, whole ones and parts of chunks apart, in the order of the sequence.
class Pile {
 public:
  void Add(int32_t unit, bool part) { lists_[part].push_back(unit); }
  // The first unit that is left, or the first part; -1: none.
  int32_t First(bool parts_only) const {
    const int32_t part = At(true), whole = parts_only ? -1 : At(false);
    return part < 0 || whole < 0 ? std::max(part, whole) : std::min(part, whole);
  }
  void Drop(bool part) { ++next_[part]; }

 private:
  int32_t At(bool part) const {
    return next_[part] < lists_[part].size() ? lists_[part][next_[part]] : -1;
  }
  std::vector<int32_t> lists_[2];
  size_t next_[2] = {0, 0};
};

}  // namespace

bool Deal(const Problem& problem, const Capacity& capacity, int32_t* owner) {
  const int32_t num_ranks = problem.num_ranks;
  std::vector<int64_t> room(num_ranks, capacity.tokens), area(num_ranks, 0);
  int64_t left = 0;
  for (int32_t u = 0; u < problem.num_units; ++u) left += problem.area[u];
  const double density = static_cast<double>(left) / num_ranks / capacity.tokens;
  const auto is_part = [&](int32_t u) { return problem.size[u] < capacity.slot; };
  const auto put = [&](int32_t u, int32_t rank) {
    owner[u] = rank;
    room[rank] -= problem.size[u];
    area[rank] += problem.area[u];
  };

  // Units that hold fewer tokens than their place: one for each rank, from the last one back.
  int32_t spare_rank = num_ranks;
  for (int32_t u = problem.num_units - 1; u >= 0; --u) {
    if (!problem.spare[u]) continue;
    if (spare_rank == 0) return false;
    put(u, --spare_rank);
  }
  Pile piles[2];
  for (int32_t u = 0; u < problem.num_units; ++u) {
    if (problem.spare[u]) continue;
    const bool heavy = static_cast<double>(problem.area[u]) > density * problem.size[u];
    piles[heavy].Add(u, is_part(u));
  }

  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const double target = static_cast<double>(left) / (num_ranks - rank);
    while (room[rank] > 0) {
      const bool parts_only = room[rank] % capacity.slot != 0;
      const int32_t light = piles[0].First(parts_only), heavy = piles[1].First(parts_only);
      if (light < 0 && heavy < 0) return false;
      bool takes_heavy = light < 0;
      if (light >= 0 && heavy >= 0) {
        // Nearer to what the tokens that are still to come have to bring.
        const double wanted = (target - static_cast<double>(area[rank])) / room[rank];
        const double of_light = static_cast<double>(problem.area[light]) / problem.size[light];
        const double of_heavy = static_cast<double>(problem.area[heavy]) / problem.size[heavy];
        takes_heavy = wanted >= (of_light + of_heavy) / 2;
      }
      const int32_t unit = takes_heavy ? heavy : light;
      piles[takes_heavy].Drop(is_part(unit));
      put(unit, rank);
    }
    left -= area[rank];
  }
  return true;
}

}  // namespace magi_jax::solver
