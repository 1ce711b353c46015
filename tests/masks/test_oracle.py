import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from magi_jax import masks
from magi_jax.testing import oracle
from magi_jax.testing.cases import mask_cases, random_mask


def operands(rng, q_len, k_len, heads=4, kv_heads=2, head_dim=8, v_head_dim=5):
    shapes = [(q_len, heads, head_dim), (k_len, kv_heads, head_dim), (k_len, kv_heads, v_head_dim)]
    return [rng.normal(size=shape) for shape in shapes]


def one_row(q, k, v, scale, cap, sinks):
    """Attention of one query ``[H]`` over the keys ``[X, H]`` that it sees, in one head."""
    x = scale * k @ q
    x = cap * np.tanh(x / cap) if cap else x
    weights = np.exp(np.append(x, sinks))
    lse = np.log(weights.sum()) if weights.size else -np.inf
    return (weights[: len(x)] / max(weights.sum(), 1e-300)) @ v, lse


def dense_jax(q, k, v, sinks, dense, scale, cap):
    """Differentiable attention; a row without keys must have a sink."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    x = scale * jnp.einsum("tnh,snh->nts", q, k)
    x = cap * jnp.tanh(x / cap) if cap else x
    x = jnp.where(dense, x, -jnp.inf)
    sinks = jnp.broadcast_to(
        sinks.reshape(-1, q.shape[1]).T[:, None], (*x.shape[:2], sinks.size // 4)
    )
    lse = jax.scipy.special.logsumexp(jnp.concatenate([x, sinks], axis=-1), axis=-1)
    return jnp.einsum("nts,snh->tnh", jnp.exp(x - lse[..., None]), v), lse.T


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, (4,), (2, 4)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_row_by_row_and_against_autodiff(kv_heads, sinks, cap):
    rng = np.random.default_rng(kv_heads)
    mask = random_mask(rng, 9, 11) | masks.global_rows(9, 11, rows=(4, 6))
    dense = mask.dense()
    dense[2] = False
    q, k, v = operands(rng, 9, 11, kv_heads=kv_heads)
    sinks = None if sinks is None else rng.normal(size=sinks)
    options = {"scale": 0.7, "logits_soft_cap": cap, "sinks": sinks}
    out, lse = oracle.attention(q, k, v, dense, **options)
    of_head = np.zeros((0, 4)) if sinks is None else sinks.reshape(-1, 4)
    for t, n in np.ndindex(9, 4):
        keys, head = dense[t], n // (4 // kv_heads)
        row, row_lse = one_row(q[t, n], k[keys, head], v[keys, head], 0.7, cap, of_head[:, n])
        np.testing.assert_allclose(out[t, n], row, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[t, n], row_lse, rtol=1e-12)

    seen = dense.any(1) | (sinks is not None)
    dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    got = oracle.attention_grads(q, k, v, dense, dout, dlse, **options)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in (q[seen], k, v, of_head)]
        call = functools.partial(dense_jax, dense=jnp.asarray(dense[seen]), scale=0.7, cap=cap)
        gradients = jax.jit(lambda x, g: jax.vjp(call, *x)[1](g))(
            arguments, (dout[seen], dlse[seen])
        )
    np.testing.assert_allclose(got.dq[seen], gradients[0], rtol=1e-10, atol=1e-12)
    assert not got.dq[~seen].any()
    np.testing.assert_allclose(got.dk, gradients[1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got.dv, gradients[2], rtol=1e-10, atol=1e-12)
    if sinks is None:
        assert got.dsinks is None
    else:
        np.testing.assert_allclose(got.dsinks.reshape(-1, 4), gradients[3], rtol=1e-10, atol=1e-12)


def test_rows_without_keys():
    rng = np.random.default_rng(0)
    q, k, v = operands(rng, 3, 4)
    dense = np.zeros((3, 4), bool)
    out, lse = oracle.attention(q, k, v, dense)
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = oracle.attention_grads(q, k, v, dense, np.ones_like(out), np.ones_like(lse))
    assert not any(x.any() for x in gradients[:3])
    sinks = np.array([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    out, lse = oracle.attention(q, k, v, dense, sinks=sinks)
    assert not out.any()
    np.testing.assert_allclose(lse, np.log(np.exp(sinks).sum(0))[None].repeat(3, 0))


def test_default_scale_and_no_tokens():
    rng = np.random.default_rng(0)
    q, k, v = operands(rng, 5, 6)
    dense = masks.full(5, 6).dense()
    out, _ = oracle.attention(q, k, v, dense)
    np.testing.assert_allclose(out, oracle.attention(q, k, v, dense, scale=8**-0.5)[0])
    out, lse = oracle.attention(q[:0], k, v, dense[:0])
    assert (out.shape, lse.shape) == ((0, 4, 5), (0, 4))
    out, lse = oracle.attention(q, k[:0], v[:0], dense[:, :0])
    assert not out.any()
    assert np.isneginf(lse).all()


def test_large_logits_do_not_overflow():
    q = np.full((2, 1, 1), 1e3)
    out, lse = oracle.attention(q, q, q, masks.causal(2).dense(), scale=1.0)
    np.testing.assert_allclose(out, 1e3)
    np.testing.assert_allclose(lse[:, 0], [1e6, 1e6 + np.log(2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((4, 3, 8))}, "expected q .T, N, H.*"),
        ({"k": np.zeros((4, 3, 8)), "v": np.zeros((4, 3, 5))}, "4 heads, .* multiple of the 3"),
        ({"dense_mask": np.zeros((3, 4))}, "bool .3, 4.; got float64"),
        ({"sinks": np.zeros(3)}, "N = 4; got"),
    ],
)
def test_refusals(change, message):
    q, k, v = operands(np.random.default_rng(0), 3, 4)
    arguments = {"q": q, "k": k, "v": v, "dense_mask": np.zeros((3, 4), bool)} | change
    with pytest.raises(ValueError, match=message):
        oracle.attention(**arguments)


@pytest.mark.parametrize("size", [32, 61, 128])
def test_mask_cases_are_masks(size):
    cases = mask_cases(size)
    assert cases == mask_cases(size)
    for name, mask in cases.items():
        masks.AttnMask(mask.slices, mask.q_len, mask.k_len)  # checks that no two slices overlap
        assert mask.dense().sum() == mask.area, name
    empty_rows = {name for name, mask in cases.items() if (mask.row_counts() == 0).any()}
    assert {"nothing_visible", "rows_without_keys", "holes_in_both"} <= empty_rows
    assert any(mask.q_len != mask.k_len for mask in cases.values())


def test_random_masks_have_all_kinds():
    rng = np.random.default_rng(0)
    drawn = [random_mask(rng, 40, 50, max_slices=6) for _ in range(50)]
    assert {mask.num_slices for mask in drawn} == set(range(7))
    kinds = {piece.mask_type for mask in drawn for piece in mask}
    assert kinds == {*masks.MaskType, None}
    for mask in drawn:
        masks.AttnMask(mask.slices, 40, 50)
