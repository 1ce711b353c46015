"""Peers are called as their packages say, and one whose results are not ours is not timed."""

import sys
import types

import flash_peers
import jax
import jax.numpy as jnp
import kernels
import magi_peers
import numpy as np
import peers
import pytest
from agreement import as_rows, refuse_difference
from kernel_peers import Case, jax_passes

from magi_jax import masks
from magi_jax.plan import slice_table

LENGTHS = np.array([40, 24])
LENGTH = 64


def attend(q, k, v, visible):
    """Attention of ``[T, N, H]`` arrays in plain jnp."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf))
    return jnp.einsum("nts,snh->tnh", weights, v.astype(jnp.float32)).astype(q.dtype)


def visible(offsets, causal, left=-1):
    """Where row t sees column s, in documents that begin at offsets."""
    at = jnp.arange(LENGTH)
    document = jnp.searchsorted(offsets, at, side="right")
    seen = document[:, None] == document
    seen &= (at[:, None] >= at) | (not causal and left < 0)
    return seen & ((at[:, None] - at <= left) | (left < 0))


def flash_mha(q, k, v, is_causal=False, window_size=(-1, -1)):
    seen = visible(jnp.array([0, LENGTH]), is_causal, window_size[0])
    return attend(q[0], k[0], v[0], seen)[None]


def flash_mha_varlen(q, k, v, cu_seqlens, max_seqlen, is_causal=False, window_size=(-1, -1)):
    assert max_seqlen == LENGTHS.max()
    return attend(q, k, v, visible(cu_seqlens, is_causal))


def flash_attn(q, k, v, *, causal=False, window_size=None):
    return flash_mha(q, k, v, causal, window_size or (-1, -1))


def flash_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, causal=False):
    return flash_mha_varlen(q, k, v, cu_seqlens_q, int(LENGTHS.max()), causal)


@pytest.fixture(params=["fa3_jax", "fa4_jax"])
def peer(request, monkeypatch):
    """A peer whose package answers its public calls in plain jnp."""
    found = types.SimpleNamespace(
        **{
            each.__name__: each
            for each in (flash_mha, flash_mha_varlen, flash_attn, flash_attn_varlen)
        }
    )
    name = {"fa3_jax": "dew_flash_attn", "fa4_jax": "fa4_jax"}[request.param]
    monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(flash_peers, "WINDOW", 8)
    return getattr(flash_peers, request.param)


MASKS = {
    "causal": masks.causal(LENGTH),
    "window": masks.local(LENGTH, window=(7, 0)),
    "varlen_full": masks.varlen(LENGTHS),
}


@pytest.fixture
def operands(monkeypatch):
    monkeypatch.setattr(kernels, "NUM_HEADS", 4)
    monkeypatch.setattr(kernels, "NUM_KV_HEADS", 2)
    return kernels.make_operands(LENGTH, 32)


@pytest.mark.parametrize("kind", MASKS)
def test_peers_and_ours_agree(kind, peer, operands):
    lengths = LENGTHS if kind.startswith("varlen") else np.array([LENGTH])
    case = Case(kind, lengths, operands)
    ours = jax_passes(kernels.ours(None), case, jax.device_put(slice_table(MASKS[kind])))
    for which in ("forward", "backward"):
        found, expected = (
            as_rows(getattr(passes, which)(), operands[0].shape) for passes in (peer(case), ours)
        )
        assert len(found) == {"forward": 1, "backward": 3}[which]
        refuse_difference(which, found, expected)


def test_masks_without_a_form_are_refused(peer, operands):
    with pytest.raises(NotImplementedError, match="no form of varlen_block_causal"):
        peer(Case("varlen_block_causal", LENGTHS, operands))


@pytest.mark.parametrize("kind", [
    "full", "causal", "window", "varlen_full", "varlen_causal", "varlen_block_causal",
])  # fmt: skip
def test_slices_for_magi_attention_are_the_mask(kind, monkeypatch):
    for module in (kernels, magi_peers):
        monkeypatch.setattr(module, "WINDOW", 16)
        monkeypatch.setattr(module, "FRAME", 8)
    monkeypatch.setitem(kernels.DOCUMENTS["varlen"], str(LENGTH), [10, 27, 3, 24])
    _, lengths, mask = kernels.cases(LENGTH)[kind]
    times_seen = np.zeros((LENGTH, LENGTH), int)
    for (first, last), (start, end), slope in magi_peers.slices(Case(kind, lengths, ())):
        row, column = np.mgrid[: last - first, : end - start]
        seen = np.ones(row.shape, bool)
        if slope in (magi_peers.CAUSAL, magi_peers.BICAUSAL):
            seen &= column - row <= (end - start) - (last - first)
        if slope == magi_peers.BICAUSAL:
            seen &= column >= row
        times_seen[first:last, start:end] += seen
    np.testing.assert_array_equal(times_seen, mask.dense())


def test_what_differs_is_refused():
    rows = [jnp.ones((4, 2, 8)), jnp.ones((4, 1, 8))]
    refuse_difference("backward", rows, [1.01 * x for x in rows])
    with pytest.raises(ValueError, match=r"backward: differs from ours by 0\.1"):
        refuse_difference("backward", rows, [rows[0], rows[1] / 1.1])
    with pytest.raises(ValueError, match="forward: differs from ours by nan"):
        refuse_difference("forward", [rows[0].at[3, 1, 5].set(jnp.nan)], rows[:1])


def test_unknown_peers_are_refused_and_missing_ones_left_out(monkeypatch):
    with pytest.raises(ValueError, match=r"got \['fa5'\]"):
        peers.available(["cudnn", "fa5"])
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == "jax" or None)
    assert list(peers.available(["fa3", "cudnn"])) == ["cudnn"]
