"""Work done ahead comes in order, is bounded, and hands its errors over."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest

from magi_jax.data import Prefetch


@pytest.mark.parametrize("workers", [1, 4])
def test_results_come_in_the_order_of_the_source(workers):
    def slow_when_even(item):
        time.sleep(0.002 * (item % 2 == 0))
        return item * item

    with Prefetch(range(30), slow_when_even, depth=4, workers=workers) as results:
        assert list(results) == [item * item for item in range(30)]


def test_no_more_than_depth_and_one_items_are_ahead():
    taken = 0
    blocked = threading.Event()

    def source():
        nonlocal taken
        for item in itertools.count():
            taken += 1
            if taken > 4:
                blocked.set()  # one item too many was asked for
            yield item

    with Prefetch(source(), lambda item: item, depth=2) as results:
        assert next(results) == 0
        # One item was used, two wait, and one waits for room.
        assert not blocked.wait(0.5)
        assert next(results) == 1
        assert blocked.wait(10)


def test_error_of_the_function_comes_in_its_place():
    def fails_at_two(item):
        if item == 2:
            raise KeyError("no plan for item 2")
        return item

    results = Prefetch(range(5), fails_at_two, depth=3, workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(KeyError, match="item 2"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_error_of_the_source_comes_in_its_place():
    def source():
        yield 1
        raise OSError("the disk is gone")

    results = Prefetch(source(), lambda item: item)
    assert next(results) == 1
    with pytest.raises(OSError, match="disk"):
        next(results)


def test_close_ends_the_threads_of_an_endless_source():
    before = threading.active_count()
    with Prefetch(itertools.count(), lambda item: item) as results:
        assert next(results) == 0
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_refuses_no_room_or_no_workers():
    with pytest.raises(ValueError, match="depth=0"):
        Prefetch([], print, depth=0)
    with pytest.raises(ValueError, match="workers=0"):
        Prefetch([], print, workers=0)


def test_refuses_a_spec_for_a_sharding():
    with pytest.raises(TypeError, match=r"sharding must be .*NamedSharding\(mesh, .*; got P"):
        Prefetch([], print, sharding=jax.sharding.PartitionSpec("dp", "cp"))


@pytest.mark.parametrize("waits_for", ["the source", "the function"])
def test_closing_ends_a_consumer_that_waits(waits_for):
    go_on = threading.Event()
    ended = threading.Event()

    def source():
        yield 0
        if waits_for == "the source":
            go_on.wait(30)
        yield 1

    def function(item):
        if item == 0 and waits_for == "the function":
            go_on.wait(30)
        return item

    results = Prefetch(source(), function, depth=2)
    if waits_for == "the source":
        assert next(results) == 0

    def consume():
        list(results)
        ended.set()

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    time.sleep(0.1)
    results.close()
    try:
        # What is being computed is waited for, what nobody has begun is not.
        if waits_for == "the function":
            go_on.set()
        assert ended.wait(10)
    finally:
        go_on.set()


def test_what_nobody_has_begun_is_not_computed_after_closing():
    before = threading.active_count()
    begun: list[int] = []
    is_computing, three_wait, go_on = (threading.Event() for _ in range(3))

    def source():
        yield from range(3)
        three_wait.set()

    def function(item):
        begun.append(item)
        is_computing.set()
        go_on.wait(30)

    results = Prefetch(source(), function, depth=3)
    assert is_computing.wait(10)
    assert three_wait.wait(10)
    results.close()
    go_on.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [0]


def test_results_are_sent_to_the_devices_ahead():
    mesh = jax.make_mesh((4,), ("cp",), (jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("cp"))
    with Prefetch(range(3), lambda i: {"x": np.full(8, i)}, sharding=rows) as results:
        for number, result in enumerate(results):
            assert result["x"].sharding == rows
            np.testing.assert_array_equal(result["x"], np.full(8, number))
