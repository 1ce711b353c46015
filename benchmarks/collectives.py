"""Times the group collectives between GPUs beside XLA's collectives and raw copies.

    python benchmarks/collectives.py [--cp 2] [--mebibytes 256] [--blocks 8 16] [--json FILE]

GB/s are the bytes that one rank receives over the time of the call, all ranks receiving at once.
Rows have 2 KiB (8 heads of 128 in bfloat16). Every rank receives the same number of rows from each
other rank, in pieces of one size that lie in random order at both ends. `transport` "portable" is
the padded `all_to_all`. With several processes, start one per GPU and add
--coordinator HOST:PORT --processes N --process I.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import add_process_flags, place, save_ranks, start
from timing import seconds

from magi_jax.comm import group_cast, group_reduce, symmetric_memory
from magi_jax.plan import CommMeta, CommSpec

HEADS, HEAD_DIM = 8, 128
ROW_BYTES = HEADS * HEAD_DIM * 2
BUDGET_S = 0.4  # of each figure; of few calls in a row the host's start is a part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256, help="received by each rank")
    parser.add_argument("--piece-kibibytes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--placements", nargs="+", default=None, choices=["direct", "staged"])
    parser.add_argument("--no-peers", action="store_true", help="the group collectives alone")
    add_process_flags(parser)
    args = parser.parse_args()
    mesh = start(args)
    # Whole pieces from each peer, of every size.
    largest = max(args.piece_kibibytes) * 1024 // ROW_BYTES
    share = args.mebibytes * 2**20 // ROW_BYTES // (mesh.size - 1)
    rows = max(share // largest, 1) * largest * (mesh.size - 1)
    placements = args.placements or (["staged"] if args.coordinator else ["direct", "staged"])
    portable = {"transport": "portable"}
    parts = [
        functools.partial(group_figures, mesh, rows, args.piece_kibibytes, placement, blocks)
        for placement in placements
        for blocks in args.blocks
    ]
    parts.append(lambda: transport_figures(mesh, rows, 1024, "portable", portable))
    if not args.no_peers:
        parts.append(lambda: peer_figures(mesh, rows))
    figures = []
    for part in parts:
        figures += part()
        save_ranks(args, mesh, figures)


def group_figures(mesh: Mesh, rows: int, pieces: list[int], placement: str, blocks: int) -> list:
    """Native cast and reduce, for every size of piece."""
    room = {"staging_bytes": rows * ROW_BYTES * 2 + 4096} if placement == "staged" else {}
    memory = symmetric_memory(mesh, "cp", placement=placement, num_blocks=blocks, **room)
    figures = []
    with memory:
        for kibibytes in pieces:
            label = {"transport": "native", "placement": placement, "blocks": blocks}
            figures += transport_figures(mesh, rows, kibibytes, memory.transport, label)
            memory.check()
    return figures


def transport_figures(mesh: Mesh, rows: int, kibibytes: int, transport, label: dict) -> list:
    """Cast of bfloat16 rows, and reduces of rows that travel in bfloat16 and in float32."""
    table = transfer(mesh.size, rows, kibibytes * 1024 // ROW_BYTES)
    comm = place(table, NamedSharding(mesh, P("cp")))
    cast = shards(mesh, lambda c, x: group_cast(x, c, "cp", transport=transport))
    reduce = shards(
        mesh, lambda c, x: group_reduce(x, c, "cp", out_dtype=jnp.float32, transport=transport)
    )
    figures = []
    for name, call, dtype in (
        ("group_cast", cast, jnp.bfloat16),
        ("group_reduce bfloat16", reduce, jnp.bfloat16),
        ("group_reduce float32", reduce, jnp.float32),
    ):
        x = normal(mesh, rows, dtype)
        moved = rows * HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize
        figures.append(figure(name, lambda: call(comm, x), moved, piece_kib=kibibytes, **label))  # noqa: B023
    return figures


def transfer(cp_size: int, rows: int, piece_rows: int) -> CommMeta:
    """Every rank receives ``rows`` rows, the same from each other rank, in shuffled pieces.

    The share of a peer is a multiple of ``piece_rows``.
    """
    rng = np.random.default_rng(0)
    share = rows // (cp_size - 1)
    count = share // piece_rows
    send = np.zeros((cp_size, count * (cp_size - 1), 5), np.int32)
    recv = np.zeros_like(send)
    filled = [0] * cp_size
    for dst in range(cp_size):
        peers = [src for src in range(cp_size) if src != dst]
        # Places in the receiver's buffer, and rows of the sender, in an order of their own.
        places = rng.permutation(count * len(peers))
        received = []
        for i, src in enumerate(peers):
            for j, source in enumerate(rng.permutation(count)):
                place = int(places[i * count + j])
                piece = tuple(n * piece_rows for n in (int(source), place, 1, j))
                send[src, filled[src]] = (dst, *piece)
                filled[src] += 1
                received.append((src, *piece))
        recv[dst] = sorted(received, key=lambda p: p[2])
    for src in range(cp_size):
        send[src] = sorted(map(tuple, send[src].tolist()), key=lambda p: (p[0], p[4]))
    spec = CommSpec(
        cp_size=cp_size, src_rows=rows, dst_rows=rows, pair_rows=count * piece_rows,
        self_rows=0, pieces=send.shape[1],
    )  # fmt: skip
    return CommMeta(send, recv, spec)


def peer_figures(mesh: Mesh, rows: int) -> list:
    """XLA's collectives, and copies from device to device by the runtime."""
    cp_size, num_bytes = mesh.size, rows * ROW_BYTES
    x = normal(mesh, rows, jnp.bfloat16)
    around = [(i, (i + 1) % cp_size) for i in range(cp_size)]
    part = rows // cp_size * cp_size

    def exchange(x):
        return jax.lax.all_to_all(x[:part], "cp", 0, 0, tiled=True)

    calls = {
        "ppermute": (lambda x: jax.lax.ppermute(x, "cp", around), num_bytes),
        "all_gather": (
            lambda x: jax.lax.all_gather(x, "cp", tiled=True), num_bytes * (cp_size - 1),
        ),
        "all_to_all": (exchange, part * ROW_BYTES * (cp_size - 1) // cp_size),
        "ragged_all_to_all": (
            functools.partial(ragged, cp_size=cp_size), num_bytes * (cp_size - 1) // cp_size,
        ),
    }  # fmt: skip
    figures = []
    for name, (fn, moved) in calls.items():
        call = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))
        try:
            figures.append(figure(name, lambda: call(x), moved))  # noqa: B023
        except Exception as error:  # what a peer refuses is reported
            figures.append({"call": name, "error": str(error).splitlines()[0][:200]})
            print(f"{name:22} {figures[-1]['error']}", flush=True)
    if jax.process_count() == 1:
        figures.append(raw_copy(mesh, num_bytes))
    return figures


def ragged(x: jax.Array, cp_size: int) -> jax.Array:
    """Equal blocks to all ranks."""
    block = x.shape[0] // cp_size
    rank = jax.lax.axis_index("cp")
    offsets = jnp.arange(cp_size, dtype=jnp.int32) * block
    sizes = jax.lax.pcast(jnp.full(cp_size, block, jnp.int32), "cp", to="varying")
    offsets = jax.lax.pcast(offsets, "cp", to="varying")
    places = jnp.full(cp_size, rank * block, jnp.int32)
    return jax.lax.ragged_all_to_all(
        x, jnp.zeros_like(x), offsets, sizes, places, sizes, axis_name="cp"
    )


def raw_copy(mesh: Mesh, num_bytes: int) -> dict:
    """Every device's array copied to the next one, by the runtime."""
    devices = list(mesh.devices.flat)
    arrays = [jax.device_put(jnp.zeros(num_bytes, jnp.uint8), device) for device in devices]

    def call():
        return [
            jax.device_put(array, devices[(i + 1) % len(devices)]) for i, array in enumerate(arrays)
        ]

    return figure("device_put", call, num_bytes)


def figure(name: str, call, num_bytes: int, **label) -> dict:
    time_s = seconds(call, budget_s=BUDGET_S)
    row = {"call": name, **label, "mib": num_bytes / 2**20, "us": time_s * 1e6}
    row["gb_per_s"] = num_bytes / time_s / 1e9
    if jax.process_index() == 0:
        words = " ".join(f"{key}={value}" for key, value in label.items())
        print(f"{name:22} {row['gb_per_s']:6.1f} GB/s  {row['us']:8.0f} us  {words}", flush=True)
    return row


def shards(mesh: Mesh, fn):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))


def normal(mesh: Mesh, rows: int, dtype) -> jax.Array:
    make = jax.jit(
        lambda: jax.random.normal(
            jax.random.key(0), (rows * mesh.size, HEADS, HEAD_DIM), jnp.float32
        ).astype(dtype),
        out_shardings=NamedSharding(mesh, P("cp")),
    )
    return make()


if __name__ == "__main__":
    main()
