"""Bad input of the planner's benchmark: what each mask is answered with, whatever the time."""

import planner_bad_input
import pytest
import report_sections
from planner_bad_input import CASES, MANY_MS, Case, run_case

from magi_jax import masks

QUICK = [case for case in CASES if case.limit_ms <= MANY_MS]


@pytest.mark.parametrize("case", QUICK, ids=[case.what for case in QUICK])
def test_there_is_a_balanced_plan_or_a_clear_error(case, monkeypatch):
    monkeypatch.setattr(planner_bad_input, "REPEATS", 1)
    row = run_case(case._replace(limit_ms=float("inf")))
    assert row["reached"], row
    assert (row["error"] is None) == (case.error is None)


def test_what_is_not_as_expected_is_missed(monkeypatch):
    monkeypatch.setattr(planner_bad_input, "REPEATS", 1)
    fine = Case("a causal mask", lambda: masks.causal(1024), limit_ms=1e6)
    assert run_case(fine)["reached"]
    for wrong in (
        fine._replace(limit_ms=0.0),
        fine._replace(imbalance=0.9),
        fine._replace(error="square"),
        fine._replace(mask=lambda: masks.empty(0)),
        fine._replace(mask=lambda: masks.empty(0), error="square"),
    ):
        row = run_case(wrong)
        assert not row["reached"]
        stored = {"effort": "fast", "seeds": [0], "bad_input": [row]}
        assert report_sections.planner(stored)[-1].endswith("| no |")
