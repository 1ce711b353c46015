"""What does not fit is refused with the values, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import make_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dispatch, dist_attention, roll, undispatch
from magi_jax.plan import PlanConfig, make_plan, stack_plans

PLAN = make_plan(masks.causal(30), 4, PlanConfig(chunk_size=4))
ROWS = 4 * PLAN.spec.local_len
OVER_DP = DistOptions(batch_axes="dp")


def tensor(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def call(q=None, k=None, v=None, plan=PLAN, **options):
    options.setdefault("mesh", make_mesh(cp=4))
    q = tensor(ROWS, 4, 8) if q is None else q
    k = tensor(*q.shape[:-2], 2, 8) if k is None else k
    v = tensor(*k.shape[:-1], 6) if v is None else v
    return jax.eval_shape(lambda q, k, v: dist_attention(q, k, v, plan, **options), q, k, v)


def test_what_fits_is_accepted():
    assert call().shape == (ROWS, 4, 6)
    assert call(tensor(3, ROWS, 4, 8)).shape == (3, ROWS, 4, 6)
    out, lse = call(return_residual=True, sinks=tensor(4))
    assert (out.shape, lse.shape, lse.dtype) == ((ROWS, 4, 6), (ROWS, 4), jnp.float32)


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("q has 30 rows.*dispatch", {"q": tensor(30, 4, 8)}),
        (f"k has {ROWS - 1} rows.*dispatch", {"k": tensor(ROWS - 1, 2, 8)}),
        (r"q has 30 rows.*dispatch\(x, plan, 'cp', axis=1\)", {"q": tensor(3, 30, 4, 8)}),
        ("q has 4 rows.*; rows come before heads here", {"q": tensor(3, 4, ROWS, 8)}),
        (r"all be \[T, N, H\] or all be \[B, T, N, H\]", {"q": tensor(ROWS, 8)}),
        (r"k \[\*B, S, K, H\]", {"k": tensor(ROWS, 2, 7)}),
        ("q has 4 heads, which is not a multiple of the 3 of k", {"k": tensor(ROWS, 3, 8)}),
        ("one floating dtype, got float32, float16", {"k": tensor(ROWS, 2, 8, dtype=np.float16)}),
        ("one floating dtype", {"q": tensor(ROWS, 4, 8, dtype=np.int32)}),
        (r"sinks must be \[N\] or \[X, N\] with N = 4, got \(5,\)", {"sinks": tensor(5)}),
        ("sinks must be floating, got int32", {"sinks": tensor(4, dtype=np.int32)}),
        ("for 4 ranks, but mesh axis 'cp' has 2", {"mesh": make_mesh(cp=2)}),
        (
            "axis_name='sp', which is no axis .*say which one shards rows",
            {"axis_name": "sp"},
        ),
        ("batch_axes names 'dq'", {"options": DistOptions(batch_axes="dq")}),
        ("head_axes names 'cp'", {"options": DistOptions(head_axes="cp")}),
        ("q has no batch axis", {"options": OVER_DP, "mesh": make_mesh(dp=2, cp=4)}),
        (
            r"automatic mesh axes \['dp'\] is not known here: name them in DistOptions",
            {"mesh": make_mesh(dp=2, cp=4)},
        ),
        (
            "the batch of 3 does not divide over the 2 shards",
            {"q": tensor(3, ROWS, 4, 8), "options": OVER_DP, "mesh": make_mesh(dp=2, cp=4)},
        ),
        ("replica per sequence of a batch", {"plan": stack_plans([PLAN, PLAN])}),
        (
            "the stacked plan has 2 replicas here, the batch 3",
            {"plan": stack_plans([PLAN, PLAN]), "q": tensor(3, ROWS, 4, 8)},
        ),
        ("implementation must be one of", {"options": DistOptions(implementation="magic")}),
        ("unknown transport 'pigeon'", {"options": DistOptions(transport="pigeon")}),
    ],
)
def test_refused(match, arguments):
    with pytest.raises(ValueError, match=match):
        call(**arguments)


def test_heads_that_shards_do_not_divide():
    plan = make_plan(masks.causal(30), 2, PlanConfig(chunk_size=4))
    rows = 2 * plan.spec.local_len
    with pytest.raises(ValueError, match=r"k has 2 heads .* the 4 shards of mesh axes"):
        call(
            tensor(rows, 4, 8),
            plan=plan,
            mesh=make_mesh(cp=2, tp=4),
            options=DistOptions(head_axes="tp"),
        )


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("mesh as mesh=; got axis_name=Mesh", {"axis_name": make_mesh(cp=4)}),
        ("options must be DistOptions, got dict", {"options": {"deterministic": True}}),
    ],
)
def test_things_of_another_kind(match, arguments):
    with pytest.raises(TypeError, match=match):
        call(**arguments)


def test_no_mesh_in_sight():
    with pytest.raises(ValueError, match=r"finds no mesh.*jax.set_mesh.*legacy"):
        call(mesh=None)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_a_legacy_mesh_context_is_not_seen():
    with make_mesh(cp=4), pytest.raises(ValueError, match=r"finds no mesh.*legacy"):
        call(mesh=None)


def test_another_mesh_than_that_of_the_context():
    with jax.set_mesh(make_mesh(cp=8)), pytest.raises(ValueError, match="but the context has"):
        call()


def test_explicit_rows_that_are_not_sharded():
    mesh = make_mesh(AxisType.Explicit, cp=4)
    for lead, spec in (((), r"P\('cp'\)"), ((3,), r"P\(None, 'cp'\)")):
        message = rf"rows of q must be sharded over 'cp'.*NamedSharding\(mesh, {spec}\)"
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            jax.jit(lambda q: dist_attention(q, q, q, PLAN)).lower(tensor(*lead, ROWS, 2, 8))
    q = jax.device_put(tensor(ROWS, 2, 8), NamedSharding(mesh, P("cp")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must be sharded alike"):
        jax.jit(lambda q, k: dist_attention(q, k, k, PLAN)).lower(q, tensor(ROWS, 2, 8))


def test_vmap_over_explicit_axes():
    mesh = make_mesh(AxisType.Explicit, dp=2, cp=4)
    q = jax.device_put(tensor(2, ROWS, 2, 8), NamedSharding(mesh, P("dp", "cp")))
    with jax.set_mesh(mesh):
        for call in (lambda q: dist_attention(q, q, q, PLAN), lambda q: roll(q, PLAN, -1)):
            with pytest.raises(NotImplementedError, match=r"vmap .* explicit .*'dp'.* whole batch"):
                jax.jit(jax.vmap(call)).lower(q)


@pytest.mark.parametrize("move", [dispatch, undispatch, lambda x, plan: roll(x, plan, -1)])
def test_lists_of_numbers_are_no_arrays(move):
    with pytest.raises(TypeError, match=r"pytree of arrays; got 0.*np\.asarray"):
        move({"tokens": list(range(ROWS))}, PLAN)


@pytest.mark.parametrize("move", [dispatch, undispatch, lambda x, plan: roll(x, plan, -1)])
def test_moves_say_what_they_need(move):
    x = tensor(30 if move is dispatch else ROWS)
    with pytest.raises(ValueError, match=r"finds no mesh.*; NumPy arrays under a plan of NumPy"):
        move(jnp.asarray(x), PLAN)
    with pytest.raises(TypeError, match="plan must be an AttentionPlan, got ndarray"):
        move(PLAN, x)


def test_local_rows_inside_a_shard_map():
    run = jax.shard_map(
        lambda q: dist_attention(q, q, q, PLAN),
        mesh=make_mesh(cp=4),
        in_specs=P(),
        out_specs=P("cp"),
    )
    with pytest.raises(ValueError, match=f"q has {ROWS} rows, but the plan lays {ROWS // 4} out"):
        jax.eval_shape(run, tensor(ROWS, 2, 8))


def test_options_are_named():
    with pytest.raises(TypeError, match="positional"):
        DistOptions(True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reduce_dtype": "int8"}, "reduce_dtype must be one of float32, .* got 'int8'"),
        ({"reduce_dtype": "float33"}, "reduce_dtype must be one of float32, .* got 'float33'"),
        ({"batch_axes": {"dp"}}, r"batch_axes must name mesh axes: .* got \{'dp'\}"),
        ({"head_axes": ("tp", 1)}, r"head_axes must name mesh axes: .* got \('tp', 1\)"),
    ],
)
def test_options_are_checked_when_they_are_made(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        DistOptions(**options)


def test_options_that_mean_the_same_are_the_same():
    narrow = DistOptions(batch_axes=["dp"], reduce_dtype=jnp.bfloat16)
    assert hash(narrow) == hash(DistOptions(batch_axes=("dp",), reduce_dtype="bfloat16"))
