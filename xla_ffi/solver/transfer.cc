#include "xla_ffi/solver/transfer.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace magi_jax::solver {

namespace {

// Places of pieces in the order of their ranks, those of one rank as they come.
std::vector<int64_t> ByRank(const int64_t* rank, const std::vector<int64_t>& order,
                            int64_t num_ranks) {
  std::vector<int64_t> place(num_ranks + 1, 0), out(order.size());
  for (int64_t i : order) ++place[rank[i] + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  for (int64_t i : order) out[place[rank[i]]++] = i;
  return out;
}

}  // namespace

TransferTables SortPieces(const Pieces& p, int64_t num_ranks) {
  TransferTables out = {};
  std::vector<int64_t> order(p.size), rows(num_ranks * num_ranks, 0), slot(p.size);
  std::iota(order.begin(), order.end(), 0);
  // Stable, so that pieces of one place keep their order; most come in this one already.
  const auto by_place = [&](int64_t a, int64_t b) {
    return std::tie(p.dst[a], p.dst_row[a]) < std::tie(p.dst[b], p.dst_row[b]);
  };
  if (!std::is_sorted(order.begin(), order.end(), by_place))
    std::stable_sort(order.begin(), order.end(), by_place);
  const std::vector<int64_t> by_sender = ByRank(p.src, order, num_ranks);
  out.send.reserve(p.size), out.send_rank.reserve(p.size);
  for (int64_t i : by_sender) {
    int64_t& pair = rows[p.src[i] * num_ranks + p.dst[i]];
    slot[i] = pair;
    pair += p.n_rows[i];
    out.send.push_back({p.dst[i], p.src_row[i], p.dst_row[i], p.n_rows[i], slot[i]});
    out.send_rank.push_back(p.src[i]);
    out.dst_rows = std::max(out.dst_rows, p.dst_row[i] + p.n_rows[i]);
  }
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t s = 0; s < num_ranks; ++s) {
      int64_t& most = r == s ? out.self_rows : out.pair_rows;
      most = std::max(most, rows[r * num_ranks + s]);
    }
  }
  // Pieces of one receiver and one row have the order of the senders.
  const auto strictly = [&](int64_t a, int64_t b) { return !by_place(a, b); };
  if (std::adjacent_find(order.begin(), order.end(), strictly) != order.end()) {
    order = ByRank(p.dst, by_sender, num_ranks);
    std::stable_sort(order.begin(), order.end(), by_place);
  }
  out.recv.reserve(p.size), out.recv_rank.reserve(p.size);
  for (int64_t i : order) {
    out.recv.push_back({p.src[i], p.src_row[i], p.dst_row[i], p.n_rows[i], slot[i]});
    out.recv_rank.push_back(p.dst[i]);
  }
  return out;
}

TwoSteps SplitSteps(const Pieces& p, int64_t ranks_per_node) {
  std::vector<int64_t> relay(p.size), order(p.size), row(p.size);
  for (int64_t i = 0; i < p.size; ++i)
    relay[i] = p.dst[i] / ranks_per_node * ranks_per_node + p.src[i] % ranks_per_node;
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::make_tuple(relay[a], p.src[a], p.src_row[a], a) <
           std::make_tuple(relay[b], p.src[b], p.src_row[b], b);
  });

  // Stretches of rows of one owner for one node that touch or overlap become one.
  TwoSteps out;
  StepPieces& across = out.across;
  int64_t held = 0;  // rows in the buffer of the relay
  for (int64_t k = 0; k < p.size; ++k) {
    const int64_t i = order[k], before = k > 0 ? order[k - 1] : i;
    const bool same_relay = k > 0 && relay[before] == relay[i];
    if (!same_relay) held = 0;
    const int64_t end = p.src_row[i] + p.n_rows[i];
    const bool joins = same_relay && p.src[before] == p.src[i] &&
                       p.src_row[i] <= across.src_row.back() + across.n_rows.back();
    if (!joins) {
      across.src.push_back(p.src[i]);
      across.dst.push_back(relay[i]);
      across.src_row.push_back(p.src_row[i]);
      across.dst_row.push_back(held);
      across.n_rows.push_back(0);
    }
    const int64_t rows = std::max(end - across.src_row.back(), across.n_rows.back());
    held += rows - across.n_rows.back();
    across.n_rows.back() = rows;
    row[i] = across.dst_row.back() + p.src_row[i] - across.src_row.back();
  }
  out.within = {std::move(relay),
                {p.dst, p.dst + p.size},
                std::move(row),
                {p.dst_row, p.dst_row + p.size},
                {p.n_rows, p.n_rows + p.size}};
  return out;
}

}  // namespace magi_jax::solver
