#include "xla_ffi/solver/join.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace magi_jax::solver {
namespace {

bool ByQueries(const BandSlice& a, const BandSlice& b) {
  return std::tie(a.q_start, a.q_end, a.k_start) < std::tie(b.q_start, b.q_end, b.k_start);
}

bool ByKeys(const BandSlice& a, const BandSlice& b) {
  return std::tie(a.k_start, a.k_end, a.q_start) < std::tie(b.k_start, b.k_end, b.q_start);
}

// Groups are small as a rule, and nearly in order. No two slices are alike, since none share a
// cell.
template <typename Less>
void Sort(BandSlice* first, BandSlice* last, const Less& less) {
  if (last - first > 64) return std::sort(first, last, less);
  for (BandSlice* i = first; i < last; ++i) {
    if (i == first || !less(*i, i[-1])) continue;
    const BandSlice slice = *i;
    BandSlice* j = i;
    for (; j > first && less(slice, j[-1]); --j) *j = j[-1];
    *j = slice;
  }
}

// An axis along which rectangles are joined: where they begin and end on it, where on the other,
// which has to be the same, and the diagonal that moves with the end.
struct Axis {
  int64_t BandSlice::* start;
  int64_t BandSlice::* end;
  int64_t BandSlice::* other_start;
  int64_t BandSlice::* other_end;
  int64_t BandSlice::* diagonal;
};

constexpr Axis kKeys{&BandSlice::k_start, &BandSlice::k_end, &BandSlice::q_start, &BandSlice::q_end,
                     &BandSlice::d_max};
constexpr Axis kQueries{&BandSlice::q_start, &BandSlice::q_end, &BandSlice::k_start,
                        &BandSlice::k_end, &BandSlice::d_min};

// Of rectangles sorted by the other axis, in place; returns the new end.
template <const Axis& axis>
BandSlice* Join(BandSlice* first, BandSlice* last) {
  BandSlice* out = first;
  for (BandSlice* slice = first; slice != last; ++slice) {
    BandSlice* before = out - 1;
    if (out != first && before->*axis.other_start == slice->*axis.other_start &&
        before->*axis.other_end == slice->*axis.other_end &&
        before->*axis.end == slice->*axis.start) {
      before->*axis.end = slice->*axis.end;
      before->*axis.diagonal = slice->*axis.diagonal;
    } else {
      *out++ = *slice;
    }
  }
  return out;
}

}  // namespace

std::vector<GroupedSlice> JoinRectangles(const std::vector<GroupedSlice>& slices,
                                         int64_t num_groups) {
  // Places of groups: rectangles of group g at [ptr[2 g], ptr[2 g + 1]), its other slices behind.
  std::vector<int64_t> ptr(2 * num_groups + 1, 0);
  const auto kind = [](const GroupedSlice& each) { return 2 * each.group + !each.slice.full(); };
  for (const GroupedSlice& each : slices) ++ptr[kind(each) + 1];
  std::partial_sum(ptr.begin(), ptr.end(), ptr.begin());
  std::vector<int64_t> place(ptr.begin(), ptr.end() - 1);
  std::vector<BandSlice> sorted(slices.size());
  for (const GroupedSlice& each : slices) sorted[place[kind(each)]++] = each.slice;
  std::vector<GroupedSlice> out;
  out.reserve(slices.size());
  for (int64_t part = 0; part < 2 * num_groups; ++part) {
    BandSlice *first = sorted.data() + ptr[part], *last = sorted.data() + ptr[part + 1];
    if (part % 2 == 0) {
      Sort(first, last, ByQueries);
      last = Join<kKeys>(first, last);
    }
    Sort(first, last, ByKeys);
    if (part % 2 == 0) last = Join<kQueries>(first, last);
    for (; first != last; ++first) out.push_back({*first, part / 2});
  }
  return out;
}

}  // namespace magi_jax::solver
