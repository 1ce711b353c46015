"""Calls of other attention kernels on the masks that each of them can express.

A peer is a function ``(case) -> Passes``; it raises what the library raises where it refuses a case. Peers
whose package is not installed are left out by `available`.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WINDOW = 1024
MOST_CUDNN_GIB = 60
FRAME = 2048  # tokens of a frame in block-causal documents


class Case(NamedTuple):
    """A mask in words that peers understand.

    Attributes:
        kind: full, causal, window, varlen_full, varlen_causal or varlen_block_causal.
        lengths: tokens of each document, one document where there are none; ``[D]``.
        operands: ``q [T, N, H]``, ``k [T, K, H]``, ``v [T, K, H]``, ``dout [T, N, H]``, bfloat16.
    """

    kind: str
    lengths: np.ndarray
    operands: tuple[jax.Array, ...]


class Passes(NamedTuple):
    """Calls that issue one pass each, and how to wait for what they return."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: Callable[[], Any]
    wait: Callable[[Any], Any]


def jax_passes(call: Callable, operands: tuple[jax.Array, ...], *rest: Any) -> Passes:
    """Passes of ``call(q, k, v, *rest)``; the backward pass starts from saved residuals."""
    q, k, v, dout = operands
    forward, start, finish = _programs(call)
    _, pull = start(q, k, v, *rest)
    return Passes(
        lambda: forward(q, k, v, *rest),
        lambda: finish(pull, dout),
        lambda: finish(start(q, k, v, *rest)[1], dout),
        jax.block_until_ready,
    )


@functools.cache
def _programs(call: Callable) -> tuple[Callable, Callable, Callable]:
    """Forward, forward with residuals, and backward from them: the same for every use of one ``call``."""
    return (
        jax.jit(call),
        jax.jit(lambda q, k, v, *rest: jax.vjp(lambda *x: call(*x, *rest), q, k, v)),
        jax.jit(lambda pull, dout: pull(dout)),
    )


def cudnn(case: Case) -> Passes:
    """cuDNN through `jax.nn`; documents through the packed layout that JAX has beneath it."""
    options = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
    }
    if case.kind in options:
        call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return jax_passes(functools.partial(call, **options[case.kind]), case.operands)
    if case.kind not in ("varlen_full", "varlen_causal"):
        raise NotImplementedError(f"cuDNN has no form of {case.kind}")
    from jax._src.cudnn import fused_attention_stablehlo as fused

    q = case.operands[0]
    gib = cudnn_gib(len(case.lengths), *q.shape[:2])
    if gib > MOST_CUDNN_GIB:
        raise NotImplementedError(
            f"packed layout of {len(case.lengths)} documents takes {gib:.0f} GiB"
        )
    kind = fused.MaskType.PADDING if case.kind == "varlen_full" else fused.MaskType.PADDING_CAUSAL
    lengths = jnp.asarray(case.lengths, jnp.int32)[None]
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]), jnp.int32)[None]
    scale = float(case.operands[0].shape[-1]) ** -0.5

    def packed(q, k, v, lengths, offsets):
        return fused.dot_product_attention(
            *(x[None] for x in (q, k, v)),
            None, None, lengths, lengths, offsets, offsets,
            scale=scale, mask_type=kind,
        )[0]  # fmt: skip

    return jax_passes(packed, case.operands, lengths, offsets)


def cudnn_gib(documents: int, tokens: int, heads: int) -> float:
    """What the packed layout allocates at head dim 128, as read from its refusal on an H200."""
    return documents * tokens * heads * 1028 / 2**30


def tokamax(case: Case) -> Passes:
    """The fastest kernel that tokamax chooses."""
    import tokamax as library

    options = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
    }
    if case.kind not in options:
        raise NotImplementedError(f"tokamax has no form of {case.kind}")

    def call(q, k, v):
        options_ = options[case.kind]
        return library.dot_product_attention(q[None], k[None], v[None], **options_)[0]

    return jax_passes(call, case.operands)


def torch_sdpa(case: Case) -> Passes:
    """`scaled_dot_product_attention` of PyTorch on its cuDNN backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.kind not in ("full", "causal"):
        raise NotImplementedError(f"scaled_dot_product_attention has no form of {case.kind}")

    def call(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.kind == "causal", enable_gqa=True
            )

    return _torch_passes(call, case)


def torch_varlen(case: Case) -> Passes:
    """FlashAttention 2 as PyTorch ships it, over packed documents."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    if case.kind not in ("varlen_full", "varlen_causal"):
        raise NotImplementedError(f"varlen_attn has no form of {case.kind}")
    edges = np.concatenate([[0], np.cumsum(case.lengths)])
    offsets = torch.tensor(edges, dtype=torch.int32, device="cuda")
    longest = int(case.lengths.max())
    window = (-1, 0) if case.kind == "varlen_causal" else (-1, -1)
    group = case.operands[0].shape[1] // case.operands[1].shape[1]

    def call(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window)
        return out.transpose(0, 1)[None]

    return _torch_passes(call, case)


def torch_flex(case: Case) -> Passes:
    """FlexAttention, compiled, with a block mask that is made beforehand."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # One program for each mask: past eight of them PyTorch stops compiling and runs the dense fallback.
    torch._dynamo.reset()
    length = case.operands[0].shape[0]
    document = torch.tensor(np.repeat(np.arange(len(case.lengths)), case.lengths), device="cuda")
    edges = np.concatenate([[0], np.cumsum(case.lengths)[:-1]])
    start = torch.tensor(np.repeat(edges, case.lengths), device="cuda")

    def visible(b, h, q, k):
        same = document[q] == document[k]
        if case.kind in ("causal", "varlen_causal"):
            return same & (k <= q)
        if case.kind == "window":
            return (k <= q) & (q - k < WINDOW)
        if case.kind == "varlen_block_causal":
            return same & ((k - start[k]) // FRAME <= (q - start[q]) // FRAME)
        return same

    mask = None
    if case.kind != "full":
        mask = create_block_mask(visible, None, None, length, length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)
    return _torch_passes(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), case)


def available(names: list[str]) -> dict[str, Callable[[Case], Passes]]:
    """The peers of these names whose packages are installed."""
    every = {
        "cudnn": (cudnn, "jax"),
        "tokamax": (tokamax, "tokamax"),
        "torch_sdpa": (torch_sdpa, "torch"),
        "torch_varlen": (torch_varlen, "torch"),
        "torch_flex": (torch_flex, "torch"),
    }
    if unknown := set(names) - set(every):
        raise ValueError(f"peers must be among {sorted(every)}, got {sorted(unknown)}")
    return {name: every[name][0] for name in names if importlib.util.find_spec(every[name][1])}


def _torch_passes(call: Callable, case: Case) -> Passes:
    """Passes of ``call(q, k, v)`` on ``[1, N, T, H]`` tensors that share memory with the operands."""
    import torch

    tensors = [torch.from_dlpack(x).transpose(0, 1)[None].contiguous() for x in case.operands]
    leaves, dout = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    kept = call(*leaves)

    def forward():
        with torch.no_grad():
            return call(*leaves)

    def backward():
        return torch.autograd.grad(kept, leaves, dout, retain_graph=True)

    def both():
        return torch.autograd.grad(call(*leaves), leaves, dout)

    return Passes(forward, backward, both, lambda _: torch.cuda.synchronize())
