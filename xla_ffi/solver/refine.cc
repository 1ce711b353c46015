// Exchanges of two units, drawn at random with a fixed seed and accepted when they lower a
// potential.
//
// The potential of a load is its eighth power relative to the largest load, so that the worst ranks
// count most and the others still lead the way. It is kept in fixed point: sums do not depend on
// their order.

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "xla_ffi/solver/placement.h"
#include "xla_ffi/solver/problem.h"

namespace magi_jax::solver {
namespace {

constexpr double kFixedPoint = 4294967296.0;  // 2**32
constexpr double kLargest = 4.0;              // relative load beyond which the potential is flat
constexpr double kAreaSlope = 300.0, kAreaCurve = 30000.0;
constexpr int64_t kHopeless = int64_t{4}
                              << 32;  // rise of the area penalty that no volume makes up for
constexpr int64_t kRescalePeriod = 2048;
constexpr int32_t kTournament = 3;
constexpr int32_t kRepairs = 24, kRepairWidth = 12;

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int32_t Below(size_t n) { return static_cast<int32_t>(((Next() >> 32) * n) >> 32); }

 private:
  uint64_t state_;
};

class Search {
 public:
  Search(const Problem& problem, const RefineOptions& options, const int32_t* owner)
      : p_(problem),
        options_(options),
        placement_(problem, owner),
        random_(options.seed),
        weight_(placement_.loads().size()),
        potential_(placement_.loads().size()),
        penalty_(problem.num_ranks),
        units_(problem.num_ranks),
        slot_(problem.num_units),
        spares_(problem.num_ranks, 0),
        by_area_(problem.num_units),
        area_place_(problem.num_units) {
    const int64_t total = std::accumulate(p_.area, p_.area + p_.num_units, int64_t{0});
    inverse_mean_ = 1.0 / std::max<double>(static_cast<double>(total) / p_.num_ranks, 1.0);
    for (int32_t u = 0; u < p_.num_units; ++u) {
      slot_[u] = static_cast<int32_t>(units_[owner[u]].size());
      units_[owner[u]].push_back(u);
      spares_[owner[u]] += p_.spare[u];
    }
    std::iota(by_area_.begin(), by_area_.end(), 0);
    std::stable_sort(by_area_.begin(), by_area_.end(),
                     [&](int32_t a, int32_t b) { return p_.area[a] > p_.area[b]; });
    for (int32_t i = 0; i < p_.num_units; ++i) area_place_[by_area_[i]] = i;
  }

  Loads Run(int32_t* owner) {
    for (int64_t k = 0; k < options_.moves; ++k) {
      if (k % kRescalePeriod == 0) Rescale();
      const double cooling = options_.temperature * (1.0 - static_cast<double>(k) / options_.moves);
      const auto tolerance = static_cast<int64_t>(cooling * kFixedPoint);
      if (options_.period > 0 && k % options_.period == 0) {
        DoubleStep(tolerance);
      } else {
        Step(tolerance);
      }
    }
    std::copy(placement_.owner().begin(), placement_.owner().end(), owner);
    return {placement_.loads(), placement_.area()};
  }

 private:
  int64_t Potential(int32_t load, int64_t rows) const {
    double x = std::min(static_cast<double>(rows) * weight_[load], kLargest);
    x *= x;
    x *= x;
    x *= x;
    if (load >= 2 * p_.num_ranks) x *= options_.node_weight;
    return static_cast<int64_t>(x * kFixedPoint);
  }

  int64_t Penalty(int64_t area) const {
    const double x = static_cast<double>(area - options_.area_limit) * inverse_mean_;
    if (x <= 0.0) return 0;
    return static_cast<int64_t>((kAreaSlope * x + kAreaCurve * x * x) * kFixedPoint);
  }

  void Rescale() {
    const std::vector<int64_t>& loads = placement_.loads();
    const auto middle = loads.begin() + 2 * p_.num_ranks;
    const double rank_scale = 1.0 / std::max<int64_t>(*std::max_element(loads.begin(), middle), 1);
    const double node_scale = 1.0 / std::max<int64_t>(*std::max_element(middle, loads.end()), 1);
    for (int32_t i = 0; i < static_cast<int32_t>(loads.size()); ++i) {
      weight_[i] = i < 2 * p_.num_ranks ? rank_scale : node_scale;
      potential_[i] = Potential(i, loads[i]);
    }
    for (int32_t r = 0; r < p_.num_ranks; ++r) penalty_[r] = Penalty(placement_.area()[r]);
  }

  int64_t Heat(int32_t rank) const {
    return potential_[rank] + potential_[p_.num_ranks + rank] + penalty_[rank];
  }

  // A unit of a rank that won a tournament of heat, or any unit.
  int32_t DrawUnit(bool hot) {
    if (!hot) return random_.Below(p_.num_units);
    int32_t rank = random_.Below(p_.num_ranks);
    for (int32_t i = 0; i < kTournament; ++i) {
      const int32_t other = random_.Below(p_.num_ranks);
      if (Heat(other) > Heat(rank)) rank = other;
    }
    if (units_[rank].empty()) return -1;
    return units_[rank][random_.Below(units_[rank].size())];
  }

  // A partner for u: of like area, on the rank of a neighbour of u, or any unit. -1: none.
  int32_t DrawPartner(int32_t u, uint64_t bits) {
    const bool narrow = bits & 2;
    if ((bits & 1) == 0) {
      if ((bits & 4) == 0) return random_.Below(p_.num_units);
      const int32_t width = narrow ? 8 : 64;
      const int32_t place = area_place_[u] + random_.Below(2 * width + 1) - width;
      return place < 0 || place >= p_.num_units ? -1 : by_area_[place];
    }
    const int32_t width = narrow ? 4 : 24;
    const int32_t neighbour = u + random_.Below(2 * width + 1) - width;
    if (neighbour < 0 || neighbour >= p_.num_units) return -1;
    const std::vector<int32_t>& units = units_[placement_.owner()[neighbour]];
    const int32_t start = random_.Below(units.size());
    return bits & 4 ? units[start] : Closest(u, units, start);
  }

  int32_t Closest(int32_t u, const std::vector<int32_t>& units, int32_t start) const {
    int32_t best = -1;
    int64_t best_gap = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      const int32_t v = units[(start + i) % units.size()];
      const int64_t gap = std::abs(p_.area[v] - p_.area[u]);
      if (p_.size[v] == p_.size[u] && (best < 0 || gap < best_gap)) best = v, best_gap = gap;
    }
    return best;
  }

  bool MayTrade(int32_t u, int32_t v) const {
    if (u < 0 || v < 0) return false;
    const int32_t r = placement_.owner()[u], s = placement_.owner()[v];
    if (r == s || p_.size[u] != p_.size[v]) return false;
    return p_.spare[u] == p_.spare[v] || spares_[p_.spare[u] ? s : r] == 0;
  }

  // Rise of the penalty when u and v trade ranks.
  int64_t PriceArea(int32_t u, int32_t v) {
    const int32_t r = placement_.owner()[u], s = placement_.owner()[v];
    const int64_t gain = p_.area[v] - p_.area[u];
    new_penalty_[0] = Penalty(placement_.area()[r] + gain);
    new_penalty_[1] = Penalty(placement_.area()[s] - gain);
    return new_penalty_[0] + new_penalty_[1] - penalty_[r] - penalty_[s];
  }

  // Rise of the potential of all rows, which the placement keeps in mind.
  int64_t PriceRows(int32_t u, int32_t v) {
    placement_.Price(u, v);
    int64_t rise = 0;
    for (int32_t i : placement_.touched)
      rise += Potential(i, placement_.loads()[i] + placement_.change[i]) - potential_[i];
    return rise;
  }

  // Carries out the exchange that was priced last.
  void Trade(int32_t u, int32_t v) {
    const int32_t r = placement_.owner()[u], s = placement_.owner()[v];
    placement_.Apply(u, v);
    for (int32_t i : placement_.touched) potential_[i] = Potential(i, placement_.loads()[i]);
    penalty_[r] = new_penalty_[0], penalty_[s] = new_penalty_[1];
    spares_[r] += p_.spare[v] - p_.spare[u];
    spares_[s] += p_.spare[u] - p_.spare[v];
    units_[r][slot_[u]] = v, units_[s][slot_[v]] = u;
    std::swap(slot_[u], slot_[v]);
  }

  void Step(int64_t tolerance) {
    const uint64_t bits = random_.Next();
    const int32_t u = DrawUnit(bits & 1);
    const int32_t v = u < 0 ? -1 : DrawPartner(u, bits >> 1);
    if (!MayTrade(u, v)) return;
    int64_t rise = PriceArea(u, v);
    if (rise > kHopeless + tolerance) return;
    rise += PriceRows(u, v);
    if (rise <= tolerance) Trade(u, v);
    placement_.Forget();
  }

  // The rank with the highest loads.
  int32_t Hottest() const {
    int32_t best = 0;
    for (int32_t r = 1; r < p_.num_ranks; ++r)
      if (Heat(r) > Heat(best)) best = r;
    return best;
  }

  // An exchange that rows ask for, and a second one that mends the balance after it.
  void DoubleStep(int64_t tolerance) {
    const uint64_t bits = random_.Next();
    const int32_t hot = bits & 1 ? Hottest() : random_.Below(p_.num_ranks);
    if (units_[hot].empty()) return;
    const int32_t u = units_[hot][random_.Below(units_[hot].size())];
    const int32_t v = bits & 2 ? random_.Below(p_.num_units) : DrawPartner(u, bits >> 2);
    if (!MayTrade(u, v)) return;
    const int64_t area_rise = PriceArea(u, v), rows_rise = PriceRows(u, v);
    if (rows_rise > tolerance) return placement_.Forget();
    const int32_t r = placement_.owner()[u], s = placement_.owner()[v];
    Trade(u, v);
    placement_.Forget();
    const int64_t rise = area_rise + rows_rise;
    if (rise <= tolerance) return;
    const int32_t heavy = penalty_[r] > penalty_[s] ? r : s;
    for (int32_t i = 0; i < kRepairs; ++i) {
      const int32_t x = units_[heavy][random_.Below(units_[heavy].size())];
      const int64_t target = p_.area[x] - (placement_.area()[heavy] - options_.area_limit);
      const int32_t place = PlaceOfArea(target) + random_.Below(kRepairWidth);
      if (place >= p_.num_units) continue;
      const int32_t y = by_area_[place];
      if (!MayTrade(x, y)) continue;
      int64_t second = PriceArea(x, y);
      if (rise + second > tolerance + kHopeless) continue;
      second += PriceRows(x, y);
      const bool accepted = rise + second <= tolerance;
      if (accepted) Trade(x, y);
      placement_.Forget();
      if (accepted) return;
    }
    PriceArea(u, v);
    placement_.Price(u, v);
    Trade(u, v);
    placement_.Forget();
  }

  // First place of `by_area_` whose unit is no heavier than `area`.
  int32_t PlaceOfArea(int64_t area) const {
    return std::partition_point(by_area_.begin(), by_area_.end(),
                                [&](int32_t u) { return p_.area[u] > area; }) -
           by_area_.begin();
  }

  const Problem& p_;
  const RefineOptions& options_;
  Placement placement_;
  SplitMix64 random_;
  double inverse_mean_;
  std::vector<double> weight_;               // [2 R + 2 D] one over the largest load of the kind
  std::vector<int64_t> potential_;           // [2 R + 2 D]
  std::vector<int64_t> penalty_;             // [R]
  int64_t new_penalty_[2];                   // of the two ranks of the exchange priced last
  std::vector<std::vector<int32_t>> units_;  // [R] units of each rank
  std::vector<int32_t> slot_;                // [U] place of the unit in its rank's list
  std::vector<int32_t> spares_;              // [R]
  std::vector<int32_t> by_area_;             // [U] units by falling area
  std::vector<int32_t> area_place_;          // [U] its inverse
};

}  // namespace

Loads Refine(const Problem& problem, const RefineOptions& options, int32_t* owner) {
  if (problem.num_units == 0 || problem.num_ranks < 2) return Measure(problem, owner);
  return Search(problem, options, owner).Run(owner);
}

}  // namespace magi_jax::solver
