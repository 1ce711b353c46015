"""Small attention problems for `device_driver.cc`: their files, and what should come out."""

import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from magi_jax import masks
from magi_jax.masks import AttnMask
from magi_jax.plan import slice_table
from magi_jax.testing import oracle

TILE_SIZE = 128
DTYPES = {"float16": (1, np.float16), "bfloat16": (2, ml_dtypes.bfloat16)}  # params.h: DType
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}  # relative, in the 2-norm
POISON = slice(40, 90)  # rows of q, k, v and dout that hold what is not finite


@dataclass(frozen=True)
class Case:
    """One problem; ``heads`` is ``(N, K, H, Hv)``."""

    mask: AttnMask
    heads: tuple[int, int, int, int] = (4, 2, 128, 128)
    dtype: str = "bfloat16"
    cap: float = 0.0
    float32_results: bool = True
    accumulate: bool = False  # added to other results
    row_max: bool = True
    backward: bool = True
    short_dq: bool = False  # dq in the dtype of q, which sm80 does not give
    poison: bool = False


def cases() -> dict[str, Case]:
    """By name; few, since racecheck takes a hundred times as long as the kernels."""
    rng = np.random.default_rng(0)
    documents = [40, 50, 1, 130, 79]
    blocks = masks.uniform_block_causal(np.array([200, 131]), 64)
    return {
        "causal": Case(masks.causal(300), float32_results=False),
        "blocks_merged": Case(blocks, (4, 1, 128, 128), "float16", accumulate=True),
        "late_in_place": Case(
            masks.causal(70, 90).shift(200, 100, 520, 300),
            (4, 2, 64, 64),
            float32_results=False,
            accumulate=True,
            row_max=False,
        ),
        "window_merged": Case(masks.local(200, window=(60, 0)), (4, 1, 128, 128), accumulate=True),
        "poisoned_documents": Case(masks.varlen(documents, causal=True), poison=True),
        "capped_window": Case(masks.local(257, window=(70, 9)), (2, 2, 64, 64), cap=3.0),
        "short_documents": Case(
            masks.varlen(rng.integers(1, 9, 60), causal=True), (8, 1, 96, 96), "float16"
        ),
        "values_of_128": Case(masks.causal(140, 300), (2, 1, 192, 128)),
        "wide_documents": Case(masks.varlen(documents, causal=True), (2, 1, 256, 256), poison=True),
        # Just enough of them, and of heads, for Hopper's kernel of short documents.
        "many_documents": Case(
            masks.varlen([28, 300, 28, *[29, 28, 27, 28] * 3, 29, 28, 28], causal=True),
            (64, 8, 128, 128),
            float32_results=False,
            row_max=False,
            short_dq=True,
        ),
        # Few queries of many keys, whose walks Hopper's forward cuts.
        "cut_walks": Case(
            masks.causal(30, 4200, offset=4170), (8, 1, 128, 128), row_max=False, backward=False
        ),
        "nothing": Case(masks.varlen([5], k_lengths=[0]).shift(0, 0, 5, 200)),
    }


class Operands:
    """Random q, k, v and dout of a case, and lse and delta of the exact result."""

    def __init__(self, case: Case, seed: int = 0):
        rng = np.random.default_rng(seed)
        N, K, H, Hv = case.heads
        T, S = case.mask.q_len, case.mask.k_len
        dtype = DTYPES[case.dtype][1]
        shapes = ((T, N, H), (S, K, H), (S, K, Hv), (T, N, Hv))
        self.given = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        self.seen = np.ones(T, bool)
        self.key_seen = np.ones(S, bool)
        dense = case.mask.dense()
        q, k, v, dout = (x.astype(np.float64) for x in self.given)
        options = {"logits_soft_cap": case.cap}
        out, lse = oracle.attention(q, k, v, dense, **options)
        self.results = {"out": out, "lse": lse, "row_max": _largest(q, k, dense, case.cap)}
        self.results |= oracle.attention_grads(q, k, v, dense, dout, **options)._asdict()
        self.delta = (dout * out).sum(-1).astype(np.float32)
        self.lse = lse.astype(np.float32)
        if case.poison:  # documents of their own: nothing else sees these rows
            for x in self.given:
                x[POISON] = np.array(np.nan, dtype)
                x[POISON.start + 3] = np.array(np.inf, dtype)
            self.lse[POISON] = self.delta[POISON] = np.nan
            self.seen[POISON] = self.key_seen[POISON] = False


def _largest(q, k, dense, cap: float) -> np.ndarray:
    """``[T, N]``: the largest logit that a row sees."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = np.einsum("tnh,snh->tns", q, k) * q.shape[-1] ** -0.5
    logits = cap * np.tanh(logits / cap) if cap else logits
    return np.where(dense[:, None], logits, -np.inf).max(-1, initial=-np.inf)


def write(case: Case, operands: Operands, path: Path) -> None:
    """The file that the program reads: its `Header`, then all arrays."""
    table = slice_table(case.mask, tile_size=TILE_SIZE)
    by_query, by_key = table.by_query, table.by_key
    N, K, H, Hv = case.heads
    code = DTYPES[case.dtype][0]
    header = struct.pack(
        "<7i2f2i11i",
        case.mask.q_len, case.mask.k_len, N, K, H, Hv, TILE_SIZE,
        H**-0.5, case.cap,
        code, len(table.slices),
        0 if case.float32_results else code, case.accumulate, case.row_max, case.backward,
        case.short_dq,
        len(by_query.runs), len(by_key.runs), len(by_query.ids), len(by_key.ids),
        len(by_query.order), len(by_key.order),
    )  # fmt: skip
    arrays = [*operands.given, operands.lse, operands.delta, table.slices]
    for walk in (by_query, by_key):
        arrays += [walk.ptr, walk.runs, walk.ids, walk.order]
    path.write_bytes(header + b"".join(np.ascontiguousarray(x).tobytes() for x in arrays))


def result_dtypes(case: Case) -> dict[str, type]:
    """Names and dtypes of the results, in the order of their file."""
    partial = np.float32 if case.float32_results else DTYPES[case.dtype][1]
    dtypes = {"out": partial, "lse": np.float32}
    if case.row_max:
        dtypes |= {"row_max": np.float32}
    dq = DTYPES[case.dtype][1] if case.short_dq else np.float32
    return dtypes | ({"dq": dq, "dk": partial, "dv": partial} if case.backward else {})


def check(case: Case, operands: Operands, path: Path) -> str:
    """What is wrong with the results that the program wrote; empty when nothing is."""
    data = path.read_bytes()
    offset, problems = 0, []
    for name, dtype in result_dtypes(case).items():
        want = operands.results[name]
        got = np.frombuffer(data, dtype, want.size, offset).reshape(want.shape).astype(np.float64)
        offset += want.size * np.dtype(dtype).itemsize
        rows = operands.key_seen if name in ("dk", "dv") else operands.seen
        got, want = got[rows], want[rows]
        finite = np.isfinite(want)
        if not np.array_equal(got[~finite], want[~finite]):
            problems.append(f"{name}: rows without keys differ")
        error = np.linalg.norm(got[finite] - want[finite])
        if not error <= TOLERANCE[case.dtype] * max(np.linalg.norm(want[finite]), 1.0):
            problems.append(f"{name}: error {error:.2e} of {np.linalg.norm(want[finite]):.2e}")
    if offset != len(data):
        problems.append(f"{len(data)} bytes of results, {offset} expected")
    return "; ".join(problems)
