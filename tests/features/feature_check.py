"""What a case of features computes, in float64, and comparison with it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.ops import Implementation, cuda, get_implementation
from magi_jax.testing import oracle

# Largest error relative to the largest value: float32 sums; narrow operands are exact, out and gradients
# are rounded once and delta is made of a rounded out.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
NARROW_WIRE = 3e-2
# Each case is a program that runs once: little is spent on its own code, and nothing on ours.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SCALE, CAP = 0.2, 3.0
SINKS = {"none": None, "one": (), "several": (3,)}
KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
NUM_HEADS = 4


class Inputs(NamedTuple):
    """``[*B, rows, heads, dim]``, values that the dtype holds; the last two weigh the results."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None
    dout: np.ndarray
    dlse: np.ndarray


class Answer(NamedTuple):
    """Results and gradients; None where a case has none."""

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray | None
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


def random_inputs(rng, case, lead, q_len, k_len, dims) -> Inputs:
    """Inputs of a case; sinks and dlse are float32, dlse zero where lse is not used."""
    dtype, kv_heads = case["dtype"], KV_HEADS[case["heads"]]

    def normal(*shape, dtype=dtype):
        return np.asarray(jnp.asarray(rng.standard_normal((*lead, *shape)), dtype))

    shape = SINKS[case["sinks"]]
    sinks = None
    if shape is not None:
        sinks = rng.standard_normal((*shape, NUM_HEADS)).astype(np.float32)
    dlse = normal(q_len, NUM_HEADS, dtype="float32")
    return Inputs(
        normal(q_len, NUM_HEADS, dims[0]),
        normal(k_len, kv_heads, dims[0]),
        normal(k_len, kv_heads, dims[1]),
        sinks,
        normal(q_len, NUM_HEADS, dims[1]),
        dlse * (case["lse"] == "differentiated"),
    )


def options_of(case) -> dict:
    """Scale and cap of a case."""
    return {
        "scale": SCALE if case["scale"] == "given" else None,
        "logits_soft_cap": CAP if case["soft cap"] == "given" else None,
    }


def implementation_of(case) -> Implementation:
    """The kernels of a case. Those of Hopper have others behind them for what they do not support."""
    if case["implementation"] != "sm90":
        return get_implementation(case["implementation"])
    backward = "sm90_ordered" if case["deterministic"] == "asked" else "sm90"
    return cuda.CudaImplementation("sm90 first", ("sm90", "sm80"), (backward, "sm80"))


def remat(case, attend):
    """``attend``, computed again in the backward pass but for what the case's policy keeps."""
    if case["remat"] == "none":
        return attend
    policy = jax.checkpoint_policies.save_only_these_names("context")
    return jax.checkpoint(attend, policy=policy)


def loss(case, results, dout, dlse):
    """The weighted sum of out and lse, where lse is finite and used."""
    out, lse = results[0], results[1]
    total = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum()
    if case["lse"] == "differentiated":
        total += (jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse).sum()
    return total


def expected(case, inputs: Inputs, dense_masks) -> Answer:
    """Everything in float64, heads and sequences one by one.

    Args:
        case: the levels.
        inputs: ``[B, rows, heads, dim]``.
        dense_masks: for each sequence, for each group of heads, bool ``[T, S]``.
    """
    sequences = []
    for b, groups in enumerate(dense_masks):
        one = [x if x is None or i == 3 else x[b] for i, x in enumerate(inputs)]
        parts = [_expected_group(case, one, len(groups), g, mask) for g, mask in enumerate(groups)]
        sequences.append(_join(parts, lambda i: -1 if i in (1, 2, 6) else -2))
    return _stack(sequences)


def _expected_group(case, one, groups, g, mask) -> Answer:
    axes = (-2, -2, -2, -1, -2, -1)
    q, k, v, sinks, dout, dlse = (
        None if x is None else np.split(np.asarray(x, np.float64), groups, axis=axis)[g]
        for x, axis in zip(one, axes, strict=True)
    )
    options = options_of(case) | {"sinks": sinks}
    out, lse = oracle.attention(q, k, v, mask, **options)
    dlse = np.where(np.isfinite(lse), dlse, 0.0)
    gradients = oracle.attention_grads(q, k, v, mask, dout, dlse, **options)
    logits = np.einsum("tnh,snh->nts", q, k.repeat(q.shape[1] // k.shape[1], 1))
    logits *= q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    if options["logits_soft_cap"]:
        logits = CAP * np.tanh(logits / CAP)
    largest = np.where(mask, logits, -np.inf).max((1, 2), initial=-np.inf)
    return Answer(out, lse, largest, *gradients)


def _join(parts, axis_of) -> Answer:
    fields = zip(*parts, strict=True)
    return Answer(
        *(
            None if x[0] is None else np.concatenate(x, axis=axis_of(i))
            for i, x in enumerate(fields)
        )
    )


def _stack(sequences) -> Answer:
    out, lse, top, dq, dk, dv, dsinks = zip(*sequences, strict=True)
    sinks = None if dsinks[0] is None else np.sum(dsinks, axis=0)
    return Answer(
        *map(np.stack, (out, lse)), np.max(top, axis=0), *map(np.stack, (dq, dk, dv)), sinks
    )


def check(case, got: Answer, want: Answer) -> None:
    """Compares every array; gradients of keys also bear the rounding of what travels."""
    tolerance = TOLERANCE[case["dtype"]]
    exact = 1e-5 if case["dtype"] == "float32" else 1e-3
    narrow = case.get("partial results travel in") == "bfloat16"
    limits = {
        "lse": exact,
        "max_logits": exact,
        "dsinks": max(10 * tolerance, NARROW_WIRE * narrow),
        # Of travelling queries out and dq travel as well.
        "out": max(tolerance, NARROW_WIRE * narrow),
        "dq": max(tolerance, NARROW_WIRE * narrow),
        "dk": max(tolerance, NARROW_WIRE * narrow),
        "dv": max(tolerance, NARROW_WIRE * narrow),
    }
    if case["max logits"] == "not asked":
        want = want._replace(max_logits=None)
    for name in Answer._fields:
        actual, right = getattr(got, name), getattr(want, name)
        assert (actual is None) == (right is None), name
        if right is None:
            continue
        actual = np.asarray(actual, np.float64)
        assert actual.shape == right.shape, (name, actual.shape, right.shape)
        infinite = np.isinf(right)
        np.testing.assert_array_equal(np.isinf(actual), infinite, err_msg=name)
        right = np.where(infinite, 0.0, right)
        error = np.abs(np.where(infinite, 0.0, actual) - right).max(initial=0)
        limit = limits.get(name, tolerance) * max(np.abs(right).max(initial=0), 1.0)
        assert error <= limit, f"{name}: error {error} > {limit} in {case}"
