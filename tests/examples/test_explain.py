"""`python -m magi_jax`: masks from JSON, reports, pictures, and errors in one line."""

import json
import sys

import numpy as np
import pytest

import magi_jax as mj
from magi_jax.__main__ import main
from magi_jax.explain import advice, parse_mask

SLICES = {
    "q_ranges": [[0, 4], [4, 8]],
    "k_ranges": [[0, 4], [0, 8]],
    "types": ["CAUSAL", [-2, None]],
    "q_len": 8,
}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (
            {"builder": "varlen", "lengths": [3, 5], "causal": True},
            mj.masks.varlen([3, 5], causal=True),
        ),
        (
            {"builder": "local", "q_len": 8, "window": [2, None]},
            mj.masks.local(8, window=(2, None)),
        ),
        (
            SLICES,
            mj.AttnMask.from_slices(
                [(0, 4), (4, 8)], [(0, 4), (0, 8)], [mj.MaskType.CAUSAL, (-2, None)], q_len=8
            ),
        ),
        (
            {"union": [SLICES, {"builder": "global_rows", "q_len": 8, "rows": [7, 8]}]},
            parse_mask(SLICES) | mj.masks.global_rows(8, rows=(7, 8)),
        ),
        (
            {"intersection": [SLICES, {"builder": "causal", "q_len": 8}]},
            parse_mask(SLICES) & mj.masks.causal(8),
        ),
    ],
    ids=["builder", "null", "slices", "union", "intersection"],
)
def test_masks_from_json(described, expected):
    mask = parse_mask(json.loads(json.dumps(described)))
    np.testing.assert_array_equal(mask.dense(), expected.dense())


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ([1, 2], "JSON object, got list"),
        ({"builder": "AttnMask"}, "builder must be one of"),
        ({"builder": "varlen", "length": [3]}, "length"),
        ({"q_ranges": [[0, 4]]}, r"got \['q_ranges'\]"),
        ({**SLICES, "types": ["FOO", "FULL"]}, "types must be FULL, .* got 'FOO'"),
        ({"union": []}, r"union must list masks, at least one, got \[\]"),
        ({**SLICES, "types": ["CAUSAL", "FULL"], "k_ranges": [[0, 4], [0, 99]]}, "99"),
    ],
)
def test_what_is_no_mask_is_refused(described, match):
    with pytest.raises(ValueError, match=match):
        parse_mask(described)


def test_explain_prints_the_report_and_draws(tmp_path, capsys):
    path, picture = tmp_path / "mask.json", tmp_path / "pictures" / "plan.png"
    path.write_text(json.dumps({"builder": "varlen", "lengths": [700, 40, 1308], "causal": True}))
    assert main(["explain", str(path), "--cp", "8", "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "2,048 tokens, 3 slices" in printed
    mask = mj.masks.varlen([700, 40, 1308], causal=True)
    assert mask.sketch(24) in printed
    plan = mj.make_plan(mask, 8)
    assert plan.fingerprint() in printed
    megabytes = plan.report().recv_rows.max() * 2 * 8 * 128 * 2 / 2**20
    assert f"received by the worst rank: {megabytes:,.1f} MiB" in printed
    assert picture.stat().st_size > 0


def test_explain_says_in_one_line_what_is_wrong(tmp_path, capsys):
    (tmp_path / "mask.json").write_text("{")
    assert main(["explain", str(tmp_path / "mask.json"), "--cp", "2"]) == 1
    assert "error: " in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_explain_without_matplotlib_says_how_to_do_without(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "mask.json"
    path.write_text('{"builder": "causal", "q_len": 512}')
    assert main(["explain", str(path), "--cp", "2"]) == 1
    printed = capsys.readouterr()
    assert "imbalance" in printed.out
    assert printed.err.endswith("pip install matplotlib, or say --no-picture\n")


def test_info_tells_what_was_built(capsys):
    assert main(["info"]) == 0
    assert f"version: {mj.__version__}" in capsys.readouterr().out


def test_advice_names_what_is_out_of_balance():
    mask = mj.masks.causal(1030)
    config = mj.PlanConfig(chunk_size=256, dispatch="contiguous")
    text = " ".join(advice(mj.make_plan(mask, 4, config).report()))
    assert "times the mean work" in text
    assert "are padding" in text
