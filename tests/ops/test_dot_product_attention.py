"""Our `dot_product_attention` against jax.nn's: every combination of arguments that both take."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from magi_jax import masks
from magi_jax.ops import dot_product_attention

B, T, S, N, K, H = 2, 19, 26, 4, 2, 8
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def _operands(rng, batch=(B,), t=T, s=S):
    shapes = (*batch, t, N, H), (*batch, s, K, H), (*batch, s, K, H)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _dense_mask(rng, shape):
    return rng.random(shape) < 0.7


def _visible(t, s, options, batch=B):
    """What jax.nn's rules leave visible, ``[B, T, S]``, written down from its documentation."""
    q, k = np.arange(t)[:, None], np.arange(s)[None]
    seen = np.ones((batch, t, s), bool)
    if options.get("is_causal"):
        seen &= k <= q
    window = options.get("local_window_size")
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (q - left <= k) & (k <= q + right)
    for name, index in (("query_seq_lengths", q), ("key_value_seq_lengths", k)):
        if name in options:
            seen &= index[None] < np.asarray(options[name])[:, None, None]
    if "mask" in options:
        mask = np.asarray(options["mask"])
        seen &= np.broadcast_to(mask.reshape((1,) * (4 - mask.ndim) + mask.shape)[:, 0], seen.shape)
    return seen


def _check(operands, options, lead=(B,)):
    """Results and gradients; rows that see nothing are 0 here and a mean of all values there."""
    t, s = operands[0].shape[-3], operands[1].shape[-3]
    seen = _visible(t, s, options, batch=int(np.prod(lead, dtype=int))).any(axis=2)
    seen = seen.reshape(*lead, t)

    def run(function, *operands):
        out, lse = function(*operands, return_residual=True, **options)
        loss = (jnp.sin(out) * seen[..., None, None]).sum()
        return loss, (out, lse)

    @jax.jit
    def both(*operands):
        wanted = jax.value_and_grad(run, argnums=(1, 2, 3), has_aux=True)
        functions = dot_product_attention, jax.nn.dot_product_attention
        return [wanted(function, *operands) for function in functions]

    ours, theirs = jax.tree.map(np.asarray, both(*operands))
    (_, (out, lse)), grads = ours
    (_, (their_out, their_lse)), their_grads = theirs
    assert out.shape == their_out.shape
    assert lse.shape == their_lse.shape
    np.testing.assert_allclose(out[seen], their_out[seen], **TOLERANCE)
    np.testing.assert_allclose(lse[seen], their_lse[seen], **TOLERANCE)
    assert not np.any(out[~seen])
    assert np.all(np.isneginf(lse[~seen]))
    for grad, theirs in zip(grads, their_grads, strict=True):
        np.testing.assert_allclose(grad, theirs, **TOLERANCE)


CAUSAL = ({}, {"is_causal": True})
WINDOWS = (
    {},
    {"local_window_size": 5},
    {"local_window_size": (3, 0)},
    {"local_window_size": (0, 4)},
)
LENGTHS = (
    {},
    {"query_seq_lengths": np.array([T, 4], np.int32)},
    {"key_value_seq_lengths": np.array([7, S], np.int32)},
    {
        "query_seq_lengths": np.array([5, 18], np.int32),
        "key_value_seq_lengths": np.array([20, 1], np.int32),
    },
)


# Every pair of a causal flag and a window; kinds of lengths in turn, each with either flag.
COMBINATIONS = [
    {**causal, **window, **LENGTHS[(2 * i + j) % len(LENGTHS)]}
    for (i, causal), (j, window) in itertools.product(enumerate(CAUSAL), enumerate(WINDOWS))
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "-".join(options) or "plain")
def test_combinations(options, rng):
    _check(_operands(rng), options)


@pytest.mark.parametrize("shape", [(1, 1, T, S), (B, 1, T, S), (B, 1, 1, S), (T, S), (B, N, T, S)])
def test_masks(shape, rng):
    mask = _dense_mask(rng, shape)
    if shape[:2] == (B, N):
        mask = np.broadcast_to(mask[:, :1], shape)
    more = {"is_causal": True, "query_seq_lengths": np.array([T, 3], np.int32)}
    _check(_operands(rng), {"mask": mask, **(more if len(shape) == 4 else {})})


@pytest.mark.parametrize(("t", "s"), [(31, 12), (12, 31)])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (3, 1)}], ids=str)
def test_top_left_alignment_without_a_batch_axis(t, s, options, rng):
    _check(_operands(rng, (), t, s), {"scale": 0.3, **options}, lead=())


def test_signature_is_that_of_jax():
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_concrete_device_arrays_are_known_too(rng):
    lengths = jnp.array([3, T], jnp.int32)
    _check(_operands(rng), {"query_seq_lengths": lengths})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"bias": np.zeros((1, 1, T, S))}, NotImplementedError, "bias needs T x S memory"),
        (
            {"mask": np.zeros((1, 1, T, S))},
            ValueError,
            r"bool and broadcastable to \[2, 4, 19, 26\]",
        ),
        ({"mask": np.ones((1, 1, T, 3), bool)}, ValueError, "broadcastable"),
        ({"query_seq_lengths": np.array([1])}, ValueError, r"integers \[2\]"),
        ({"key_value_seq_lengths": np.array([1, 99])}, ValueError, r"lie in \[0, 26\]; got 99"),
        ({"local_window_size": (-1, 0)}, ValueError, "-1"),
        ({"implementation": "cudnn"}, ValueError, "cudnn"),
        ({"mask": masks.full(T, S)}, TypeError, "got an AttnMask; give it to flex_flash_attention"),
    ],
)
def test_refusals(options, error, match, rng):
    with pytest.raises(error, match=match):
        dot_product_attention(*_operands(rng), **options)


def test_mask_that_differs_between_heads_is_refused(rng):
    mask = _dense_mask(rng, (1, N, T, S))
    with pytest.raises(NotImplementedError, match="differs between heads"):
        dot_product_attention(*_operands(rng), mask=mask)


@pytest.mark.parametrize("name", ["mask", "query_seq_lengths", "key_value_seq_lengths"])
def test_traced_masks_and_lengths_are_refused(name, rng):
    value = np.ones((1, 1, T, S), bool) if name == "mask" else np.array([1, 2], np.int32)
    with pytest.raises(NotImplementedError, match=f"traced {name}: make a mask of its values"):
        jax.jit(lambda x: dot_product_attention(*_operands(rng), **{name: x}))(value)
