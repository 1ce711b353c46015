"""Joins, unions and offsets of intervals, against plain loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from magi_jax.solver import intervals


@st.composite
def grouped_intervals(draw):
    """(group, begin, end) of non-empty intervals, in any order."""
    rows = st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 9))
    drawn = draw(st.lists(rows, max_size=20))
    group, begin, size = np.array(drawn, np.int64).reshape(-1, 3).T
    return group, begin, begin + size


@given(st.lists(st.lists(st.integers(-5, 9), max_size=9), min_size=1, max_size=4))
def test_distinct(values):
    found = intervals.distinct(*(np.array(part, np.int64) for part in values))
    assert found.tolist() == sorted({value for part in values for value in part})


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 6)), max_size=12))
def test_expand(pairs):
    first, count = np.array(pairs, np.int64).reshape(-1, 2).T
    source, value = intervals.expand(first, count)
    expected = [(i, first[i] + j) for i in range(len(first)) for j in range(count[i])]
    assert list(zip(source.tolist(), value.tolist(), strict=True)) == expected


@given(grouped_intervals(), st.lists(st.integers(1, 6), max_size=12), st.data())
def test_meet(rows, sizes, data):
    _, begin, end = rows
    edges = np.cumsum([0, *sizes])
    kept = np.flatnonzero(
        data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    )
    low, high = edges[:-1][kept], edges[1:][kept]
    pairs = list(
        zip(*(column.tolist() for column in intervals.meet(begin, end, low, high)), strict=True)
    )
    assert pairs == [
        (i, j)
        for i in range(len(begin))
        for j in range(len(low))
        if begin[i] < high[j] and low[j] < end[i]
    ]


@given(grouped_intervals())
def test_union(rows):
    got = intervals.union(*rows)
    cells = {(g, x) for g, a, b in zip(*rows, strict=True) for x in range(a, b)}
    assert {(g, x) for g, a, b in zip(*got, strict=True) for x in range(a, b)} == cells
    assert sum((got[2] - got[1]).tolist()) == len(cells)
    same = np.diff(got[0]) == 0
    assert (np.diff(got[0]) >= 0).all()
    assert (got[1][1:][same] > got[2][:-1][same]).all(), "maximal intervals do not touch"


@given(grouped_intervals())
def test_offsets(rows):
    order = np.argsort(rows[0], kind="stable")
    group, size = rows[0][order], (rows[2] - rows[1])[order]
    got = intervals.offsets(group, size, 4)
    for i in range(len(group)):
        assert got[i] == size[:i][group[:i] == group[i]].sum()
