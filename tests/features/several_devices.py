"""Runs a case of `dist_attention` and its float64 twin."""

import jax
import jax.numpy as jnp
import numpy as np
from feature_check import (
    QUICK,
    Answer,
    Inputs,
    expected,
    implementation_of,
    loss,
    options_of,
    random_inputs,
    remat,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dispatch, dist_attention, undispatch
from magi_jax.plan import PlanConfig, make_plan, stack_plans
from magi_jax.testing.cases import random_mask

T, S = 53, 70
TRAVELLING = ((5, 9), (30, 41))
BATCH = 2


def run(case, rng, dims) -> tuple[Answer, Answer]:
    """What the case gives, and what it should."""
    batched = case["batch"] != "none"
    k_len = T if case["keys"] == "own" else S
    inputs = random_inputs(rng, case, (BATCH,) if batched else (1,), T, k_len, dims["equal"])
    devices = jax.devices()
    data = BATCH if batched and len(devices) >= 2 * BATCH else 1
    ranks = min(int(case["ranks"]), len(devices) // data)
    kind = AxisType.Explicit if case["called"] == "over explicit axes" else AxisType.Auto
    mesh = jax.make_mesh((data, ranks), ("dp", "cp"), (kind,) * 2, devices=devices[: data * ranks])
    groups = 1 if case["masks of heads"] == "one" else 2
    sequences = BATCH if case["batch"] == "a plan each" else 1
    each = [[_mask(case, rng, k_len) for _ in range(groups)] for _ in range(sequences)]
    plans, keys = _plans(case, each, ranks)
    answer = _compute(case, inputs, plans, keys, mesh)
    dense = [[mask.dense() for mask in row] for row in each]
    return answer, expected(case, inputs, dense * (len(inputs.q) // sequences))


def _mask(case, rng, k_len):
    if case["mask"] == "random":
        return random_mask(rng, T, k_len, 8)
    return masks.varlen([20, 1, T - 25, 4], k_lengths=[24, 3, k_len - 27, 0], causal=True)


def _plans(case, each, ranks):
    """A plan for each group of heads, stacked if each sequence has its own; and that of the keys."""
    travelling = TRAVELLING if case["queries"] == "some travel" else "never"
    stages = 1 if case["stages"] == "1" else (3, 2)
    config = PlanConfig(chunk_size=4, overlap=stages, travelling=travelling, roll_shifts=())
    own = case["keys"] == "own"
    keys = {"own": None, "replicated": "replicated"}.get(
        case["keys"], make_plan(masks.full(S), ranks, config)
    )
    stages = "auto" if case["keys"] == "replicated" else stages

    def planned(specs):
        rows = []
        for row in each:
            base = make_plan(
                row[0] if own else masks.causal(T), ranks, config, specs[0] if own else None
            )
            others = row[1:] if own else row
            more = [
                base.with_mask(mask, keys=keys, overlap=stages, travelling=travelling, spec=spec)
                for mask, spec in zip(others, specs[own:], strict=True)
            ]
            rows.append([base, *more] if own else more)
        return rows

    rows = planned([None] * len(each[0]))
    if len(rows) > 1:
        groups = ([plan.spec for plan in group] for group in zip(*rows, strict=True))
        rows = planned([first.union(*others) for first, *others in groups])
        return [stack_plans(group) for group in zip(*rows, strict=True)], keys
    return rows[0], keys


def _compute(case, inputs: Inputs, plans, keys, mesh) -> Answer:
    batched = case["batch"] != "none"
    first = plans[0]
    if not batched:
        inputs = Inputs(*(x if i == 3 else x[0] for i, x in enumerate(inputs)))
    axis = int(batched)
    move = {"q": first, "dout": first, "dlse": first}
    if case["keys"] != "replicated":
        key_plan = first if keys is None else keys
        move |= {"k": key_plan, "v": key_plan}
    placed = inputs._replace(
        **{name: dispatch(getattr(inputs, name), plan, axis=axis) for name, plan in move.items()}
    )
    results, gradients = _program(case, mesh)(*_on_mesh(case, mesh, placed, plans))
    out, lse, *top = results
    rows = {"out": out, "lse": lse, "dq": gradients[0], "dk": gradients[1], "dv": gradients[2]}
    plan_of = {"out": first, "lse": first, "dq": first, "dk": move.get("k"), "dv": move.get("v")}
    for name, x in rows.items():
        x = np.asarray(x, np.float32)
        x = x if plan_of[name] is None else undispatch(x, plan_of[name], axis=axis)
        rows[name] = x if batched else x[None]
    return Answer(**rows, max_logits=top[0] if top else None, dsinks=gradients[3])


def _specs(case):
    """Of rows, of rows of keys, and of the plan."""
    lead = ("dp",) if case["batch"] != "none" else ()
    stacked = ("dp",) if case["batch"] == "a plan each" else ()
    key_rows = None if case["keys"] == "replicated" else "cp"
    return P(*lead, "cp"), P(*lead, key_rows), P(*stacked, "cp")


def _on_mesh(case, mesh, placed: Inputs, plans):
    rows, key_rows, plan = _specs(case)
    specs = Inputs(rows, key_rows, key_rows, P(), rows, rows)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = [None if x is None else put(x, s) for x, s in zip(placed, specs, strict=True)]
    return Inputs(*arrays), jax.tree.map(lambda leaf: put(leaf, plan), plans)


def _program(case, mesh):
    batched, inside = case["batch"] != "none", case["called"] == "in a shard_map"
    automatic = case["called"] == "over automatic axes"
    options = DistOptions(
        batch_axes=("dp" if batched else ()) if automatic else None,
        implementation=implementation_of(case),
        deterministic=case["deterministic"] == "asked",
        keep_remote_kv=case["remote keys"] == "kept",
        reduce_dtype=jnp.dtype(case["partial results travel in"]),
    )

    def attend(q, k, v, sinks, plans):
        return dist_attention(
            q,
            k,
            v,
            plans if len(plans) > 1 else plans[0],
            sinks=sinks,
            return_residual=True,
            return_max_logits=case["max logits"] == "returned",
            options=options,
            **options_of(case),
        )

    rows, key_rows, plan = _specs(case)

    def local(*operands):
        out, lse, *top = remat(case, attend)(*operands)
        if batched:  # the axes of the batch are the caller's here
            top = [jax.lax.pmax(x, "dp") for x in top]
        return out, lse, *top

    returned = (rows, rows, P())[: 2 + (case["max logits"] == "returned")]
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, key_rows, key_rows, P(), plan), out_specs=returned
    )

    def both(inputs, plans):
        q, k, v, sinks, dout, dlse = inputs

        def value(operands):
            results = (sharded if inside else remat(case, attend))(*operands, plans)
            return loss(case, results, dout, dlse), results

        gradients, results = jax.grad(value, has_aux=True)((q, k, v, sinks))
        return results, gradients

    def run(*args):
        with jax.set_mesh(mesh):
            return jax.jit(both, compiler_options=QUICK)(*args)

    return run
