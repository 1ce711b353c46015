#include "xla_ffi/solver/bins.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

namespace magi_jax::solver {
namespace {

// The constants of bins.py.
constexpr int64_t kFew = 24, kFewBins = 8, kPartners = 4, kClose = 500, kFar = 20, kAnyhow = 4;

}  // namespace

Bins::Bins(const BinDocuments& documents, const int64_t* tokens, int64_t num_bins, int64_t share)
    : documents_(documents),
      share_(share),
      room_(num_bins, share),
      left_(tokens, tokens + num_bins),
      held_(num_bins),
      known_(num_bins) {}

void Bins::Fill() {
  std::vector<int32_t> order(documents_.count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return documents_.weight[a] > documents_.weight[b];
  });
  for (const bool light : {false, true}) {
    const std::vector<int64_t>& lacks = light ? left_ : room_;
    const int64_t* amount = light ? documents_.size : documents_.weight;
    using Entry = std::pair<int64_t, int64_t>;  // what a bin has more than is wanted, and the bin
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> emptiest;
    for (size_t i = 0; i < lacks.size(); ++i) emptiest.push({-lacks[i], i});
    for (const int32_t document : order) {
      if (documents_.is_light[document] != light) continue;
      const auto [load, bin] = emptiest.top();
      emptiest.pop();
      emptiest.push({load + amount[document], bin});
      held_[bin].push_back(document);
      room_[bin] -= documents_.weight[document];
      left_[bin] -= documents_.size[document];
    }
  }
}

void Bins::Settle() {
  const auto num_bins = static_cast<int64_t>(held_.size());
  std::vector<int64_t> waiting(num_bins);
  std::iota(waiting.begin(), waiting.end(), 0);
  std::stable_sort(waiting.begin(), waiting.end(),
                   [&](int64_t a, int64_t b) { return std::abs(room_[a]) > std::abs(room_[b]); });
  while (waiting.size() > 1) {
    const int64_t at = waiting.front();
    waiting.erase(waiting.begin());
    // Those that have most to give of what it lacks.
    const int64_t sign = room_[at] >= 0 ? 1 : -1;
    std::sort(waiting.begin(), waiting.end(), [&](int64_t a, int64_t b) {
      return std::pair(room_[a] * sign, a) < std::pair(room_[b] * sign, b);
    });
    for (size_t i = 0; i < std::min<size_t>(waiting.size(), kPartners); ++i) {
      if (left_[at] == 0 && std::abs(room_[at]) <= share_ / kClose) break;
      const int64_t most = left_[at] != 0 ? share_ / kFar : std::abs(room_[at]);
      Exchange(at, waiting[i], left_[at], room_[at], most);
    }
  }
  std::vector<int64_t> over;
  for (int64_t i = 0; i < num_bins; ++i)
    if (left_[i] != 0 && over.size() < kFewBins) over.push_back(i);
  for (const int64_t at : over)
    for (const int64_t partner : over) {
      if (at == partner || left_[at] == 0 || left_[partner] == 0) continue;
      // Rounded down, as everywhere in Python.
      Exchange(at, partner, left_[at], (room_[at] - room_[partner]) >> 1, share_ / kAnyhow);
    }
  for (int64_t i = 0; i < num_bins && Relieve(); ++i) {
  }
}

bool Bins::Relieve() {
  std::vector<int64_t> order(held_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return room_[a] < room_[b]; });
  const int64_t at = order.front();
  if (-room_[at] <= share_ / kClose) return false;
  const auto last = static_cast<int64_t>(order.size()) - 1;
  for (int64_t i = last; i > std::max<int64_t>(last - kPartners, 0); --i) {
    const int64_t gap = (room_[order[i]] - room_[at]) >> 1;
    if (gap > 0 && Exchange(at, order[i], 0, -gap, gap)) return true;
  }
  return false;
}

bool Bins::Exchange(int64_t at, int64_t partner, int64_t tokens, int64_t weight, int64_t most) {
  using Set = DocumentSets::Set;
  const DocumentSets& mine = SetsOf(at);
  const DocumentSets& theirs = SetsOf(partner);
  const Set *given = nullptr, *got = nullptr;
  int64_t least = most;
  // Of sets that fit equally well the first counts, those next below before those next above.
  for (const bool above : {false, true})
    for (const Set& set : mine.made) {
      const int64_t size = set.size + tokens, wanted = set.weight + weight;
      auto next = std::lower_bound(
          theirs.sorted.begin(), theirs.sorted.end(), std::pair(size, wanted),
          [](const Set& a, const auto& b) { return std::pair(a.size, a.weight) < b; });
      if (above ? next == theirs.sorted.end() : next != theirs.sorted.begin()) --next;
      if (next->size != size) continue;
      const int64_t miss = std::abs(next->weight - wanted);
      if (miss >= least) continue;
      least = miss;
      given = &set;
      got = &*next;
    }
  if (given == nullptr) return false;
  const std::array<int32_t, 3> there = given->documents, back = got->documents;
  known_[at].reset();
  known_[partner].reset();
  Move(at, partner, there);
  Move(partner, at, back);
  return true;
}

const DocumentSets& Bins::SetsOf(int64_t bin) {
  if (known_[bin]) return *known_[bin];
  const std::vector<int32_t>& held = held_[bin];
  const auto number = static_cast<int64_t>(held.size());
  std::vector<int32_t> few;
  for (int64_t i = 0; i < std::min(number, kFew); ++i)
    few.push_back(number > kFew ? held[i * number / kFew] : held[i]);
  const auto count = static_cast<int64_t>(few.size());
  DocumentSets sets;
  const auto add = [&](std::array<int32_t, 3> documents) {
    int64_t size = 0, weight = 0;
    for (const int32_t document : documents) {
      if (document < 0) continue;
      size += documents_.size[document];
      weight += documents_.weight[document];
    }
    sets.made.push_back({size, weight, static_cast<int32_t>(sets.made.size()), documents});
  };
  add({-1, -1, -1});
  for (int64_t i = 0; i < count; ++i) add({few[i], -1, -1});
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = i + 1; j < count; ++j) add({few[i], few[j], -1});
  if (static_cast<int64_t>(held_.size()) <= kFewBins)
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = i + 1; j < count; ++j)
        for (int64_t k = j + 1; k < count; ++k) add({few[i], few[j], few[k]});
  sets.sorted = sets.made;
  std::sort(sets.sorted.begin(), sets.sorted.end(), [](const auto& a, const auto& b) {
    return std::tuple(a.size, a.weight, a.index) < std::tuple(b.size, b.weight, b.index);
  });
  return known_[bin].emplace(std::move(sets));
}

void Bins::Move(int64_t from, int64_t to, const std::array<int32_t, 3>& documents) {
  for (const int32_t document : documents) {
    if (document < 0) continue;
    std::vector<int32_t>& held = held_[from];
    held.erase(std::find(held.begin(), held.end(), document));
    held_[to].push_back(document);
    room_[from] += documents_.weight[document];
    left_[from] += documents_.size[document];
    room_[to] -= documents_.weight[document];
    left_[to] -= documents_.size[document];
  }
}

}  // namespace magi_jax::solver
