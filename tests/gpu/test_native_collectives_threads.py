"""Two threads that run one program at a time: no step gets rows of another."""

import threading

import jax
import numpy as np
from group_problem import mesh_of, sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transfers import SRC_ROWS, numpy_cast, padded, random_comm

from magi_jax.comm import group_cast, symmetric_memory

STEPS, WIDTH = 200, 2048


def wrong_results(rounds: int, rng) -> tuple[int, list[str]]:
    """How many results of two threads held rows of another step, and the errors that were raised."""
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))
    rows = NamedSharding(mesh, P("cp"))
    with symmetric_memory(mesh, "cp", timeout_s=3.0) as memory:
        step = sharded(lambda c, x: group_cast(x, c, "cp", transport=memory.transport), mesh)
        comm_there = jax.device_put(comm, rows)
        like = np.ones((2, SRC_ROWS, WIDTH), np.float32)
        seen = numpy_cast(like, comm)
        inputs = [jax.device_put(like * (i + 1), rows) for i in range(2)]
        jax.block_until_ready(step(comm_there, inputs[0]))
        wrong, errors = [], []
        together = threading.Barrier(2)

        def train(which):
            try:
                together.wait()
                results = [step(comm_there, inputs[which]) for _ in range(rounds)]
                for result in results:
                    found = np.asarray(result)
                    # NaN after an error that is named.
                    if not np.isnan(found).any() and not np.array_equal(found, seen * (which + 1)):
                        wrong.append(which)
            except Exception as error:
                errors.append(str(error))

        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if memory.failure():
            errors.append(memory.failure())
    return len(wrong), errors


def test_steps_of_two_threads_are_not_mixed(rng):
    wrong, errors = wrong_results(STEPS, rng)
    assert wrong == 0, errors
    for error in errors:
        assert "runs other steps at the same time" in error, error


def test_steps_go_on_while_another_thread_compiles_and_allocates(rng):
    """What makes the driver wait for a device must not wait for a kernel that waits for its peer."""
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))
    rows = NamedSharding(mesh, P("cp"))
    stop, compiled = threading.Event(), []

    def compile_and_allocate():
        held = []
        for size in range(1, 1000):
            if stop.is_set():
                return
            # New programs, whose kernels are loaded, and new buffers, on every device.
            for device in jax.devices()[:2]:
                x = jax.device_put(np.ones((size, 1024), np.float32), device)
                held.append(jax.jit(lambda x, n=size: (x * n).sum(axis=0))(x))
                held.append(jax.device_put(np.zeros(1 << 22, np.float32), device))
            compiled.append(jax.block_until_ready(held[-2]))

    with symmetric_memory(mesh, "cp", timeout_s=5.0) as memory:
        step = sharded(lambda c, x: group_cast(x, c, "cp", transport=memory.transport), mesh)
        there = jax.device_put(comm, rows)
        like = np.ones((2, SRC_ROWS, WIDTH), np.float32)
        x = jax.device_put(like, rows)
        expected = numpy_cast(like, comm)
        jax.block_until_ready(step(there, x))
        other = threading.Thread(target=compile_and_allocate)
        other.start()
        try:
            while len(compiled) < 40 and other.is_alive():
                for result in [step(there, x) for _ in range(20)]:
                    np.testing.assert_array_equal(result, expected)
                memory.check()
        finally:
            stop.set()
            other.join()
    assert len(compiled) >= 40
