"""The ranks of a plan are timed without their peers, in stages and with late queries."""

import json
import sys

import pytest
import ranks


@pytest.mark.parametrize(("overlap", "stages"), [("late", 0), ("2", 2)])
def test_every_rank_has_its_figures(overlap, stages, capsys, monkeypatch, tmp_path):
    for name, value in {"SETTLE_S": 0.0, "TURN_S": 1e-9, "PASS_S": 0.0, "LEAST_ROUNDS": 1}.items():
        monkeypatch.setattr(f"turns.{name}", value)
    command = f"ranks.py --tokens 128 --heads 2:1 --masks causal --overlap {overlap} --commit x"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json", str(tmp_path / "ranks.json")])
    ranks.main()
    rows = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert [(row["rank"], row["remote_stages"]) for row in rows] == [(0, stages), (1, stages)]
    assert all(row["forward_ratio"] > 0 and row["backward_ratio"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 2
