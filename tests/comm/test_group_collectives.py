"""`group_cast` and `group_reduce` on random tables, against NumPy and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, padded, pairs, random_comm

from magi_jax.comm import group_cast, group_reduce, pieces
from magi_jax.plan import CommMeta


@functools.cache
def mesh_of(cp_size):
    return jax.make_mesh((cp_size,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:cp_size])


def sharded(fn, cp_size, check_vma=True):
    """``fn`` on the shards of arrays ``[cp, rows, ...]``, the axis of ranks taken off."""

    def body(comm, *arrays):
        out = fn(comm, *jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], out)

    return jax.jit(
        jax.shard_map(
            body, mesh=mesh_of(cp_size), in_specs=P("cp"), out_specs=P("cp"), check_vma=check_vma
        )
    )


@pytest.mark.parametrize("with_self", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_equals_numpy_and_is_adjoint(cp_size, with_self, rng):
    def both(comm, x, y):
        cast, cast_vjp = jax.vjp(lambda x: group_cast(x, comm, "cp"), x)
        reduced, reduce_vjp = jax.vjp(lambda y: group_reduce(y, comm, "cp"), y)
        return cast, reduced, cast_vjp(y)[0], reduce_vjp(x)[0]

    run = sharded(both, cp_size, check_vma=not with_self)
    # Pieces of a row are found by comparing it with all where they are few, and else by a search.
    longest = pieces.MOST_COMPARED * (1 if cp_size <= 2 else 2)
    for _ in range(4):
        comm = padded(random_comm(rng, cp_size, with_self=with_self), longest)
        x = {
            "a": rng.normal(size=(cp_size, SRC_ROWS, 2, 3)),
            "b": rng.normal(size=(cp_size, SRC_ROWS)),
        }
        y = {
            "a": rng.normal(size=(cp_size, DST_ROWS, 2, 3)),
            "b": rng.normal(size=(cp_size, DST_ROWS)),
        }
        x, y = jax.tree.map(np.float32, (x, y))
        cast, reduced, cast_transposed, reduce_transposed = run(comm, x, y)
        for name in x:
            expected = numpy_cast(x[name], comm)
            np.testing.assert_array_equal(cast[name], expected)
            np.testing.assert_array_equal(reduce_transposed[name], expected)
            np.testing.assert_allclose(
                reduced[name], numpy_reduce(y[name], comm), rtol=2e-6, atol=2e-6
            )
            np.testing.assert_array_equal(cast_transposed[name], reduced[name])
            # <cast(x), y> == <x, reduce(y)>
            left, right = np.vdot(cast[name], y[name]), np.vdot(x[name], reduced[name])
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_whole_tables_integers_and_mixed_dtypes(rng):
    comm = padded(random_comm(rng, 4, with_self=True))
    x = {
        "ids": rng.integers(0, 99, size=(4, SRC_ROWS)).astype(np.int32),
        "seen": rng.integers(0, 2, size=(4, SRC_ROWS)).astype(bool),
        "half": jnp.asarray(rng.normal(size=(4, SRC_ROWS, 3)), jnp.bfloat16),
    }

    def fn(_, x):
        def loss(half):
            moved = group_cast({**x, "half": half}, comm, "cp")  # tables closed over: whole
            return jnp.sum(moved["half"].astype(jnp.float32) * moved["ids"][:, None]), moved

        grad, moved = jax.grad(loss, has_aux=True)(x["half"])
        return moved, grad

    moved, grad = sharded(fn, 4)(comm, x)
    for name in x:
        assert moved[name].dtype == x[name].dtype
        np.testing.assert_array_equal(moved[name], numpy_cast(np.asarray(x[name]), comm))
    weights = numpy_cast(x["ids"], comm)[..., None] * np.ones(3)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(grad), numpy_reduce(weights, comm), rtol=1e-2)


def test_half_precision_is_summed_in_float32(rng):
    """256 + 1 + 1 + 1 is 256 when added in bfloat16."""
    comm = padded(random_comm(rng, 4))
    piece = [(dst, 0, 0, 1, 0) for dst in range(1, 4)]
    send = np.full_like(comm.send, 0) + comm.send[0, -1]
    recv = np.full_like(comm.recv, 0) + comm.recv[0, -1]
    send[0, :3] = piece
    recv[1:, 0] = (0, 0, 0, 1, 0)
    comm = CommMeta(send, recv, comm.spec)
    y = np.zeros((4, DST_ROWS), np.float32)
    y[1:, 0] = 256, 1, 1

    def fn(comm, y):
        wide = group_reduce(y.astype(jnp.bfloat16), comm, "cp", out_dtype=jnp.float32)
        narrow = group_reduce(y, comm, "cp", wire_dtype=jnp.bfloat16)
        return wide, narrow

    wide, narrow = sharded(fn, 4)(comm, y)
    assert wide.dtype == narrow.dtype == jnp.float32
    assert wide[0, 0] == narrow[0, 0] == 258


@pytest.mark.parametrize("cp_size", [1, 4])
def test_lse_merge_equals_numpy_and_has_exact_gradients(cp_size, rng):
    comm = padded(random_comm(rng, cp_size, with_self=True))
    out = rng.normal(size=(cp_size, DST_ROWS, 2, 3))
    lse = 5 * rng.normal(size=(cp_size, DST_ROWS, 2))
    unseen = rng.random((cp_size, DST_ROWS)) < 0.3
    lse[unseen], out[unseen] = -np.inf, 0
    dout = rng.normal(size=(cp_size, SRC_ROWS, 2, 3))
    dlse = rng.normal(size=(cp_size, SRC_ROWS, 2))

    def fn(comm, out, lse, dout, dlse):
        merge = lambda out, lse: group_reduce((out, lse), comm, "cp", op="lse")  # noqa: E731
        merged, vjp = jax.vjp(merge, out, lse)
        return merged, vjp((dout, dlse))

    arrays = [np.float32(a) for a in (out, lse, dout, dlse)]
    merged, (grad_out, grad_lse) = sharded(fn, cp_size)(comm, *arrays)

    weights = np.exp(lse)
    total = numpy_reduce(weights, comm)
    mean = numpy_reduce(weights[..., None] * out, comm) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(merged[1], np.log(total), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merged[0], mean, rtol=1e-4, atol=1e-5)

    expected_out, expected_lse = np.zeros_like(out), np.zeros_like(lse)
    for src, src_row, dst, dst_row in pairs(comm):
        weight = weights[dst, dst_row] / np.where(total[src, src_row] > 0, total[src, src_row], 1)
        expected_out[dst, dst_row] = weight[:, None] * dout[src, src_row]
        inner = np.sum(dout[src, src_row] * (out[dst, dst_row] - mean[src, src_row]), axis=-1)
        expected_lse[dst, dst_row] = weight * (inner + dlse[src, src_row])
    np.testing.assert_allclose(grad_out, expected_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad_lse, expected_lse, rtol=1e-4, atol=1e-5)


def test_scan_with_remat_keeps_types(rng):
    """A carry that goes through both collectives keeps its type with ``check_vma=True``."""
    comm = padded(random_comm(rng, 4))
    x = rng.normal(size=(4, SRC_ROWS, 3)).astype(np.float32)

    def fn(comm, x):
        @jax.checkpoint
        def layer(x, _):
            return x + group_reduce(jnp.sin(group_cast(x, comm, "cp")), comm, "cp"), None

        return jax.grad(lambda x: jnp.sum(jax.lax.scan(layer, x, None, length=3)[0] ** 2))(x)

    checked, unchecked = (sharded(fn, 4, check_vma=c)(comm, x) for c in (True, False))
    np.testing.assert_allclose(checked, unchecked, rtol=1e-6)


def test_refusals(rng):
    comm = random_comm(rng, 4)
    x = np.zeros((4, SRC_ROWS, 3), np.float32)

    def refused(match, fn, cp_size=4):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(sharded(fn, cp_size), comm, x[:cp_size])

    refused("needs leaves of 24 rows", lambda c, x: group_cast(x[:-1], c, "cp"))
    refused("needs leaves of 40 rows", lambda c, x: group_reduce(x, c, "cp"))
    refused("unknown transport 'fast'", lambda c, x: group_cast(x, c, "cp", transport="fast"))
    refused("op must be one of", lambda c, x: group_reduce(x, c, "cp", op="max"))
    refused("manual over it; got axis_name='tp'", lambda c, x: group_cast(x, c, "tp"))
    refused("planned for 4 ranks, but axis 'cp' has 2", lambda c, x: group_cast(x, c, "cp"), 2)
    with pytest.raises(ValueError, match="manual axes here: \\(\\)"):
        group_cast(x[0], comm, "cp")
