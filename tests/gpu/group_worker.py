"""One process of several, which have GPUS among them, one each or one for several:

    python group_worker.py SCENARIO PLACEMENT PROCESS COUNT PORT GPUS

Processes that share a GPU cannot make XLA's own collectives.
"""

import os
import re
import sys
import time

import jax
import numpy as np
import pytest
from group_attention import attention, part_of
from group_problem import check_plans_in_a_row, normal, on_devices
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, padded, random_comm

from magi_jax.comm import finish, group_cast, group_reduce, start_cast, symmetric_memory
from magi_jax.parallel.overlap import barrier, behind

ROOM = 1 << 20


def main() -> None:
    scenario, placement = sys.argv[1:3]
    process, count, port, gpus = map(int, sys.argv[3:])
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, process, local_device_ids=[process % gpus]
    )
    mesh = Mesh(np.array(jax.devices()), ("cp",), axis_types=(AxisType.Auto,))
    # Every process makes the same tables and arrays.
    rng = np.random.default_rng(int(os.environ["SEED"]))
    scenarios = {
        each.__name__: each for each in (attention, conformance, failing, killed, plans, thousand)
    }
    run = scenarios[scenario]
    run(mesh, {"placement": placement, "staging_bytes": ROOM}, rng)
    print("passed", flush=True)


def conformance(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    with symmetric_memory(mesh, "cp", timeout_s=60, **room) as memory:
        assert "several processes of one host" in memory.describe()
        run = collective(mesh, memory.transport)
        rank = [device.process_index for device in mesh.devices.flat].index(jax.process_index())
        for step in range(200 // mesh.size):
            comm = padded(random_comm(rng, mesh.size, with_self=bool(step % 2)))
            x = normal(rng, mesh.size, SRC_ROWS, 3, 8)
            y = normal(rng, mesh.size, DST_ROWS, 3, 8)
            cast, reduced = map(part_of, run(*on_devices(mesh, (comm, x, y))))
            memory.check()
            np.testing.assert_array_equal(cast, numpy_cast(x, comm)[rank])
            np.testing.assert_allclose(reduced, numpy_reduce(y, comm)[rank], rtol=2e-6, atol=2e-6)


def thousand(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    with symmetric_memory(mesh, "cp", timeout_s=60, **room) as memory:
        check_plans_in_a_row(mesh, memory, rng)


def failing(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    """A program fails while a call is under way: what gets its buffers is not written to."""
    width, value = 1 << 18, 7.0
    comm = padded(random_comm(rng, mesh.size))
    x = np.ones((mesh.size, SRC_ROWS, width), np.float32)
    room = room | {"staging_bytes": SRC_ROWS * width * 4 + ROOM}
    with symmetric_memory(mesh, "cp", timeout_s=60, **room) as memory:
        closed = symmetric_memory(mesh, "cp", timeout_s=60, **room)
        closed.close()

        def body(comm, x):
            started = start_cast([x[0]], comm, "cp", transport=memory.transport)
            refused = group_cast(behind(x[0], started), comm, "cp", transport=closed.transport)
            started, refused = barrier(started, refused)
            (cast,) = finish(started, memory.transport)
            return cast[None], refused[None]

        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))
        operands = on_devices(mesh, (comm, x))
        if jax.process_index() == mesh.size - 1:
            time.sleep(1)  # the others' calls wait meanwhile
        with pytest.raises(jax.errors.JaxRuntimeError, match="it was closed"):
            jax.block_until_ready(run(*operands))
        others = [jax.numpy.full((DST_ROWS, width), value) for _ in range(4)]
        time.sleep(2)
        for array in others:
            assert (np.asarray(array) == value).all()
        memory.check()


def killed(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    """The last process goes without a word; the others end with an error that names it."""
    memory = symmetric_memory(mesh, "cp", timeout_s=3, **room)
    run = collective(mesh, memory.transport)
    comm = padded(random_comm(rng, mesh.size))
    arrays = normal(rng, mesh.size, SRC_ROWS, 3, 8), normal(rng, mesh.size, DST_ROWS, 3, 8)
    operands = on_devices(mesh, (comm, *arrays))
    jax.block_until_ready(run(*operands))
    gone = mesh.size - 1
    if jax.process_index() == gone:
        os._exit(9)
    time.sleep(1)
    results = []
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"rank {gone} did not come") as raised:
        call_for(30, lambda: results.append(jax.block_until_ready(run(*operands))))
    assert np.isnan(np.asarray(results[-1][0].addressable_shards[0].data)).all()
    print(f"passed: {raised.value}", flush=True)
    # Not the way of an interpreter's end, which waits for the process that is gone.
    os._exit(0)


def call_for(time_s: float, call) -> None:
    ends = time.monotonic() + time_s
    while time.monotonic() < ends:
        call()


def plans(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    """Processes with different tables are told apart before a row moves."""
    with symmetric_memory(mesh, "cp", timeout_s=30, **room) as memory:
        both = [padded(random_comm(rng, mesh.size)) for _ in range(2)]
        comm = both[int(jax.process_index() == 0)]
        x = normal(rng, mesh.size, SRC_ROWS, 3, 8)
        y = normal(rng, mesh.size, DST_ROWS, 3, 8)
        cast, _ = collective(mesh, memory.transport)(*on_devices(mesh, (comm, x, y)))
        assert np.isnan(np.asarray(cast.addressable_shards[0].data)).all()
        assert re.search("has a plan that differs|had given up", memory.failure() or "")


def collective(mesh: Mesh, transport):
    """Cast and reduce on the shards of arrays ``[cp, rows, ...]``."""

    def body(comm, x, y):
        cast = group_cast(x[0], comm, "cp", transport=transport)
        return cast[None], group_reduce(y[0], comm, "cp", transport=transport)[None]

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))


if __name__ == "__main__":
    main()
