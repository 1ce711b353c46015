#include "xla_ffi/solver/runs.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace magi_jax::solver {
namespace {

constexpr int64_t kProbes = 8;
constexpr int64_t kTolerance = 500;  // a miss of more than a rank's area over this is mended
constexpr int64_t kMends = 8;        // documents that are brought forward for one rank
constexpr int64_t kSteps = 8;        // of a rank's rows, in which windows are tried

int64_t LastNotAbove(const int64_t* values, int64_t count, int64_t value) {
  return std::upper_bound(values, values + count, value) - values - 1;
}

// Where a function is nearest to 0, and its value there.
struct Place {
  int64_t at, miss;
};

// Between a and b, where it changes its sign.
template <typename Function>
Place Halve(const Function& excess, Place a, Place b) {
  while (b.at - a.at > 1) {
    const int64_t middle = a.at + (b.at - a.at) / 2;
    const Place found = {middle, excess(middle)};
    ((found.miss < 0) == (a.miss < 0) ? a : b) = found;
  }
  return std::abs(a.miss) <= std::abs(b.miss) ? a : b;
}

// In [low, high]: at its first change of sign between a few probes, or at the best of them.
template <typename Function>
Place NearestToZero(const Function& excess, int64_t low, int64_t high) {
  Place best = {low, excess(low)}, last = best;
  for (int64_t i = 1; i <= kProbes; ++i) {
    const int64_t at = low + (high - low) * i / kProbes;
    const Place found = {at, excess(at)};
    if ((found.miss < 0) != (last.miss < 0)) return Halve(excess, last, found);
    if (std::abs(found.miss) < std::abs(best.miss)) best = found;
    last = found;
  }
  return best;
}

// Documents in the order in which they are dealt. Rows are counted from the first that is left.
class Pile {
 public:
  Pile(const RowAreas& rows, std::vector<Document> documents)
      : rows_(&rows), documents_(std::move(documents)) {
    Count();
  }

  int64_t num_rows() const { return first_.back() - taken_; }
  int64_t num_documents() const { return static_cast<int64_t>(documents_.size()); }

  // Of the first rows, `count` of them.
  int64_t Area(int64_t count) const { return AreaTo(taken_ + count) - before_; }

  // Gives rows [from, to) to a rank.
  void Take(int64_t from, int64_t to, int64_t rank, std::vector<RunPiece>* pieces) {
    if (from >= to) return;
    from += taken_, to += taken_;
    for (int64_t i = DocumentAt(from); i < num_documents() && first_[i] < to; ++i) {
      const Document& d = documents_[i];
      const int64_t low = d.first + std::max<int64_t>(from - first_[i], 0);
      const int64_t high = std::min(d.first + to - first_[i], d.last);
      if (d.front(low) < d.front(high))
        pieces->push_back({d.begin + d.front(low), d.front(high) - d.front(low), rank});
      if (d.back(low) < d.back(high))
        pieces->push_back({d.end - d.back(high), d.back(high) - d.back(low), rank});
    }
    if (from == taken_) {
      taken_ = to;
      before_ = AreaTo(to);
    } else {
      Drop(from, to);
    }
  }

  // The document of all but the first that is left whose rows see most keys, or fewest; -1: none.
  int64_t Extreme(bool most, double* density) const {
    int64_t best = -1;
    for (int64_t i = DocumentAt(taken_) + 1; i < num_documents(); ++i) {
      const double found = static_cast<double>(area_[i + 1] - area_[i]) / documents_[i].size();
      if (best < 0 || (most ? found > *density : found < *density)) best = i, *density = found;
    }
    return best;
  }

  Document Remove(int64_t i) {
    const Document removed = documents_[i];
    documents_.erase(documents_.begin() + i);
    Count();
    return removed;
  }

  void PutFirst(const Document& document) {
    Drop(taken_, taken_);
    documents_.insert(documents_.begin(), document);
    Count();
  }

 private:
  void Count() {
    first_.assign(1, 0), area_.assign(1, 0);
    for (const Document& d : documents_) {
      first_.push_back(first_.back() + d.size());
      area_.push_back(area_.back() + AreaOf(d, d.size()));
    }
    before_ = AreaTo(taken_);
  }

  // Leaves out rows that were taken before and rows [from, to).
  void Drop(int64_t from, int64_t to) {
    std::vector<Document> left;
    for (int64_t i = DocumentAt(taken_); i < num_documents(); ++i) {
      Document before = documents_[i], after = before;
      before.first += std::max<int64_t>(taken_ - first_[i], 0);
      before.last = std::clamp(after.first + from - first_[i], before.first, after.last);
      after.first = std::clamp(after.first + to - first_[i], before.last, after.last);
      if (before.size() > 0) left.push_back(before);
      if (after.size() > 0) left.push_back(after);
    }
    documents_ = std::move(left);
    taken_ = 0;
    Count();
  }

  int64_t DocumentAt(int64_t row) const {
    return LastNotAbove(first_.data(), static_cast<int64_t>(first_.size()), row);
  }

  // Of the first rows of a document, `count` of them.
  int64_t AreaOf(const Document& d, int64_t count) const {
    const int64_t low = d.first, high = low + count;
    return rows_->Before(d.begin + d.front(high)) - rows_->Before(d.begin + d.front(low)) +
           rows_->Before(d.end - d.back(low)) - rows_->Before(d.end - d.back(high));
  }

  int64_t AreaTo(int64_t row) const {
    const int64_t i = DocumentAt(row);
    return i == num_documents() ? area_[i] : area_[i] + AreaOf(documents_[i], row - first_[i]);
  }

  const RowAreas* rows_;
  std::vector<Document> documents_;
  std::vector<int64_t> first_, area_;  // [D + 1] rows and area before each document
  int64_t taken_ = 0, before_ = 0;     // rows that were dealt, and their area
};

class Piles {
 public:
  Piles(const RowAreas& rows, std::vector<Document> dense, std::vector<Document> light)
      : dense_(rows, std::move(dense)), light_(rows, std::move(light)) {}

  int64_t area() const { return dense_.Area(dense_.num_rows()) + light_.Area(light_.num_rows()); }

  // Gives `tokens` rows to a rank, of which `area` is wanted; the area that it gets.
  int64_t Deal(int64_t rank, int64_t tokens, int64_t area, std::vector<RunPiece>* pieces) {
    const int64_t tolerance = std::abs(area) / kTolerance;
    Place mixed = Mix(tokens, area);
    for (int64_t i = 0; i < kMends && std::abs(mixed.miss) > tolerance; ++i) {
      Piles other = *this;
      if (!other.BringForward(mixed.miss < 0)) break;
      const Place found = other.Mix(tokens, area);
      if (std::abs(found.miss) >= std::abs(mixed.miss)) break;
      mixed = found;
      *this = std::move(other);
    }
    if (std::abs(mixed.miss) > tolerance) {
      const Place window = FindWindow(tokens, area);
      if (std::abs(window.miss) < std::abs(mixed.miss)) {
        const int64_t num_dense = dense_.num_rows(), num_rows = num_dense + light_.num_rows();
        const int64_t from = window.at, to = from + tokens;
        dense_.Take(from, std::min(to, num_dense), rank, pieces);
        light_.Take(num_rows - to, num_rows - std::max(from, num_dense), rank, pieces);
        return area + window.miss;
      }
    }
    dense_.Take(0, mixed.at, rank, pieces);
    light_.Take(0, tokens - mixed.at, rank, pieces);
    return area + mixed.miss;
  }

 private:
  // Rows of the dense pile among `tokens` first rows of both.
  Place Mix(int64_t tokens, int64_t area) const {
    const auto excess = [&](int64_t of_dense) {
      return dense_.Area(of_dense) + light_.Area(tokens - of_dense) - area;
    };
    return NearestToZero(excess, std::max<int64_t>(tokens - light_.num_rows(), 0),
                         std::min(tokens, dense_.num_rows()));
  }

  // Lets a document that is not begun come next: one that makes the dense pile denser, or the light
  // one lighter.
  bool BringForward(bool more) {
    double of_dense = 0.0, of_light = 0.0;
    const int64_t i = dense_.Extreme(more, &of_dense), j = light_.Extreme(more, &of_light);
    if (i < 0 && j < 0) return false;
    const bool is_dense = more ? of_dense >= of_light : of_dense <= of_light;
    const Document found = j < 0 || (i >= 0 && is_dense) ? dense_.Remove(i) : light_.Remove(j);
    (more ? dense_ : light_).PutFirst(found);
    return true;
  }

  // Neighbouring rows of the dense pile followed by the light one from its end: somewhere among
  // them are some of any mean.
  Place FindWindow(int64_t tokens, int64_t area) const {
    const int64_t num_dense = dense_.num_rows(), num_rows = num_dense + light_.num_rows();
    const int64_t all = this->area();
    const auto before = [&](int64_t row) {
      return row <= num_dense ? dense_.Area(row) : all - light_.Area(num_rows - row);
    };
    const auto excess = [&](int64_t row) { return before(row + tokens) - before(row) - area; };
    const int64_t step = std::max<int64_t>(tokens / kSteps, 1), last_row = num_rows - tokens;
    Place best = {0, excess(0)}, last = best;
    while (last.at < last_row) {
      const int64_t at = std::min(last.at + step, last_row);
      const Place found = {at, excess(at)};
      if ((found.miss < 0) != (last.miss < 0)) return Halve(excess, last, found);
      if (std::abs(found.miss) < std::abs(best.miss)) best = found;
      last = found;
    }
    return best;
  }

  Pile dense_, light_;
};

}  // namespace

int64_t RowAreas::Before(int64_t row) const {
  const int64_t i = LastNotAbove(at, num_points, row), n = row - at[i];
  return total[i] + keys[i] * n + slope[i] * (n * (n - 1) / 2);
}

std::vector<RunPiece> DealRuns(const RowAreas& rows, std::vector<Document> dense,
                               std::vector<Document> light, const std::vector<Share>& shares) {
  Piles piles(rows, std::move(dense), std::move(light));
  std::vector<RunPiece> pieces;
  int64_t left = piles.area(), ranks_left = static_cast<int64_t>(shares.size());
  for (const Share& share : shares) left += share.area;
  for (size_t rank = 0; rank < shares.size(); ++rank, --ranks_left) {
    const Share& share = shares[rank];
    const int64_t wanted = left / ranks_left - share.area;
    left -= share.area + piles.Deal(static_cast<int64_t>(rank), share.tokens, wanted, &pieces);
  }
  return pieces;
}

}  // namespace magi_jax::solver
