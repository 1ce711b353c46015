"""FlashAttention 3 and 4 as peers, by their public functions and with their own defaults.

`fa3` is the package for PyTorch that `hopper/` of the FlashAttention repository builds. The others are of
PyPI, for JAX: `fa3_jax` is `dew-flash-attn-cu13`, whose varlen backward starts as many blocks as there are
tokens to serve and not as many as the longest document has for every document; `fa4_jax` is `fa4-jax`, which
compiles the CuTe DSL kernels of FlashAttention 4.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from kernel_peers import WINDOW, Case, Passes, jax_passes

EVERY_KEY = (-1, -1)


def fa3(case: Case) -> Passes:
    """FlashAttention 3 through `flash_attn_interface`."""
    import flash_attn_interface as library
    import torch

    _refuse_blocks(case)
    options = {"causal": case.is_causal, "window_size": _window(case)}
    if not case.kind.startswith("varlen"):
        return recorded_passes(functools.partial(library.flash_attn_func, **options), case)
    offsets = torch.tensor(case.edges, dtype=torch.int32, device="cuda")
    longest = int(case.lengths.max())

    def call(q, k, v):
        rows = (x[0] for x in (q, k, v))
        out = library.flash_attn_varlen_func(
            *rows, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, **options
        )
        return out[None]

    return recorded_passes(call, case)


def fa3_jax(case: Case) -> Passes:
    """FlashAttention 3 through `dew_flash_attn`."""
    import dew_flash_attn as library

    _refuse_blocks(case)
    options = {"is_causal": case.is_causal, "window_size": _window(case)}
    if not case.kind.startswith("varlen"):

        def call(q, k, v):
            return library.flash_mha(q[None], k[None], v[None], **options)[0]

        return jax_passes(call, case)
    longest = int(case.lengths.max())

    def packed(q, k, v, offsets):
        return library.flash_mha_varlen(q, k, v, offsets, longest, **options)

    return jax_passes(packed, case, jnp.asarray(case.edges, jnp.int32))


def fa4_jax(case: Case) -> Passes:
    """FlashAttention 4 through `fa4_jax`."""
    import fa4_jax as library

    _refuse_blocks(case)
    if not case.kind.startswith("varlen"):
        window = _window(case) if case.kind == "window" else None

        def call(q, k, v):
            rows = (q[None], k[None], v[None])
            return library.flash_attn(*rows, causal=case.is_causal, window_size=window)[0]

        return jax_passes(call, case)

    def packed(q, k, v, offsets):
        return library.flash_attn_varlen(q, k, v, offsets, offsets, causal=case.is_causal)

    return jax_passes(packed, case, jnp.asarray(case.edges, jnp.int32))


def recorded_passes(call: Callable, case: Case) -> Passes:
    """Passes of ``call(q, k, v)`` of PyTorch on ``[1, T, N, H]`` tensors, as CUDA graphs.

    A graph repeats its pass on copies of q or dout, as programs of JAX do, so that short calls do not wait
    for the host.
    """
    import torch

    q, k, v, dout = (torch.from_dlpack(x)[None] for x in case.operands)
    queries = [x.requires_grad_() for x in (q, *_copies(q, case.repeats))]
    keys = [x.requires_grad_() for x in (k, v)]
    douts = [dout, *_copies(dout, case.repeats)]
    stream = torch.cuda.Stream()
    kept: list = []

    def forward(repeat):
        with torch.no_grad():
            return call(queries[repeat], *keys)

    def backward(repeat):
        return torch.autograd.grad(kept[0], [q, *keys], douts[repeat], retain_graph=True)

    def both(repeat):
        leaves = [queries[repeat], *keys]
        return torch.autograd.grad(call(*leaves), leaves, douts[repeat])

    def record(run: Callable) -> Callable[[], Any]:
        torch.cuda.synchronize()
        # Autograd runs a backward pass on the stream of its forward pass: all of them on the recorded one.
        with torch.cuda.stream(stream):
            if run is backward:
                kept.append(call(q, *keys))
            run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = [run(repeat) for repeat in range(case.repeats)]

        def replay():
            graph.replay()
            return _heads_first(results[0])

        return replay

    recorded = functools.cache(record)
    return Passes(
        *(lambda run=run: recorded(run)() for run in (forward, backward, both)),
        wait=lambda _: torch.cuda.synchronize(),
        repeats=case.repeats,
    )


def _copies(x: Any, count: int) -> list:
    return [x.clone() for _ in range(count - 1)]


def _heads_first(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_heads_first, result))
    return result.transpose(1, 2)


def _window(case: Case) -> tuple[int, int]:
    return (WINDOW - 1, 0) if case.kind == "window" else EVERY_KEY


def _refuse_blocks(case: Case) -> None:
    if case.kind == "varlen_block_causal":
        raise NotImplementedError(f"FlashAttention has no form of {case.kind}")
