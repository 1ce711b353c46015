"""The short form of `make stress`."""

import endurance


def test_a_hundred_packings_through_one_program(rng):
    report = endurance.run(100, 8, int(rng.integers(2**31)))
    assert report.checks == 8
    # The pools of the allocator still grow in so short a run.
    assert [p for p in report.problems() if "memory" not in p] == []
    assert report.memory_mib[1] < report.memory_mib[0] + 64
