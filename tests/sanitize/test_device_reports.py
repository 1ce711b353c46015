"""What the device sanitizers print is counted by kind and place; problems are checked by their results."""

import device_problems
import device_sanitizers
import numpy as np
import pytest

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at magi_jax::sm90::Walker<magi_jax::sm90::Traits<__half, \
(int)128>>::WriteNote(int, bool)+0x23b20 in walker.h:140
=========     and Read access at magi_jax::sm90::Consumer<A<B>>::MaskRows(C<(int)36>)+0x8 in mainloop.h:306 \
[40 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 2 warnings)
"""
BARRIER = """3 cases in 9 s, 2 survived
========= Barrier error detected. Missing wait.
=========     at magi_jax::sm90::BarrierArrive(unsigned long *)+0x191c0 in ptx.h:28
=========     by thread (64,0,0) in block (2,0,0)
========= ERROR SUMMARY: 1 error
"""


def test_hazards_are_counted_by_the_two_places():
    found = device_sanitizers.read(RACE)
    place = "race: write at sm90::Walker::WriteNote walker.h:140, read at"
    assert found["kinds"] == {f"{place} sm90::Consumer::MaskRows mainloop.h:306": 40}
    assert (found["errors"], found["warnings"]) == (1, 2)


def test_errors_are_counted_by_place():
    found = device_sanitizers.read(BARRIER)
    kind = "Barrier error detected. Missing wait.: at sm90::BarrierArrive ptx.h:28"
    assert found["kinds"] == {kind: 1}
    assert (found["errors"], found["survived"]) == (1, "2 of 3")


def test_a_process_without_a_summary_counts_as_bad():
    row = {"tool": "memcheck", "ended": "0", "wrong": "", **device_sanitizers.read("")}
    assert row["errors"] is None
    assert device_sanitizers.is_bad(row)
    assert not device_sanitizers.is_bad({**row, "errors": 0})


@pytest.mark.parametrize("name", device_problems.cases())
def test_problems_know_right_results_from_wrong_ones(name, tmp_path):
    case = device_problems.cases()[name]
    operands = device_problems.Operands(case)
    path = tmp_path / "results"
    right = {
        result: operands.results[result].astype(dtype)
        for result, dtype in device_problems.result_dtypes(case).items()
    }

    def check(results):
        path.write_bytes(b"".join(x.tobytes() for x in results.values()))
        return device_problems.check(case, operands, path)

    assert check(right) == ""
    for result, values in right.items():
        wrong = np.where(np.isfinite(values), values + 1, 0).astype(values.dtype)
        assert check({**right, result: wrong}).startswith(f"{result}: ")
