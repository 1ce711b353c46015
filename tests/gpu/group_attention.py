"""A scenario of `group_worker.py`: distributed attention against one GPU that computes all of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from group_problem import normal, on_devices, sharded
from jax.sharding import Mesh

from magi_jax import flex_flash_attention, masks
from magi_jax.comm import Transport, attention_staging_bytes, symmetric_memory
from magi_jax.parallel import DistOptions, dispatch
from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.plan import PlanConfig, make_plan, slice_table

TOKENS, HEADS, KV_HEADS, DIM = 5632, 16, 2, 128  # keys enough of each rank for pairs of blocks
STEPS = 4  # of each plan, with other operands
CONFIGS = [
    PlanConfig(overlap=overlap, travelling="never", roll_shifts=()) for overlap in ("late", 2)
]
TOLERANCE = 1.2e-2  # two implementations, each of which rounds to bfloat16
NAMES = ("out", "dq", "dk", "dv", "dsinks")


def attention(mesh: Mesh, room: dict, rng: np.random.Generator) -> None:
    """Stages and late queries in turns over one memory, gradients of sinks too, also where nothing else is
    read.
    """
    plans = [make_plan(masks.causal(TOKENS), mesh.size, config) for config in CONFIGS]
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    staging = max(attention_staging_bytes(plan.spec, **sizes) for plan in plans)
    with symmetric_memory(
        mesh, "cp", timeout_s=60, **(room | {"staging_bytes": staging})
    ) as memory:
        whole, of_sinks = (passes(mesh, memory.transport, gives_all) for gives_all in (True, False))
        kept = []  # so that the next ones get other buffers
        for plan in plans * STEPS:
            heads = HEADS, KV_HEADS, KV_HEADS, HEADS
            rows = [normal(rng, TOKENS, n, DIM).astype(jnp.bfloat16) for n in heads]
            sinks = normal(rng, HEADS)
            there = on_devices(mesh, (plan, *in_parts(rows, plan), np.stack([sinks] * mesh.size)))
            got = whole(*there)
            memory.check()
            kept.append((there, got))
            wanted = answer(plan, mesh, rows, sinks)
            compare(NAMES, got, wanted)
            compare(NAMES[4:], [of_sinks(*there)], wanted[4:])
        memory.check()
        # Sums that others are added to stay where they are: those of two stages, and no copy of such arrays.
        text = whole.lower(*there).compile().as_text()
        like = rf"f32\[\d+,{KV_HEADS},{DIM}\]"
        sums = re.findall(rf"{like}.*magi_jax_group_reduce_sum.*output_to_operand_aliasing", text)
        assert len(sums) == 2, len(sums)
        copied = re.search(rf"{like}.* copy(-start)?\(.*", text)
        assert copied is None, copied[0]


def answer(plan, mesh: Mesh, rows, sinks) -> list:
    """What this process should have of each result."""
    rank = [device.process_index for device in mesh.devices.flat].index(jax.process_index())
    *results, dsinks = alone(*rows, sinks, owned(plan, rank), slice_table(masks.causal(TOKENS)))
    return [x[rank] for x in in_parts(results, plan)] + [dsinks]


def passes(mesh: Mesh, transport: Transport, whole: bool):
    """``(plan, q, k, v, dout, sinks) -> out`` and all gradients, or that of the sinks alone."""

    def both(plan, q, k, v, dout, sinks):
        def attend(q, k, v, sinks):
            options = DistOptions(transport=transport)
            return dist_attention(q, k, v, plan, "cp", sinks=sinks, options=options)

        out, pull = jax.vjp(attend, q, k, v, sinks)
        return (out, *pull(dout)) if whole else pull(dout)[3]

    return sharded(both, mesh)


@functools.partial(jax.jit)
def alone(q, k, v, dout, sinks, is_owned, table):
    """The same without ranks, by another kernel; the gradient of the sinks over some of the rows."""

    def attend(q, k, v, sinks):
        return flex_flash_attention(q, k, v, table, sinks=sinks, implementation="sm80")

    out, pull = jax.vjp(attend, q, k, v, sinks)
    return out, *pull(dout)[:3], pull(dout * is_owned[:, None, None].astype(dout.dtype))[3]


def in_parts(rows, plan):
    """Arrays ``[cp, local_len, ...]`` of those in the order of the sequence."""
    parts = (dispatch(np.asarray(x), plan) for x in rows)
    return [x.reshape(plan.cp_size, -1, *x.shape[1:]) for x in parts]


def owned(plan, rank: int) -> np.ndarray:
    """Which rows of the sequence a rank has."""
    positions = plan.dispatch.positions[rank]
    return np.isin(np.arange(TOKENS), positions[positions >= 0])


def part_of(array: jax.Array) -> np.ndarray:
    """What this process has of an array ``[cp, ...]``."""
    return np.asarray(array.addressable_shards[0].data[0], np.float32)


def compare(names, got, wanted) -> None:
    """What this process has of arrays ``[cp, ...]``, by relative error."""
    for name, x, y in zip(names, map(part_of, got), wanted, strict=True):
        y = np.asarray(y, np.float32)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < TOLERANCE, f"{name}: error {error:.2e}"
