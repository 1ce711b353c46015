"""Calls of other attention kernels on the masks that each of them can express.

A peer is a function ``(case) -> Passes``; it raises what the library raises where it refuses a case. Peers
whose package is not installed are left out by `peers.available`.
"""

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WINDOW = 1024
MOST_CUDNN_GIB = 60
MOST_FLEX_PROGRAMS = 64
FRAME = 2048  # tokens of a frame in block-causal documents


class Case(NamedTuple):
    """A mask in words that peers understand.

    Attributes:
        kind: full, causal, window, varlen_full, varlen_causal or varlen_block_causal.
        lengths: tokens of each document, one document where there are none; ``[D]``.
        operands: ``q [T, N, H]``, ``k [T, K, H]``, ``v [T, K, H]``, ``dout [T, N, H]``, bfloat16.
        repeats: how often a program of JAX repeats its pass.
    """

    kind: str
    lengths: np.ndarray
    operands: tuple[jax.Array, ...]
    repeats: int = 1

    @property
    def is_causal(self) -> bool:
        """Whether each query sees its document up to itself."""
        return self.kind in ("causal", "varlen_causal")

    @property
    def edges(self) -> np.ndarray:
        """Where documents begin, and the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


class Passes(NamedTuple):
    """Calls that issue one pass each, and how to wait for what they return.

    Attributes:
        repeats: how often one call issues its pass.
        compile: makes what a pass needs; may run in a thread of its own.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: Callable[[], Any]
    wait: Callable[[Any], Any]
    repeats: int = 1
    compile: Callable[[str], Any] = lambda _: None


def jax_passes(call: Callable, case: Case, *rest: Any) -> Passes:
    """Passes of ``call(q, k, v, *rest)``; the backward pass starts from saved residuals."""
    q, k, v, dout = case.operands
    programs = _programs(call)
    inputs = _copies(q, case.repeats), _copies(dout, case.repeats), k, v, *rest
    kept = []

    def backward():
        start, finish = programs.of("backward", inputs)
        if not kept:
            kept.append(start(q, k, v, *rest)[1])
        return finish(kept[0], inputs[1])

    return Passes(
        lambda: programs.of("forward", inputs)[0](inputs[0], k, v, *rest),
        backward,
        lambda: programs.of("both", inputs)[0](*inputs),
        jax.block_until_ready,
        case.repeats,
        lambda which: programs.of(which, inputs),
    )


def _copies(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    return (x, *(jnp.array(x, copy=True) for _ in range(count - 1)))


class _Programs:
    """Compiled passes of one function, made when they are asked for, once for all operands of one shape.

    Passes are repeated inside a program, each on a copy of q or dout of its own, since XLA makes equal calls
    once: so short calls do not wait for the host, as in a training step they would not.
    """

    def __init__(self, call: Callable):
        def start(q, k, v, *rest):
            return jax.vjp(lambda *x: call(*x, *rest), q, k, v)

        def both(queries, douts, *rest):
            return [start(q, *rest)[1](dout) for q, dout in zip(queries, douts, strict=True)]

        self.forward = jax.jit(lambda queries, *rest: [call(q, *rest) for q in queries])
        self.start = jax.jit(start)
        self.finish = jax.jit(lambda pull, douts: [pull(dout) for dout in douts])
        self.both = jax.jit(both)
        self.made: dict[tuple, tuple] = {}
        self.locks: dict[tuple, Any] = collections.defaultdict(threading.Lock)

    def of(self, which: str, inputs: tuple) -> tuple[Callable, ...]:
        """The program of a pass; two of the backward pass, the first of which gives what the second reads.

        Args:
            inputs: queries and douts, as many of either; then k, v and what else the function takes.
        """
        key = which, *(leaf.shape for leaf in jax.tree.leaves(inputs))
        with self.locks[key]:
            if key not in self.made:
                self.made[key] = self._make(which, *inputs)
        return self.made[key]

    def _make(self, which: str, queries, douts, *rest) -> tuple[Callable, ...]:
        if which == "forward":
            return (self.forward.lower(queries, *rest).compile(),)
        if which == "both":
            return (self.both.lower(queries, douts, *rest).compile(),)
        start = self.start.lower(queries[0], *rest)
        pull = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.out_info[1])
        return start.compile(), self.finish.lower(pull, douts).compile()


@functools.cache
def _programs(call: Callable) -> _Programs:
    """The same for every use of one ``call``."""
    return _Programs(call)


def cudnn(case: Case) -> Passes:
    """cuDNN through `jax.nn`; documents through the packed layout that JAX has beneath it.

    That layout has sums of dQ of all tokens for each document, and cuDNN 9.19 gives a wrong dQ for documents
    whose sums begin at element 2**32 or later: `kernels.compare` then leaves out its gradients.
    """
    options = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
    }
    if case.kind in options:
        call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return jax_passes(functools.partial(call, **options[case.kind]), case)
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
    offsets = jnp.asarray(case.edges, jnp.int32)[None]
    scale = float(case.operands[0].shape[-1]) ** -0.5

    def packed(q, k, v, lengths, offsets):
        return fused.dot_product_attention(
            *(x[None] for x in (q, k, v)),
            None, None, lengths, lengths, offsets, offsets,
            scale=scale, mask_type=kind,
        )[0]  # fmt: skip

    return jax_passes(packed, case, lengths, offsets)


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

    return jax_passes(call, case)


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
    offsets = torch.tensor(case.edges, dtype=torch.int32, device="cuda")
    longest = int(case.lengths.max())
    window = (-1, 0) if case.kind == "varlen_causal" else (-1, -1)

    def call(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window)
        return out.transpose(0, 1)[None]

    return _torch_passes(call, case, tokens_first=True)


def torch_flex(case: Case) -> Passes:
    """FlexAttention, compiled, with a block mask that is made beforehand.

    A mask takes a quarter of a minute to compile, but PyTorch keeps what it compiled on disk: a process for
    each mask, side by side, makes the programs of all in that time; see ``on_gpu.sh``.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Two programs for each mask: past a limit PyTorch would stop compiling and run the dense fallback.
    torch._dynamo.config.recompile_limit = MOST_FLEX_PROGRAMS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._functorch.config.donated_buffer = False  # the backward pass is called again and again
    length, kind, is_causal = case.operands[0].shape[0], case.kind, case.is_causal
    document = torch.tensor(np.repeat(np.arange(len(case.lengths)), case.lengths), device="cuda")
    start = torch.tensor(np.repeat(case.edges[:-1], case.lengths), device="cuda")

    def visible(b, h, q, k):
        same = document[q] == document[k]
        if is_causal:
            return same & (k <= q)
        if kind == "window":
            return (k <= q) & (q - k < WINDOW)
        if kind == "varlen_block_causal":
            return same & ((k - start[k]) // FRAME <= (q - start[q]) // FRAME)
        return same

    mask = None
    if kind != "full":
        mask = create_block_mask(visible, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return _torch_passes(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), case)


def _torch_passes(call: Callable, case: Case, *, tokens_first: bool = False) -> Passes:
    """Passes of ``call(q, k, v)`` on ``[1, N, T, H]`` tensors.

    Args:
        tokens_first: leaves them in memory as the operands are, ``[T, N, H]``; otherwise they are copied to
            the order that their shape says.
    """
    import torch

    tensors = [torch.from_dlpack(x).transpose(0, 1)[None] for x in case.operands]
    if not tokens_first:
        tensors = [tensor.contiguous() for tensor in tensors]
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
