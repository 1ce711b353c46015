"""A report refuses every mask but the one that was planned, also one of as many pairs."""

import numpy as np
import pytest

from magi_jax import PlanConfig, make_plan, masks
from magi_jax.plan import recognise
from magi_jax.testing.cases import random_mask

KINDS = {
    "stages": PlanConfig(overlap=3, travelling="never"),
    "late": PlanConfig(overlap="late", travelling="never"),
    "travelling": PlanConfig(travelling=((20, 25), (60, 61))),
    "two steps": PlanConfig(ranks_per_node=2, two_level=True),
    "as predicted": PlanConfig(),
}


def with_one_cell_moved(mask, rng):
    """The mask in which one query sees another key instead of one that it sees, and that query."""
    cells = mask.dense().copy()
    query = rng.choice(np.flatnonzero(cells.any(axis=1) & ~cells.all(axis=1)))
    cells[query, rng.choice(np.flatnonzero(cells[query]))] = False
    hidden = np.flatnonzero(~mask.dense()[query])
    cells[query, rng.choice(hidden)] = True
    return masks.from_dense(cells), query


@pytest.mark.parametrize("kind", KINDS)
def test_one_cell_is_missed_by_no_kind_of_plan(kind, rng):
    for _ in range(4):
        mask = masks.local(90, window=(2, 0)) | (random_mask(rng, 90, 90) & masks.causal(90))
        plan = make_plan(mask, 4, KINDS[kind])
        assert plan.report(mask=mask).bounds is not None
        other, query = with_one_cell_moved(mask, rng)
        with pytest.raises(
            ValueError, match=rf"as many pairs .* but query {query} sees other keys"
        ):
            plan.report(mask=other)


def test_documents_that_see_each_other_have_the_same_rows_and_columns():
    itself = masks.varlen([64, 64])
    crossed = masks.full(128) & masks.from_dense(~itself.dense())
    with pytest.raises(ValueError, match="query 0 sees other keys"):
        make_plan(itself, 2).report(mask=crossed)


def test_some_queries_are_compared_where_there_are_many(monkeypatch):
    mask, plan = masks.causal(600), make_plan(masks.causal(600), 2)
    monkeypatch.setattr(recognise, "_MOST_ROWS", 200)
    assert recognise.first_other_query(plan, mask) is None
    cells = mask.dense().copy()
    cells[1:-1] = np.roll(cells, 1, axis=1)[1:-1]  # all but the first and the last see other keys
    found = recognise.first_other_query(plan, masks.from_dense(cells))
    assert 1 < found < 12


def test_what_is_no_mask_is_refused():
    with pytest.raises(TypeError, match="mask must be an AttnMask, got ndarray"):
        make_plan(masks.causal(64), 2).report(mask=np.ones((64, 64), bool))
