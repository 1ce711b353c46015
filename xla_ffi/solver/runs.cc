#include "xla_ffi/solver/runs.h"

#include <algorithm>
#include <cstdlib>

namespace magi_jax::solver {
namespace {

constexpr int64_t kProbes = 8;

int64_t LastNotAbove(const int64_t* values, int64_t count, int64_t value) {
  return std::upper_bound(values, values + count, value) - values - 1;
}

// The place in [low, high] where `excess` is nearest to 0: at its first change of sign between a
// few probes, or at the best of them.
template <typename Function>
int64_t NearestToZero(const Function& excess, int64_t low, int64_t high) {
  int64_t best = low, least = excess(low), last = low, last_excess = least;
  for (int64_t i = 1; i <= kProbes; ++i) {
    const int64_t place = low + (high - low) * i / kProbes, found = excess(place);
    if ((found < 0) != (last_excess < 0)) {
      int64_t a = last, b = place, at_a = last_excess, at_b = found;
      while (b - a > 1) {
        const int64_t middle = a + (b - a) / 2, at_middle = excess(middle);
        if ((at_middle < 0) == (at_a < 0)) {
          a = middle, at_a = at_middle;
        } else {
          b = middle, at_b = at_middle;
        }
      }
      return std::abs(at_a) <= std::abs(at_b) ? a : b;
    }
    if (std::abs(found) < std::abs(least)) best = place, least = found;
    last = place, last_excess = found;
  }
  return best;
}

}  // namespace

int64_t RowAreas::Before(int64_t row) const {
  const int64_t i = LastNotAbove(at, num_points, row), n = row - at[i];
  return total[i] + keys[i] * n + slope[i] * (n * (n - 1) / 2);
}

int64_t Pile::Area(int64_t taken, const RowAreas& rows) const {
  if (num_documents == 0) return 0;
  const int64_t i = std::min(LastNotAbove(first, num_documents + 1, taken), num_documents - 1);
  const int64_t inside = taken - first[i], back = folded[i] ? inside / 2 : 0;
  return area[i] + rows.Before(begin[i] + inside - back) - rows.Before(begin[i]) +
         rows.Before(end[i]) - rows.Before(end[i] - back);
}

std::vector<int64_t> DealRuns(const RowAreas& rows, const Pile& dense, const Pile& light,
                              const int64_t* tokens, int64_t num_ranks) {
  const int64_t total = dense.area[dense.num_documents] + light.area[light.num_documents];
  std::vector<int64_t> taken = {0};
  int64_t done = 0;
  for (int64_t r = 1; r <= num_ranks; ++r) {
    const int64_t all = tokens[r];
    const int64_t target = done + (total - done) / (num_ranks - r + 1);
    const auto area = [&](int64_t of_dense) {
      return dense.Area(of_dense, rows) + light.Area(all - of_dense, rows);
    };
    const int64_t low = std::max(taken.back(), all - light.num_rows());
    const int64_t high = std::min(taken.back() + all - tokens[r - 1], dense.num_rows());
    const auto excess = [&](int64_t of_dense) { return area(of_dense) - target; };
    taken.push_back(NearestToZero(excess, low, high));
    done = area(taken.back());
  }
  return taken;
}

}  // namespace magi_jax::solver
