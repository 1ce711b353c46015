"""The rivals run beside ours over the same devices, and what they cannot serve is said."""

import sys

import rivals


def test_ours_first_then_every_rival_that_serves(capsys, monkeypatch):
    command = "rivals.py --cp 2 --tokens 512 --heads 2:1 --transport portable"
    command += " --masks tiny_varlen_causal --rivals hybrid"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr("rivals.PACE", {"lead_s": 0.0, "budget_s": 0.0})
    rivals.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in printed] == ["magi_jax", "hybrid"]


def test_head_counts_that_cannot_be_shared_out_are_refused(capsys, monkeypatch):
    command = "rivals.py --cp 4 --tokens 128 --heads 6:3 --masks full --rivals ulysses"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(rivals, "time_ours", lambda *_: {"forward": 1.0, "backward": 1.0})
    rivals.main()
    assert "refused: 6 heads cannot be shared out" in capsys.readouterr().out
