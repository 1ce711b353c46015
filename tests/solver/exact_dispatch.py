"""The best placement of a few units, by integer programming: an oracle for the dispatcher and its bounds."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from magi_jax.solver.dispatch.units import Units


def least_rank_rows(  # noqa: C901 - a list of constraints, one after another
    units: Units, num_ranks: int, area_limit: float
) -> tuple[int, np.ndarray]:
    """The least possible value of the most rows that a rank receives or sends.

    Variables: unit ``u`` on rank ``r``; span ``a`` received by ``r``; span ``a`` sent to ``r`` by ``o``; the
    largest load.

    Args:
        units: what to place, with equal sizes and no blanks.
        num_ranks: ranks, each of which takes ``units.slots`` units.
        area_limit: area of a rank at most.

    Returns:
        (rows, owner of each unit).
    """
    num_units, num_spans, ranks = len(units.area), len(units.rows), range(num_ranks)
    home = np.repeat(np.arange(num_units), np.diff(units.span_ptr))

    def placed(u, r):
        return u * num_ranks + r

    def received(a, r):
        return num_units * num_ranks + a * num_ranks + r

    def sent(a, r, o):
        return (num_units + num_spans) * num_ranks + (a * num_ranks + r) * num_ranks + o

    num_variables = (num_units + num_spans + num_spans * num_ranks) * num_ranks + 1
    load = num_variables - 1
    rows, low, high = [], [], []

    def add(terms, least, most):
        rows.append(terms)
        low.append(least)
        high.append(most)

    for u in range(num_units):
        add({placed(u, r): 1 for r in ranks}, 1, 1)
    for r in ranks:
        add({placed(u, r): 1 for u in range(num_units)}, units.slots, units.slots)
        add({placed(u, r): float(units.area[u]) for u in range(num_units)}, 0, area_limit)
        incoming = {received(a, r): float(units.rows[a]) for a in range(num_spans)}
        add(incoming | {load: -1}, -np.inf, 0)
        outgoing = {sent(a, to, r): float(units.rows[a]) for a in range(num_spans) for to in ranks}
        add(outgoing | {load: -1}, -np.inf, 0)
    for u in range(num_units):
        for begin, end in units.needs[units.need_ptr[u] : units.need_ptr[u + 1]]:
            for a in range(begin, end):
                if home[a] != u:
                    for r in ranks:
                        terms = {received(a, r): 1, placed(u, r): -1, placed(home[a], r): 1}
                        add(terms, 0, np.inf)
    for a in range(num_spans):
        for r in ranks:
            for o in ranks:
                add({sent(a, r, o): 1, received(a, r): -1, placed(home[a], o): -1}, -1, np.inf)

    matrix = lil_matrix((len(rows), num_variables))
    for i, terms in enumerate(rows):
        for variable, factor in terms.items():
            matrix[i, variable] = factor
    cost = np.zeros(num_variables)
    cost[load] = 1
    upper = np.ones(num_variables)
    upper[load] = np.inf
    integral = np.zeros(num_variables)
    integral[: num_units * num_ranks] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=integral,
        bounds=Bounds(np.zeros(num_variables), upper),
    )
    assert result.success, result.message
    owner = result.x[: num_units * num_ranks].reshape(num_units, num_ranks).argmax(axis=1)
    return round(result.fun), owner.astype(np.int32)
