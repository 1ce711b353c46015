#include "xla_ffi/solver/bind_documents.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "xla_ffi/solver/arrays.h"
#include "xla_ffi/solver/bins.h"
#include "xla_ffi/solver/documents.h"
#include "xla_ffi/solver/runs.h"
#include "xla_ffi/solver/units.h"

namespace magi_jax::solver {
namespace {

// (area [U], rows [V], span_ptr [U + 1], reader [I], spans [I, 2], total_rows [U]): see units.h.
py::tuple RunUnitNeeds(const Ints& slices, const Ints& edges) {
  static_assert(sizeof(SpanInterval) == 2 * sizeof(int64_t));
  Require(edges.size() > 0 && std::is_sorted(edges.data(), edges.data() + edges.size()),
          "edges of units must rise");
  const UnitNeeds needs =
      FindNeeds(RowsOf<BandSlice>(slices), slices.size() / 6, edges.data(), edges.size() - 1);
  return py::make_tuple(Column(needs.area), Column(needs.rows), Column(needs.span_ptr),
                        Column(needs.reader), Table(needs.spans), Column(needs.total_rows));
}

// (documents [D] of one bin after the other, edges [N + 1], what each lacks of its weight [N] and
// of its tokens [N]).
py::tuple RunPackBins(const Ints& size, const Ints& weight, const Array<bool>& is_light,
                      const Ints& tokens, int64_t share, bool settles) {
  const int64_t count = size.size(), num_bins = tokens.size();
  Require(weight.size() == count && is_light.size() == count && count <= INT32_MAX,
          "arrays of documents do not fit together");
  Require(num_bins > 0 && share > 0, "bins need room");
  Bins bins({size.data(), weight.data(), is_light.data(), count}, tokens.data(), num_bins, share);
  bins.Fill();
  if (settles) bins.Settle();
  std::vector<int64_t> documents, edges = {0};
  for (const std::vector<int32_t>& held : bins.held()) {
    documents.insert(documents.end(), held.begin(), held.end());
    edges.push_back(static_cast<int64_t>(documents.size()));
  }
  return py::make_tuple(Column(documents), Column(edges), Column(bins.room()), Column(bins.left()));
}

// (edges [G + 1], area [G], long_slices [L]): see documents.h.
py::tuple RunGroupDocuments(const Ints& slices, int64_t seq_len, int64_t step) {
  Require(step >= 1, "a step has at least one row");
  const DocumentGroups groups =
      GroupDocuments(RowsOf<BandSlice>(slices), slices.size() / 6, seq_len, step);
  return py::make_tuple(Column(groups.edges), Column(groups.area), Column(groups.long_slices));
}

std::vector<Document> DocumentsOf(const Ints& table, int64_t num_rows) {
  struct Row {
    int64_t begin, end, folded;
  };
  const auto* rows = RowsOf<Row>(table);
  std::vector<Document> out;
  for (const Row* row = rows; row != rows + table.size() / 3; ++row) {
    Require(row->begin >= 0 && row->begin < row->end && row->end <= num_rows,
            "a document lies outside of the sequence");
    out.push_back({row->begin, row->end, 0, row->end - row->begin, row->folded});
  }
  return out;
}

// Pieces (begin, size, rank) [N, 3] of documents (begin, end, folded) [D, 3] that are dealt to
// ranks of shares (tokens, area) [R, 2]: see runs.h. `rows` is [4, P].
Ints RunDealRuns(const Ints& rows, const Ints& dense, const Ints& light, const Ints& shares) {
  Require(rows.ndim() == 2 && rows.shape(0) == 4 && rows.shape(1) > 0 && rows.data()[0] == 0 &&
              std::is_sorted(rows.data(), rows.data() + rows.shape(1)),
          "rows [4, P] must begin at 0 and rise");
  const int64_t points = rows.shape(1);
  const RowAreas areas = {rows.data(), rows.data() + points, rows.data() + 2 * points,
                          rows.data() + 3 * points, points};
  const int64_t num_rows = rows.data()[points - 1];
  std::vector<Document> first = DocumentsOf(dense, num_rows), second = DocumentsOf(light, num_rows);
  const auto* parts = RowsOf<Share>(shares);
  const std::vector<Share> of_ranks(parts, parts + shares.size() / 2);
  int64_t tokens = 0;
  for (const Share& share : of_ranks) {
    Require(share.tokens >= 0, "a rank has no fewer than 0 tokens");
    tokens += share.tokens;
  }
  for (const auto& pile : {first, second})
    for (const Document& d : pile) tokens -= d.size();
  Require(tokens == 0, "tokens of ranks must add up to those of the piles");
  return Table(DealRuns(areas, std::move(first), std::move(second), of_ranks));
}

}  // namespace

void BindDocuments(py::module_& m) {
  m.def("unit_needs", &RunUnitNeeds);
  m.def("document_groups", &RunGroupDocuments);
  m.def("pack_bins", &RunPackBins);
  m.def("deal_runs", &RunDealRuns);
}

}  // namespace magi_jax::solver
