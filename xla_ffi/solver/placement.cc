#include "xla_ffi/solver/placement.h"

#include <algorithm>

namespace magi_jax::solver {
namespace {

// The parts of rising, disjoint intervals a that no interval of b covers.
void Subtract(const Interval* a, const Interval* a_end, const Interval* b, const Interval* b_end,
              std::vector<Interval>* out) {
  out->clear();
  for (; a != a_end; ++a) {
    int32_t begin = a->begin;
    while (b != b_end && b->end <= begin) ++b;
    for (const Interval* c = b; c != b_end && c->begin < a->end; ++c) {
      if (c->begin > begin) out->push_back({begin, c->begin});
      begin = std::max(begin, c->end);
    }
    if (begin < a->end) out->push_back({begin, a->end});
  }
}

}  // namespace

Placement::Placement(const Problem& problem, const int32_t* owner)
    : change(2 * problem.num_ranks + 2 * problem.num_nodes(), 0),
      p_(problem),
      node_of_(problem.num_ranks),
      owner_(owner, owner + problem.num_units),
      span_owner_(problem.num_spans),
      counts_(static_cast<size_t>(problem.num_ranks) * problem.num_spans, 0),
      node_counts_(static_cast<size_t>(problem.num_nodes()) * problem.num_spans, 0),
      ranks_(problem.num_spans, 0),
      nodes_(problem.num_spans, 0),
      loads_(change.size(), 0),
      area_(problem.num_ranks, 0),
      marked_(change.size(), 0) {
  for (int32_t r = 0; r < p_.num_ranks; ++r) node_of_[r] = p_.node(r);
  for (int32_t u = 0; u < p_.num_units; ++u) {
    area_[owner_[u]] += p_.area[u];
    for (int32_t v = p_.span_ptr[u]; v < p_.span_ptr[u + 1]; ++v) span_owner_[v] = owner_[u];
  }
  for (int32_t u = 0; u < p_.num_units; ++u) {
    const int32_t r = owner_[u], n = node_of_[r];
    int32_t *needed = counts(r), *by_node = node_counts(n);
    for (int32_t i = p_.need_ptr[u]; i < p_.need_ptr[u + 1]; ++i) {
      for (int32_t v = p_.needs[i].begin; v < p_.needs[i].end; ++v) {
        if (needed[v]++ > 0) continue;
        const int32_t home = span_owner_[v];
        const int64_t rows = p_.rows[v];
        ++ranks_[v];
        if (home != r) loads_[recv(r)] += rows, loads_[send(home)] += rows;
        if (by_node[v]++ > 0) continue;
        ++nodes_[v];
        const int32_t home_node = node_of_[home];
        if (home_node != n) loads_[node_recv(n)] += rows, loads_[node_send(home_node)] += rows;
      }
    }
  }
}

bool Placement::Needs(int32_t unit, int32_t span) const {
  for (int32_t i = p_.need_ptr[unit]; i < p_.need_ptr[unit + 1]; ++i)
    if (span >= p_.needs[i].begin && span < p_.needs[i].end) return true;
  return false;
}

void Placement::Differences(int32_t u, int32_t v) {
  const Interval *u_begin = p_.needs + p_.need_ptr[u], *u_end = p_.needs + p_.need_ptr[u + 1];
  const Interval *v_begin = p_.needs + p_.need_ptr[v], *v_end = p_.needs + p_.need_ptr[v + 1];
  Subtract(u_begin, u_end, v_begin, v_end, &only_u_);
  Subtract(v_begin, v_end, u_begin, u_end, &only_v_);
}

// A need for `spans` moves from one rank to another. Spans of u and v, whose owner changes too, are
// left to PriceOwned.
void Placement::PriceNeeds(const std::vector<Interval>& spans, int32_t from, int32_t to, int32_t u,
                           int32_t v) {
  const int32_t *at_from = counts(from), *at_to = counts(to);
  const int32_t n = node_of_[from], m = node_of_[to];
  const int32_t *at_n = node_counts(n), *at_m = node_counts(m);
  for (const Interval& interval : spans) {
    for (int32_t a = interval.begin; a < interval.end; ++a) {
      const bool lost = at_from[a] == 1, gained = at_to[a] == 0;
      if (!lost && !gained) continue;
      if ((a >= p_.span_ptr[u] && a < p_.span_ptr[u + 1]) ||
          (a >= p_.span_ptr[v] && a < p_.span_ptr[v + 1]))
        continue;
      const int64_t rows = p_.rows[a];
      const int32_t home = span_owner_[a];
      if (lost && home != from) Add(recv(from), -rows), Add(send(home), -rows);
      if (gained && home != to) Add(recv(to), rows), Add(send(home), rows);
      if (n == m && lost && gained) continue;  // the node needs it as before
      const int32_t home_node = node_of_[home];
      if (lost && at_n[a] == 1 && home_node != n)
        Add(node_recv(n), -rows), Add(node_send(home_node), -rows);
      if (gained && at_m[a] == 0 && home_node != m)
        Add(node_recv(m), rows), Add(node_send(home_node), rows);
    }
  }
}

// The spans of `unit` change their owner, while their needs on both ranks may change as well.
void Placement::PriceOwned(int32_t unit, int32_t other, int32_t from, int32_t to) {
  const int32_t n = node_of_[from], m = node_of_[to];
  for (int32_t a = p_.span_ptr[unit]; a < p_.span_ptr[unit + 1]; ++a) {
    const int64_t rows = p_.rows[a];
    const int32_t moved = Needs(unit, a) - Needs(other, a);
    const int32_t old_from = counts(from)[a] > 0, old_to = counts(to)[a] > 0;
    const int32_t new_from = counts(from)[a] - moved > 0, new_to = counts(to)[a] + moved > 0;
    const int32_t ranks = ranks_[a] + new_from - old_from + new_to - old_to;
    Add(send(from), -rows * (ranks_[a] - old_from));
    Add(send(to), rows * (ranks - new_to));
    Add(recv(from), rows * new_from);
    Add(recv(to), -rows * old_to);
    if (n == m) continue;
    const int32_t count_n = node_counts(n)[a], count_m = node_counts(m)[a];
    const int32_t old_n = count_n > 0, new_n = count_n + new_from - old_from > 0;
    const int32_t old_m = count_m > 0, new_m = count_m + new_to - old_to > 0;
    const int32_t nodes = nodes_[a] + new_n - old_n + new_m - old_m;
    Add(node_send(n), -rows * (nodes_[a] - old_n));
    Add(node_send(m), rows * (nodes - new_m));
    Add(node_recv(n), rows * new_n);
    Add(node_recv(m), -rows * old_m);
  }
}

void Placement::Price(int32_t u, int32_t v) {
  const int32_t r = owner_[u], s = owner_[v];
  Differences(u, v);
  PriceNeeds(only_u_, r, s, u, v);
  PriceNeeds(only_v_, s, r, u, v);
  PriceOwned(u, v, r, s);
  PriceOwned(v, u, s, r);
}

void Placement::MoveNeeds(const std::vector<Interval>& spans, int32_t from, int32_t to) {
  int32_t *at_from = counts(from), *at_to = counts(to);
  int32_t *at_n = node_counts(node_of_[from]), *at_m = node_counts(node_of_[to]);
  for (const Interval& interval : spans) {
    for (int32_t a = interval.begin; a < interval.end; ++a) {
      if (--at_from[a] == 0) {
        --ranks_[a];
        if (--at_n[a] == 0) --nodes_[a];
      }
      if (at_to[a]++ == 0) {
        ++ranks_[a];
        if (at_m[a]++ == 0) ++nodes_[a];
      }
    }
  }
}

void Placement::Apply(int32_t u, int32_t v) {
  const int32_t r = owner_[u], s = owner_[v];
  MoveNeeds(only_u_, r, s);
  MoveNeeds(only_v_, s, r);
  std::swap(owner_[u], owner_[v]);
  for (int32_t a = p_.span_ptr[u]; a < p_.span_ptr[u + 1]; ++a) span_owner_[a] = s;
  for (int32_t a = p_.span_ptr[v]; a < p_.span_ptr[v + 1]; ++a) span_owner_[a] = r;
  area_[r] += p_.area[v] - p_.area[u];
  area_[s] += p_.area[u] - p_.area[v];
  for (int32_t i : touched) loads_[i] += change[i];
}

void Placement::Forget() {
  for (int32_t i : touched) change[i] = 0, marked_[i] = 0;
  touched.clear();
}

Loads Measure(const Problem& problem, const int32_t* owner) {
  const Placement placement(problem, owner);
  return {placement.loads(), placement.area()};
}

}  // namespace magi_jax::solver
