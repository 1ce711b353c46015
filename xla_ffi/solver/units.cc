#include "xla_ffi/solver/units.h"

#include <algorithm>
#include <numeric>

namespace magi_jax::solver {
namespace {

struct Keys {
  int64_t begin, end;
};

// Keys that each unit sees, unit by unit: maximal intervals, rising.
struct UnitKeys {
  std::vector<Keys> keys;
  std::vector<int64_t> ptr;  // [U + 1]
};

// What a unit sees of one slice.
struct Seen {
  int64_t unit;
  Keys keys;
};

UnitKeys CutAtUnits(const BandSlice* slices, int64_t num_slices, const int64_t* edges,
                    int64_t num_units, std::vector<int64_t>* area) {
  UnitKeys out;
  out.ptr.assign(num_units + 1, 0);
  std::vector<Seen> seen;
  seen.reserve(num_slices + num_units);
  for (const BandSlice* s = slices; s != slices + num_slices; ++s) {
    int64_t u = std::upper_bound(edges + 1, edges + num_units + 1, s->q_start) - (edges + 1);
    for (; u < num_units && edges[u] < s->q_end; ++u) {
      const BandSlice cut = ClipQueries(*s, edges[u], edges[u + 1]);
      if (!cut.visible()) continue;
      (*area)[u] += Area(cut);
      seen.push_back({u, {cut.k_start, cut.k_end}});
      ++out.ptr[u + 1];
    }
  }
  std::partial_sum(out.ptr.begin(), out.ptr.end(), out.ptr.begin());
  std::vector<Keys> keys(seen.size());
  std::vector<int64_t> place(out.ptr.begin(), out.ptr.end() - 1);
  for (const Seen& each : seen) keys[place[each.unit]++] = each.keys;
  out.keys.reserve(keys.size());
  for (int64_t u = 0; u < num_units; ++u) {
    const auto first = keys.begin() + out.ptr[u], last = keys.begin() + out.ptr[u + 1];
    out.ptr[u] = static_cast<int64_t>(out.keys.size());
    if (last - first > 1)
      std::sort(first, last, [](const Keys& a, const Keys& b) { return a.begin < b.begin; });
    for (auto each = first; each != last;) {
      Keys joined = *each;
      for (++each; each != last && each->begin <= joined.end; ++each)
        joined.end = std::max(joined.end, each->end);
      out.keys.push_back(joined);
    }
  }
  out.ptr[num_units] = static_cast<int64_t>(out.keys.size());
  return out;
}

}  // namespace

UnitNeeds FindNeeds(const BandSlice* slices, int64_t num_slices, const int64_t* edges,
                    int64_t num_units) {
  UnitNeeds out;
  out.area.assign(num_units, 0);
  out.total_rows.assign(num_units, 0);
  const UnitKeys seen = CutAtUnits(slices, num_slices, edges, num_units, &out.area);

  // Spans lie between neighbouring points: edges of units, and of what they see.
  std::vector<int64_t> inner;
  for (int64_t u = 0; u < num_units; ++u) {
    for (int64_t i = seen.ptr[u]; i < seen.ptr[u + 1]; ++i) {
      const Keys& keys = seen.keys[i];
      if (keys.begin != edges[u]) inner.push_back(keys.begin);
      if (keys.end != edges[u + 1]) inner.push_back(keys.end);
    }
  }
  std::sort(inner.begin(), inner.end());
  std::vector<int64_t> points(inner.size() + num_units + 1);
  std::merge(inner.begin(), inner.end(), edges, edges + num_units + 1, points.begin());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  std::vector<int64_t> edge_place(num_units + 1);
  for (int64_t u = 0, place = 0; u <= num_units; ++u) {
    while (points[place] < edges[u]) ++place;
    edge_place[u] = place;
  }
  const auto place_of = [&](int64_t point, int64_t u) {
    if (point == edges[u]) return edge_place[u];
    if (point == edges[u + 1]) return edge_place[u + 1];
    return std::lower_bound(points.begin(), points.end(), point) - points.begin();
  };

  // Readers of each span other than the unit that owns it; only spans that have some are kept.
  std::vector<int64_t> readers(points.size(), 0);
  std::vector<SpanInterval> places;
  for (int64_t u = 0; u < num_units; ++u) {
    for (int64_t i = seen.ptr[u]; i < seen.ptr[u + 1]; ++i) {
      const Keys& keys = seen.keys[i];
      out.total_rows[u] += keys.end - keys.begin;
      places.push_back({place_of(keys.begin, u), place_of(keys.end, u)});
      ++readers[places.back().begin];
      --readers[places.back().end];
      const int64_t own_begin = std::max(keys.begin, edges[u]);
      const int64_t own_end = std::min(keys.end, edges[u + 1]);
      if (own_begin >= own_end) continue;
      --readers[place_of(own_begin, u)];
      ++readers[place_of(own_end, u)];
    }
  }
  std::partial_sum(readers.begin(), readers.end(), readers.begin());
  std::vector<int64_t> span_at(points.size() + 1, 0);
  for (size_t p = 0; p < points.size(); ++p) {
    const bool travels = readers[p] > 0;
    if (travels) out.rows.push_back(points[p + 1] - points[p]);
    span_at[p + 1] = span_at[p] + travels;
  }
  for (int64_t u = 0; u <= num_units; ++u) out.span_ptr.push_back(span_at[edge_place[u]]);
  for (int64_t u = 0; u < num_units; ++u) {
    for (int64_t i = seen.ptr[u]; i < seen.ptr[u + 1]; ++i) {
      const SpanInterval spans = {span_at[places[i].begin], span_at[places[i].end]};
      if (spans.begin >= spans.end) continue;
      out.reader.push_back(u);
      out.spans.push_back(spans);
    }
  }
  return out;
}

}  // namespace magi_jax::solver
