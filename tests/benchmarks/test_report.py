"""The results page is made from whatever is stored, and hides no loss."""

import json

import report
import report_ceilings
import report_ranks
import report_scaling
import report_sections
import report_summary
import report_targets

PROVENANCE = {
    "device": "a card", "host": "a host", "python": "3.12", "versions": {"jax": "1"},
    "commit": "abc", "command": "python x.py", "date": "2026-01-01",
}  # fmt: skip


def kernel_row(mask: str, ours: float, peer: float) -> dict:
    return {
        "mask": mask, "length": 8192, "head_dim": 128, "pass": "forward", "matmul": 700.0,
        "tflops": {"ours": ours, "cudnn": peer}, "best_peer": "cudnn", "ratio": ours / peer,
        "errors": {},
    }  # fmt: skip


def test_page_says_what_is_missing(tmp_path):
    page = report.page(tmp_path)
    for title, name, command, _ in report.SECTIONS:
        assert f"## {title}" in page
        assert name in page
        assert command in page


def test_losses_are_listed(tmp_path):
    rows = [kernel_row("full", 600.0, 650.0), kernel_row("causal", 600.0, 550.0)]
    (tmp_path / "kernels_gpu.json").write_text(json.dumps({**PROVENANCE, "rows": rows}))
    page = report.page(tmp_path)
    assert "- Machine A: a card, host a host; Python 3.12, jax 1." in page
    assert "Machine A; commit `abc`" in page
    assert "`abc`" in page
    assert "- full 8192, head dim 128, forward: cudnn (0.92)" in page
    assert "- causal" not in page


def test_scaling_lists_strategies_that_are_ahead():
    us = {"us": 10.0, "kernel_us": 9.0, "mean_kernel_us": 8.0, "timed": 1.0}
    details = {f"{which}_{key}": x for which in ("forward", "backward") for key, x in us.items()}
    rates = {"magi_jax": (600, 500), "magi_jax_alike": (620, 500), "ulysses": (610, 400)}
    rows = [
        {"cp": 8, "mask": "full", "strategy": name, "forward": f, "backward": b, **details}
        for name, (f, b) in rates.items()
    ]
    stored = {
        "machine": {"near": 450e3, "far": 50e3, "node": 8, "near_latency_us": 1,
                    "far_latency_us": 2},
        "fit_error": {"forward": [0.01, 0.1], "backward": [0.01, 0.1]},
        "kernels": [PROVENANCE], "timed_pieces": 1, "pieces": 2, "rows": rows,
        "unhidden_us": {"forward": 0.0, "backward": 0.5},
    }  # fmt: skip
    lines = report_scaling.scaling(stored)
    assert "- full, 8 ranks, forward: ulysses (0.98, 1.02)" in lines
    assert "| full | 600, 620 / 610 (ulysses) 0.98, 1.02 |" in lines
    assert not any("full, 8 ranks, backward" in line for line in lines)


def test_a_cell_below_the_aim_says_what_any_plan_could_reach():
    rows = [
        {"cp": 32, "mask": "window", "strategy": name, f"{which}_calls": calls, which: 5000 / step,
         f"{which}_us": step, f"{which}_kernel_us": kernel, f"{which}_mean_kernel_us": mean}
        for name, calls, step, kernel, mean in (
            ("magi_jax", 2, 10.0, 9.0, 8.0), ("ulysses", 1, 11.0, 7.0, 7.0), ("ring", 32, 20.0, 1.0, 1.0)
        )
        for which in ("forward", "backward")
    ]  # fmt: skip
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        one.update(other)
    stored = {"rows": rows[::2], "unhidden_us": {"forward": 0.0, "backward": 0.5}}
    lines = report_ceilings.ceilings(stored)
    # 11 / 7 = 1.57 with nothing to hide, 11 / 7.5 = 1.47 in the backward pass.
    expected = "| window | 1.10 of 1.57: 70 / 10 / 10 / 10 | 1.10 of 1.47: 75 / 10 / 10 / 5 |"
    assert expected in lines
    assert any("Of 2 cells 0 reach 1.3 by default or alike; in 0 no" in line for line in lines)
    stored["rows"][1].update(forward_us=9.0, forward=5000 / 9)
    lines = report_ceilings.ceilings(stored)
    assert any("| window | 0.90 of 1.29: 70 / 10" in line for line in lines)
    assert any("Of 2 cells 0 reach 1.3 by default or alike; in 1 no" in line for line in lines)


def test_cells_are_counted_beside_all_others_and_beside_groups_of_them():
    rates = {"magi_jax": 150.0, "ulysses": 100.0, "hybrid": 120.0, "hybrid_even4": 140.0}
    us = {"us": 10.0, "kernel_us": 9.0, "mean_kernel_us": 8.0}
    details = {f"{which}_{key}": x for which in ("forward", "backward") for key, x in us.items()}
    rows = [
        {"cp": 32, "mask": "window", "strategy": name, "forward": rate, "backward": 1.4 * rate,
         **details} for name, rate in rates.items()
    ]  # fmt: skip
    lines = [" ".join(line) for line in report_targets.targets(rows)]
    assert len(lines) == 3
    for line, (whom, reached, ratio) in zip(
        lines,
        (("all others", 0, "1.07"), ("larger groups", 0, "1.25"), ("but hybrids", 2, "1.50")),
        strict=True,
    ):
        assert f"{whom} {reached} of 2 cells; least {ratio} (window, 32 ranks" in line
    assert report_targets.in_short(rows) == [
        "irregular masks, 32 and 64 ranks: 1.3 times the best other (wanted in all 2 cells) in 0 beside all"
        " others; in 0 beside all but hybrids of larger groups; in 2 beside all but hybrids"
    ]
    without_hybrids = report_targets.targets(rows[:2])
    assert [line[1][:6] for line in without_hybrids] == ["2 of 2"] * 3
    links = {"other_links": [{"what": "slow", "magi_jax": [1.0, 1.4, 1.2]}]}
    assert report_scaling.other_links(links)[-1] == "| slow | 1 of 3, median 1.20 |"
    assert report_scaling.other_links({}) == []


def test_the_models_errors_are_summed_up():
    row = {"mask": "full", "tokens_per_rank": 8, "ranks": 2, "transport": "native",
           "forward": 600.0, "backward": 500.0}  # fmt: skip
    errors = ((0.01, -0.20), (-0.02, 0.10), (0.05, 0.0))
    rows = [{**row, "forward_error": f, "backward_error": b} for f, b in errors]
    lines = report_scaling.check({"rows": rows})
    assert "forward 2 % in the median and 5 % at most" in lines[0]
    assert "backward 10 % in the median and 20 % at most" in lines[0]
    assert "| full | 8 | 2 | native | chosen |  | 600 | +1.0 % | 500 | -20.0 % |" in lines


def test_what_the_model_grants_is_listed_for_each_strategy():
    row = {"mask": "full", "tokens": 8, "ranks": 2}
    rows = [
        {**row, "strategy": name, "ran": {"forward": 100.0, "backward": 50.0},
         "model": {"forward": forward, "backward": 51.0},
         "with_measured_links": {"forward": 99.0, "backward": 49.0}}
        for name, forward in (("magi_jax", 103.0), ("hybrid", 150.0))
    ]  # fmt: skip
    lines = report_scaling.granted({"rows": rows})
    assert "| full | 8 | 2 | hybrid | 100 | +50 %, -1 % | 50 | +2 %, -2 % |" in lines
    (line,) = report_summary.granted({"rows": rows})
    assert line.endswith("magi_jax +2 to +3 %, hybrid +2 to +50 %")


def test_what_sanitizers_report_is_counted_over_problems():
    kinds = {
        "race: write at A f.h:1, read at B g.h:2": 1,
        "race: read at B g.h:3, write at A f.h:1": 1,
    }
    row = {"tool": "racecheck", "path": "sm90", "problem": "causal", "ended": "0", "wrong": "",
           "errors": 1, "warnings": 0, "survived": "", "kinds": kinds}  # fmt: skip
    stopped = {**row, "problem": "full", "ended": "stopped after 5 s", "errors": None}
    by_jax = {**row, "problem": None, "survived": "3 of 3", "kinds": {}}
    wrong = {**row, "wrong": "out: error"}
    lines = report_sections.sanitizers({"sanitizer": "1", "rows": [row, stopped, wrong, by_jax]})
    directly = "ended 2 of 3 (others: stopped after 5 s), right 1 of 2, errors 2"
    by_jax = "ended 1 of 1, right 3 of 3, errors 1"
    assert f"| racecheck | sm90 | {directly} | {by_jax} |" in lines
    assert "- racecheck: race: write at A, read at B (sm90 6)" in lines


def test_a_peers_cell_has_all_passes_and_refusals_are_named_once():
    rows = [
        {**kernel_row("window", 600.0, 500.0), "pass": which,
         "tflops": {"ours": 600.0, "tokamax": 500.0, **more},
         "errors": {"sdpa": "NotImplementedError: sdpa has no form of window", "flex": "broke"}}
        for which, more in (("forward", {"cudnn": 550.0}), ("backward", {}))
    ]  # fmt: skip
    lines = report_sections.kernel_peers({"rows": rows})
    assert "| window | 8192 | 600 / 600 | 500 / 500 | 550 / - |  |  |" in lines
    assert lines.count("No form of a mask has: sdpa of window.") == 1
    assert lines.count("- flex: broke (window 8192)") == 1


def test_the_page_begins_with_a_line_for_each_result(tmp_path):
    rows = [kernel_row("full", 600.0, 500.0), kernel_row("causal", 400.0, 500.0)]
    stored = {**PROVENANCE, "rows": rows}
    (tmp_path / "kernels_gpu.json").write_text(json.dumps(stored))
    page = report.page(tmp_path)
    line = (
        "| [Kernels on one GPU](#kernels-on-one-gpu) | forward: ahead of all in 1 of 2 cells; of cudnn in 1"
        " of 2 (0.80 to 1.20, median 1.00); behind the best in causal 1 of 1 (least 0.80) |"
    )
    assert line in page.splitlines()[:35]
    assert "- causal 8192, head dim 128, forward: cudnn (0.80)" in page


def test_strategies_on_real_devices_are_compared_and_named():
    row = {"mask": "full", "heads": "64:8", "tokens": 8192, "ranks": 2}
    rows = [
        {**row, "strategy": "magi_jax", "forward": 600.0, "backward": 500.0},
        {**row, "strategy": "ulysses", "forward": 400.0, "backward": 505.0},
        {**row, "strategy": "hybrid", "error": "needs documents"},
    ]
    lines = report_ranks.rivals({"ranks": 2, "rows": rows})
    assert "| full | 64:8 | forward | 600 | 400 (1.50) |  |" in lines
    assert "- full, 64:8, backward: ulysses (0.990)" in lines
    single = {"mask": "full", "heads": "64:8", "tokens": 8192, "transport": "each GPU",
              "forward_tflops": 610.0, "backward_tflops": 520.0}  # fmt: skip
    ours = {**single, "transport": "native", "forward_tflops": 604.0, "forward_ratio": 0.99,
            "backward_tflops": 500.0, "backward_ratio": 0.96}  # fmt: skip
    lines = report_ranks.distributed({"ranks": 2, "rows": [single, ours]})
    expected = "| full | 64:8 | 8192 | native | 610 | 604 (0.990) | 520 | 500 (0.960) |"
    assert expected in lines


def test_collectives_have_a_column_for_each_size_of_piece():
    rows = [
        {"call": "group_cast", "transport": "native", "placement": "direct", "blocks": 16,
         "piece_kib": kib, "gb_per_s": rate} for kib, rate in ((64, 320.4), (1024, 331.6))
    ]  # fmt: skip
    rows.append({"call": "group_cast", "transport": "portable", "piece_kib": 1024, "gb_per_s": 166})
    rows += [{"call": "ppermute", "gb_per_s": 287.3}, {"call": "ragged_all_to_all", "error": "no"}]
    lines = report_ranks.collectives({"ranks": 2, "rows": rows})
    assert "| native | direct | 16 | 320 | 332 |" in lines
    assert "| portable |  |  |  | 166 |" in lines
    assert "lie: ppermute 287." in lines[0]


def test_each_peer_is_counted_by_pass_and_losses_are_named():
    rows = [kernel_row("full", 600.0, 500.0), kernel_row("causal", 400.0, 500.0)]
    rows[0]["tflops"]["fa3"] = 625.0
    rows[0] |= {"best_peer": "fa3", "ratio": 600 / 625}
    (line,) = report_summary.each_peer({"rows": rows})
    assert line == (
        "forward: ahead of all in 0 of 2 cells; of cudnn in 1 of 2 (0.80 to 1.20, median 1.00), of fa3 in 0"
        " of 1 (0.96 to 0.96, median 0.96); behind the best in full 1 of 1 (least 0.96), causal"
        " 1 of 1 (least 0.80)"
    )


def test_a_cell_has_the_rates_of_all_peers():
    rows = [kernel_row("full", 600.0, 500.0), kernel_row("causal", 400.0, 500.0)]
    rows[0]["tflops"]["fa3"] = 625.0
    rows[0] |= {"best_peer": "fa3", "ratio": 600 / 625}
    lines = report_sections.kernels({"rows": rows})
    assert "| full | 600 / 500 / 625 0.96 |" in lines
    assert "| causal | 400 / 500 / - 0.80 |" in lines
    assert "- full 8192, head dim 128, forward: fa3 (0.96)" in lines
