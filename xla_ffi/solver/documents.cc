#include "xla_ffi/solver/documents.h"

#include <algorithm>
#include <numeric>

namespace magi_jax::solver {
namespace {

int64_t BeginOf(const BandSlice& s) { return std::min(s.q_start, s.k_start); }
int64_t EndOf(const BandSlice& s) { return std::max(s.q_end, s.k_end); }

// Builds groups of documents that come one after the other.
class Grouping {
 public:
  Grouping(int64_t step, DocumentGroups* out) : step_(step), out_(out) {}

  // Rows [begin, end) are a document of this area; returns whether it is long.
  bool Add(int64_t begin, int64_t end, int64_t area) {
    if (begin == end) return false;
    const bool is_long = end - begin > step_;
    const int64_t cell = begin / step_;
    if (is_long || cell != last_cell_) {
      out_->edges.push_back(begin);
      out_->area.push_back(0);
    }
    last_cell_ = cell;
    if (!is_long) out_->area.back() += area;
    return is_long;
  }

 private:
  int64_t step_, last_cell_ = -1;
  DocumentGroups* out_;
};

}  // namespace

DocumentGroups GroupDocuments(const BandSlice* slices, int64_t num_slices, int64_t seq_len,
                              int64_t step) {
  DocumentGroups out;
  Grouping grouping(step, &out);
  std::vector<int64_t> order(num_slices);
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int64_t a, int64_t b) { return BeginOf(slices[a]) < BeginOf(slices[b]); };
  if (!std::is_sorted(order.begin(), order.end(), before))
    std::stable_sort(order.begin(), order.end(), before);
  int64_t reach = 0;
  for (auto first = order.begin(); first != order.end();) {
    const int64_t begin = BeginOf(slices[*first]);
    grouping.Add(reach, begin, 0);  // rows that see nothing
    reach = begin;
    int64_t area = 0;
    auto last = first;
    // Every slice reaches beyond where it begins, so that a document has at least one.
    for (; last != order.end() && (last == first || BeginOf(slices[*last]) < reach); ++last) {
      reach = std::max(reach, EndOf(slices[*last]));
      area += Area(slices[*last]);
    }
    if (grouping.Add(begin, reach, area))
      out.long_slices.insert(out.long_slices.end(), first, last);
    first = last;
  }
  grouping.Add(reach, seq_len, 0);
  out.edges.push_back(seq_len);
  std::sort(out.long_slices.begin(), out.long_slices.end());
  return out;
}

}  // namespace magi_jax::solver
