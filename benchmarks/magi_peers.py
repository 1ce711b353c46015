"""MagiAttention's kernel for PyTorch as a peer, by its public function.

`ffa` is `flex_flash_attn_func` of the MagiAttention repository (no package of PyPI has it; its kernels are
compiled for each set of options, minutes each). No two slices of these masks share a query, which the call
says: so the kernel writes its output once, in bfloat16. `ffa_catgqa` also joins the query heads of a kv head
in the backward pass, which that library has off by default.
"""

import functools

from flash_peers import recorded_passes
from kernel_peers import FRAME, WINDOW, Case, Passes

FULL, CAUSAL, BICAUSAL = 0, 1, 3  # kinds of a slice, the last with a slope on either side

Slice = tuple[tuple[int, int], tuple[int, int], int]  # queries, keys, kind


def ffa(case: Case, *, cat_gqa: bool = False) -> Passes:
    """MagiAttention's flexible kernel, on the slices of a mask."""
    import torch
    from magi_attention.functional import flex_flash_attn_func

    queries, keys, kinds = (
        torch.tensor(column, dtype=torch.int32, device="cuda")
        for column in zip(*slices(case), strict=True)
    )

    def call(q, k, v):
        out = flex_flash_attn_func(
            q[0], k[0], v[0], queries, keys, attn_type_map=kinds,
            disable_fwd_atomic_reduction=True, cat_gqa=cat_gqa,
        )[0]  # fmt: skip
        return out[None]

    return recorded_passes(call, case)


ffa_catgqa = functools.partial(ffa, cat_gqa=True)


def slices(case: Case) -> list[Slice]:
    """The mask as slices of queries and keys."""
    total = int(case.lengths.sum())
    if case.kind == "window" and total > WINDOW:
        # Past the first window each query sees the keys from one on its own diagonal to one on another.
        return [((0, WINDOW), (0, WINDOW), CAUSAL), ((WINDOW, total), (1, total), BICAUSAL)]
    documents = [(int(a), int(b)) for a, b in zip(case.edges, case.edges[1:], strict=False)]
    if case.kind == "varlen_block_causal":
        return [
            ((start, min(start + FRAME, b)), (a, min(start + FRAME, b)), FULL)
            for a, b in documents
            for start in range(a, b, FRAME)
        ]
    kind = CAUSAL if case.is_causal or case.kind == "window" else FULL
    return [(rows, rows, kind) for rows in documents]
