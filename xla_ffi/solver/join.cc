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
  if (last - first > 64) {
    if (!std::is_sorted(first, last, less)) std::sort(first, last, less);
    return;
  }
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

void AppendJoined(std::vector<BandSlice>* slices, int64_t group, std::vector<GroupedSlice>* out) {
  const auto bands = std::stable_partition(slices->begin(), slices->end(),
                                           [](const BandSlice& s) { return s.full(); });
  BandSlice *const first = slices->data(), *const others = first + (bands - slices->begin());
  BandSlice* last = others;
  Sort(first, last, ByQueries);
  last = Join<kKeys>(first, last);
  Sort(first, last, ByKeys);
  last = Join<kQueries>(first, last);
  for (const BandSlice* s = first; s != last; ++s) out->push_back({*s, group});
  Sort(others, first + slices->size(), ByKeys);
  for (const BandSlice* s = others; s != first + slices->size(); ++s) out->push_back({*s, group});
}

std::vector<GroupedSlice> JoinRectangles(const std::vector<GroupedSlice>& slices,
                                         int64_t num_groups) {
  std::vector<int64_t> ptr(num_groups + 1, 0);
  for (const GroupedSlice& each : slices) ++ptr[each.group + 1];
  std::partial_sum(ptr.begin(), ptr.end(), ptr.begin());
  std::vector<int64_t> place(ptr.begin(), ptr.end() - 1);
  std::vector<BandSlice> sorted(slices.size()), of_group;
  for (const GroupedSlice& each : slices) sorted[place[each.group]++] = each.slice;
  std::vector<GroupedSlice> out;
  out.reserve(slices.size());
  for (int64_t group = 0; group < num_groups; ++group) {
    of_group.assign(sorted.begin() + ptr[group], sorted.begin() + ptr[group + 1]);
    AppendJoined(&of_group, group, &out);
  }
  return out;
}

int64_t JoinDiagonals(const BandSlice* slices, int64_t num_slices, BandSlice* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_slices; ++i) {
    const BandSlice &s = slices[i], *const before = slices + i - 1;
    const bool goes_on = i > 0 && s.d_min == s.d_max && before->d_min == s.d_min &&
                         before->d_max == s.d_max && before->q_end == s.q_start;
    if (!goes_on && out != nullptr) out[count] = s;
    count += !goes_on;
    if (goes_on && out != nullptr) {
      out[count - 1].q_end = s.q_end;
      out[count - 1].k_end = s.k_end;
    }
  }
  return count;
}

}  // namespace magi_jax::solver
