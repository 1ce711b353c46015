"""One program for every packing, and what that program communicates and holds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dispatch, dist_attention, roll
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.testing import cases, hlo

SEQ_LEN = 96
VOCABULARY, WIDTH, HEADS = 11, 16, 2


def packings(rng, count):
    """Documents of different numbers and totals, none longer than the sequence."""
    for i in range(count):
        total = SEQ_LEN - int(rng.integers(0, SEQ_LEN // 2)) if i else SEQ_LEN
        yield cases.random_lengths(rng, total, rng.uniform(2, 60))


def loss(params, tokens, positions, plans):
    """A small language model: next-token loss over two layers with two masks on one dispatch."""
    x = params["embedding"][tokens]
    for plan, weights in zip(plans, params["layers"], strict=True):
        q, k, v = jnp.moveaxis((x @ weights).reshape(-1, 3, HEADS, WIDTH // HEADS), 1, 0)
        x = x + dist_attention(q, k, v, plan).reshape(x.shape)
    log_probs = jax.nn.log_softmax(x @ params["embedding"].T)
    targets = roll(tokens, plans[0], -1)
    chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]
    return -jnp.where(positions >= 0, chosen, 0.0).sum() / SEQ_LEN


def test_twenty_packings_compile_once(rng):
    config = PlanConfig(seq_len=SEQ_LEN, chunk_size=8, overlap=2)
    documents = list(packings(rng, 20))
    both = [
        (masks.varlen(n, causal=True), masks.varlen(n, causal=True, window=(7, 0)))
        for n in documents
    ]
    specs = [make_plan(mask, 4, config).spec for mask in itertools.chain(*both)]
    spec = specs[0].union(*specs[1:])
    traces = []

    @jax.jit
    def step(params, tokens, plans):
        traces.append(None)
        positions = plans[0].positions.reshape(-1)
        value, grads = jax.value_and_grad(loss)(params, tokens, positions, plans)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    mesh = make_mesh(cp=4)
    params = {
        "embedding": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
        "layers": list(0.1 * rng.normal(size=(2, WIDTH, 3 * WIDTH)).astype(np.float32)),
    }
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        for first, second in both:
            plan = make_plan(first, 4, config, spec)
            plans = jax.device_put(
                (plan, plan.with_mask(second, overlap=2, spec=spec)), NamedSharding(mesh, P("cp"))
            )
            tokens = dispatch(rng.integers(0, VOCABULARY, SEQ_LEN), plan)
            value, params = step(
                params, jax.device_put(tokens, NamedSharding(mesh, P("cp"))), plans
            )
            assert np.isfinite(value)
            params = jax.device_put(params, NamedSharding(mesh, P()))
    assert len(traces) == 1
    assert step._cache_size() == 1


@pytest.mark.parametrize("where", ["global", "shard_map over cp"])
def test_communication_and_memory(where, rng):
    """Nothing but the planned transfers, to the byte, and no array with all pairs of tokens."""
    size, heads, kv_heads, dim, v_dim = 1024, 4, 2, 8, 4
    mesh = make_mesh(dp=2, cp=2, tp=2)
    mask = cases.random_mask(rng, size, size, 20)
    plan = make_plan(mask, 2, PlanConfig(overlap=2, roll_shifts=()))
    report = plan.report()
    rows = 2 * plan.spec.local_len
    sharding = NamedSharding(mesh, P("dp", "cp", "tp"))

    options = DistOptions(batch_axes="dp", head_axes="tp")

    def attention(q, k, v, plan):
        return dist_attention(q, k, v, plan, options=options)

    if where != "global":
        spec = P(None, "cp")
        attention = jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(spec, spec, spec, P("cp")),
            out_specs=spec,
            axis_names={"cp"},
        )

    def array(num_heads, dim):
        return jax.ShapeDtypeStruct((2, rows, num_heads, dim), jnp.float32, sharding=sharding)

    operands = array(heads, dim), array(kv_heads, dim), array(kv_heads, v_dim)
    placed = jax.device_put(plan, NamedSharding(mesh, P("cp")))

    def gradients(q, k, v, plan):
        return jax.grad(lambda *a: attention(*a, plan).sum(), argnums=(0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        forward = jax.jit(attention).lower(*operands, placed).compile()
        both = jax.jit(gradients).lower(*operands, placed)
        backward = both.compile()
    # On each device: one sequence of the batch, half of the kv heads. (In float32, since XLA widens
    # what bfloat16 collectives carry on a CPU.)
    planned = report.collective_bytes(kv_heads // 2, dim, v_dim, dtype="float32")
    assert planned > 0
    assert hlo.collective_bytes(forward, "all-to-all") == planned
    for program in (forward, backward):
        hlo.assert_no_all_gather(program)
        assert {c.op for c in hlo.collectives(program)} == {"all-to-all"}
        assert not hlo.tensors_of_at_least(program, plan.spec.local_len**2)


def test_communication_of_the_backward_pass_alone(rng):
    """Keys and values come once again, and their gradients go back once."""
    mask = cases.random_mask(rng, 256, 256, 20)
    plan = make_plan(mask, 4, PlanConfig(overlap=2, roll_shifts=()))
    mesh = make_mesh(cp=4)
    shape = (4 * plan.spec.local_len, 2, 8)
    x = jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, P("cp")))
    attention = functools.partial(dist_attention, plan=plan, mesh=mesh)
    _, pull = jax.jit(lambda *operands: jax.vjp(attention, *operands))(x, x, x)
    compiled = jax.jit(lambda pull, dout: pull(dout)).lower(pull, x).compile()
    # Its stages may be cut in another way than those of the forward pass.
    rows = sum(comm.spec.wire_rows for comm in plan.backward_stages.comm)
    assert hlo.collective_bytes(compiled, "all-to-all") == 2 * rows * 2 * 2 * 8 * 4


def test_hlo_helpers_see_what_they_look_for():
    """A program that does everything wrong is caught."""
    mesh = make_mesh(cp=4)
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("cp")))

    def wrong(x):
        whole = jax.lax.all_gather(x, "cp", tiled=True)
        return jax.lax.psum(x, "cp"), (x @ whole.T).max(axis=-1, keepdims=True) + jnp.cumsum(
            x @ whole.T, 0
        )

    program = jax.jit(jax.shard_map(wrong, mesh=mesh, in_specs=P("cp"), out_specs=(P(), P("cp"))))
    compiled = program.lower(x).compile()
    with pytest.raises(AssertionError, match="gathers"):
        hlo.assert_no_all_gather(compiled)
    assert hlo.collective_bytes(compiled, "all-gather") == 64 * 8 * 4
    assert hlo.collective_bytes(compiled, "all-reduce") == 16 * 8 * 4
    assert hlo.tensors_of_at_least(compiled, 16 * 64)[0].shape == (16, 64)
    assert not hlo.tensors_of_at_least(compiled, 16 * 64 + 1)
    with pytest.raises(ValueError, match="op must be one of"):
        hlo.collectives(compiled, "all-together")


def test_hlo_of_asynchronous_collectives():
    """As a GPU's compiler writes them: the types of some starts list their operands first."""
    text = """
  %ag = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), channel_id=1
  %ag-done = bf16[16,8]{1,0} all-gather-done(%ag)
  ROOT %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=2
  %ar = (f32[8]{0}, /*index=1*/f32[2]{0}) all-reduce-start(%y, %z), to_apply=%add
"""
    gather, permute, reduce = hlo.collectives(text)
    assert (gather.op, gather.num_bytes) == ("all-gather", 16 * 8 * 2)
    assert (permute.op, permute.num_bytes) == ("collective-permute", 8 * 4)
    assert (reduce.op, reduce.num_bytes) == ("all-reduce", 10 * 4)
