// Placing units of a sequence on ranks: the data, free of Python and of XLA.
//
// Letters: U units, V spans, R ranks, D nodes, I need intervals. A unit is a run of tokens that
// moves as one. A span is a run of key rows that belong to one unit and that the same units need;
// spans which no other unit needs are left out, since they never cross ranks. See docs/planner.md.

#ifndef MAGI_JAX_XLA_FFI_SOLVER_PROBLEM_H_
#define MAGI_JAX_XLA_FFI_SOLVER_PROBLEM_H_

#include <cstdint>
#include <vector>

namespace magi_jax::solver {

struct Interval {
  int32_t begin, end;
};

struct Problem {
  const int64_t* area;  // [U] visible cells of the unit's queries
  const int32_t* size;  // [U] tokens; only units of one size are exchanged
  const int32_t*
      spare;  // [U] 1 = holds fewer tokens than its size; a rank gets at most one such unit
  const int32_t* rows;      // [V] key rows of the span
  const int32_t* span_ptr;  // [U + 1] spans span_ptr[u]:span_ptr[u + 1] belong to unit u
  const int32_t* need_ptr;  // [U + 1] intervals of `needs` of each unit
  const Interval*
      needs;          // [I] spans that the unit's queries see; rising and disjoint within a unit
  int32_t num_units;  // U
  int32_t num_spans;  // V
  int32_t num_ranks;  // R
  int32_t ranks_per_node;  // R / D; a multiple of it is R

  int32_t num_nodes() const { return num_ranks / ranks_per_node; }
  int32_t node(int32_t rank) const { return rank / ranks_per_node; }
};

// What each rank and node has to move, in key rows, and what each rank computes.
struct Loads {
  // [2 R + 2 D]: rows that each rank receives, rows that it sends (once per receiver), distinct
  // rows that enter each node, distinct rows that leave it (once per receiving node).
  std::vector<int64_t> rows;
  std::vector<int64_t> area;  // [R]
};

// How a greedy pass weighs key rows against area. All are relative to the mean of a rank.
struct GreedyWeights {
  double volume;      // of rows that the rank does not hold yet
  double held;        // of rows that the rank holds already, against `volume`
  double sent;        // of rows that the rank has to send already, against `volume`
  double node;        // of the rows that are new to the node, against `volume`
  double node_held;   // of the rows that the node holds already, against `node`
  double area_limit;  // area of a rank, over the mean, beyond which the cost rises steeply
};

struct Capacity {
  int64_t tokens;      // of each rank, a multiple of `slot`
  int32_t slot;        // tokens of a whole chunk
  int32_t part_slots;  // slots, over all ranks, that may be filled with parts of chunks
  double light_area;   // area of a slot's worth of light units: what still free room costs at least
};

struct RefineOptions {
  int64_t area_limit;  // area of a rank beyond which it is penalised
  int64_t moves;       // proposed exchanges
  uint64_t seed;
  double node_weight;  // of the loads of nodes against those of ranks
  double temperature;  // rise of the potential that is accepted at first; falls linearly to 0
  int64_t period;      // every so many proposals is a pair of exchanges; 0 = none
};

// Gives every unit of `order` (all U of them) to a rank; writes owner [U]. False when a unit finds
// no room. `node` [U], where it is not null, says to which node each unit goes.
bool Greedy(const Problem& problem, const int32_t* order, const Capacity& capacity,
            const GreedyWeights& weights, const int32_t* node, int32_t* owner);

// Deals all units out in the order of the sequence, heavy and light ones by turns, so that ranks
// and nodes hold few runs of them; writes owner [U]. False when places would be left half empty.
bool Deal(const Problem& problem, const Capacity& capacity, int32_t* owner);

// Improves owner [U] by exchanging pairs of units between ranks; returns its loads.
Loads Refine(const Problem& problem, const RefineOptions& options, int32_t* owner);

Loads Measure(const Problem& problem, const int32_t* owner);

}  // namespace magi_jax::solver

#endif  // MAGI_JAX_XLA_FFI_SOLVER_PROBLEM_H_
