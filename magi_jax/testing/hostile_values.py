"""Operands made to be hard, and how far an answer may be from the float64 oracle."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.testing import oracle

KINDS = (
    "normal",
    "large_logits",
    "constant",
    "spread",
    "denormal",
    "hidden_poison",
    "document_poison",
)

# One rounding of out and gradients; operands are exact in their type.
ROUNDING = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}
FLOAT32_EPSILON = 2.0**-23
# Results this small are spaced so widely, or may count as zero.
DENORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}


class Operands(NamedTuple):
    """``q [T, N, H]``, ``k [S, K, H]``, ``v [S, K, Hv]``, ``dout [T, N, Hv]``, ``dlse [T, N]``; float32
    arrays whose values the wanted dtype holds exactly.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


class HostileValues(NamedTuple):
    """Operands, the same without poison, and which queries and keys are poisoned."""

    kind: str
    operands: Operands
    clean: Operands
    bad_queries: np.ndarray  # [T]
    bad_keys: np.ndarray  # [S]


class Answer(NamedTuple):
    """Results and gradients; ``dsinks`` is None without sinks."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


def hostile_values(
    rng: np.random.Generator,
    dense: np.ndarray,
    heads: tuple[int, int, int, int],
    dtype: type,
    kind: str | None = None,
) -> HostileValues:
    """Draws operands for a mask.

    Args:
        rng: the draw is a function of its state.
        dense: cells of the mask ``[T, S]``; they say what is hidden.
        heads: ``(N, K, H, Hv)``.
        dtype: NumPy dtype that the values are rounded to.
        kind: one of `KINDS`; None draws one.
    """
    kind = str(rng.choice(KINDS)) if kind is None else kind
    (q_len, k_len), (num_heads, kv_heads, dim, v_dim) = dense.shape, heads
    q, k = rng.normal(size=(q_len, num_heads, dim)), rng.normal(size=(k_len, kv_heads, dim))
    v, dout = rng.normal(size=(k_len, kv_heads, v_dim)), rng.normal(size=(q_len, num_heads, v_dim))
    if kind == "large_logits":
        # Products of about sqrt(H) * 1e4, which the scale H ** -0.5 makes 1e4.
        q, k = q * 100, k * 100
    elif kind == "constant":
        q, k, v = q * 0 + 0.5, k * 0 - 2.0, v * 0 + 1.0
    elif kind == "spread":
        q, k, v, dout = (x * 10.0 ** rng.integers(-9, 2, (len(x), 1, 1)) for x in (q, k, v, dout))
    elif kind == "denormal":
        # Below the normal numbers of float16, and for some rows of float32 too.
        v, dout, k = v * 1e-6, dout * 1e-6, k * 1e-39
    dlse = rng.normal(size=(q_len, num_heads)).astype(np.float32)
    q, k, v, dout = (_rounded(x, dtype) for x in (q, k, v, dout))
    clean = Operands(q, k, v, dout, dlse)
    bad_queries: np.ndarray = np.zeros(q_len, bool)
    bad_keys: np.ndarray = np.zeros(k_len, bool)
    if kind == "hidden_poison":
        bad_queries[:], bad_keys[:] = ~dense.any(1), ~dense.any(0)
    elif kind == "document_poison":
        start, end = sorted(rng.integers(0, max(q_len, k_len) + 1, 2).tolist())
        bad_queries[start:end] = rng.random() < 0.7
        bad_keys[start:end] = rng.random() < 0.7
    return HostileValues(
        kind, _poisoned(rng, clean, bad_queries, bad_keys), clean, bad_queries, bad_keys
    )


def _rounded(x: np.ndarray, dtype: type) -> np.ndarray:
    with np.errstate(under="ignore"):
        return x.astype(dtype).astype(np.float32)


def _poisoned(rng, clean: Operands, bad_queries: np.ndarray, bad_keys: np.ndarray) -> Operands:
    """Fills whole rows with NaN, infinities, or both."""
    rows = {"q": bad_queries, "k": bad_keys, "v": bad_keys, "dout": bad_queries}
    filled = {}
    for name, bad in rows.items():
        x = getattr(clean, name).copy()
        x[bad] = rng.choice([np.nan, np.inf, -np.inf], (bad.sum(), 1, 1))
        filled[name] = x
    return clean._replace(**filled)


def reach_of_poison(values: HostileValues, dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries ``[T]`` and keys ``[S]`` whose results or gradients may depend on poisoned values.

    A query depends on its own row and on the keys that it sees, a key on the queries that see it,
    and a row that sees nothing and a key that nobody sees on nothing at all.
    """
    queries = dense.any(1) & (values.bad_queries | (dense & values.bad_keys).any(1))
    keys = dense.any(0) & (values.bad_keys | (dense & queries[:, None]).any(0))
    return queries, keys


def check_answer(
    answer: Answer,
    values: HostileValues,
    dense: np.ndarray,
    dtype: str,
    *,
    logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """Compares an answer with the oracle wherever no poison may reach.

    Args:
        answer: to be judged, any float dtype; NumPy arrays.
        values: what it was computed from.
        dense: cells of the mask.
        dtype: name of the dtype of the operands.
        logits_soft_cap: as it was computed with.
        sinks: as it was computed with.

    Raises:
        AssertionError: something is further away than float32 arithmetic explains; it says what.
    """
    options: dict[str, Any] = {"logits_soft_cap": logits_soft_cap, "sinks": sinks}
    q, k, v, dout, dlse = values.clean
    out, lse = oracle.attention(q, k, v, dense, **options)
    grads = oracle.attention_grads(
        q, k, v, dense, dout, np.where(np.isfinite(lse), dlse, 0), **options
    )
    queries, keys = reach_of_poison(values, dense)
    wanted = Answer(out, lse, *grads)
    if (values.bad_queries.any() or values.bad_keys.any()) and sinks is not None:
        wanted = wanted._replace(dsinks=None)  # a sum over all rows
    kept = Answer(~queries, ~queries, ~queries, ~keys, ~keys, np.array(True))
    sizes = _sizes(values.clean, wanted, dense)
    logit_error = FLOAT32_EPSILON * sizes.pop("logits")
    for name, limit in sizes.items():
        want, got, rows = getattr(wanted, name), getattr(answer, name), getattr(kept, name)
        if want is None:
            continue
        # A logit is known to its own rounding, and a weight as well as its logit.
        relative = FLOAT32_EPSILON * 8 if name == "lse" else ROUNDING[dtype]
        tolerance = (relative + 4 * logit_error) * limit + DENORMAL[dtype]
        _require_close(name, np.asarray(got, np.float64)[rows], want[rows], tolerance)


def _sizes(operands: Operands, wanted: Answer, dense: np.ndarray) -> dict[str, float]:
    """Largest terms that each result is a sum of: what its rounding is relative to."""

    def top(x: np.ndarray) -> float:
        return float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0))

    q, k, v, dout, dlse = operands
    scale = q.shape[-1] ** -0.5
    norm = {
        n: float(np.linalg.norm(x, axis=-1).max(initial=0))
        for n, x in operands._asdict().items()
        if x.ndim == 3
    }
    logits = scale * norm["q"] * norm["k"]
    gradient = norm["dout"] * norm["v"] * 2 + top(dlse)
    seen = np.sqrt(max(dense.sum(0).max(initial=0), 1.0) * q.shape[1] / k.shape[1])
    return {
        "logits": logits,
        "out": top(v),
        "lse": max(top(wanted.lse), 1.0),
        "dq": max(scale * gradient * top(k), top(wanted.dq)),
        "dk": max(scale * gradient * top(q) * seen, top(wanted.dk)),
        "dv": max(top(dout) * seen, top(wanted.dv)),
        "dsinks": gradient * np.sqrt(len(q)) * 4,
    }


def _require_close(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    infinite = np.isinf(want)
    if not np.array_equal(np.isinf(got), infinite) or np.isnan(got).any():
        where = np.argwhere((np.isinf(got) != infinite) | np.isnan(got))[0].tolist()
        raise AssertionError(f"{name}{where} is {got[tuple(where)]}, not {want[tuple(where)]}")
    error = np.abs(np.where(infinite, 0, got) - np.where(infinite, 0, want))
    if error.max(initial=0) > tolerance:
        at = np.unravel_index(error.argmax(), error.shape)
        place = [int(i) for i in at]
        raise AssertionError(
            f"{name}{place} is {got[at]}, not {want[at]}: error {error[at]:.3g} > {tolerance:.3g}"
        )
