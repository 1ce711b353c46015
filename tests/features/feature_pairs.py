"""Features of attention, and cases in which every pair of their levels meets."""

import functools
import itertools
import random

ONE_DEVICE = {
    "implementation": ("cpu", "reference"),
    "mask": ("documents", "random", "blocks chosen on the device"),
    "lengths": ("self-attention", "cross-attention"),
    "heads": ("MHA", "GQA", "MQA"),
    "head dims": ("equal", "of values smaller"),
    "dtype": ("float32", "bfloat16", "float16"),
    "sinks": ("none", "one", "several"),
    "soft cap": ("none", "given"),
    "scale": ("default", "given"),
    "lse": ("not used", "differentiated"),
    "max logits": ("not asked", "returned"),
    "batch": ("none", "one mask", "one packed stream"),
    "masks of heads": ("one", "one for each group"),
    "deterministic": ("not asked", "asked"),
    "remat": ("none", "context kept"),
}

DISTRIBUTED = {
    "implementation": ("cpu", "reference"),
    "called": ("in a shard_map", "over automatic axes", "over explicit axes"),
    "ranks": ("2", "4"),
    "keys": ("own", "dispatched apart", "replicated"),
    "mask": ("documents", "random"),
    "stages": ("1", "3, and 2 backward"),
    "queries": ("stay", "some travel"),
    "heads": ("MHA", "GQA"),
    "dtype": ("float32", "bfloat16"),
    "sinks": ("none", "one", "several"),
    "soft cap": ("none", "given"),
    "scale": ("default", "given"),
    "lse": ("not used", "differentiated"),
    "max logits": ("not asked", "returned"),
    "batch": ("none", "one plan", "a plan each"),
    "masks of heads": ("one", "one for each group"),
    "remote keys": ("fetched again", "kept"),
    "partial results travel in": ("float32", "bfloat16"),
    "deterministic": ("not asked", "asked"),
    "remat": ("none", "context kept"),
}

# One kv head makes no two groups; nobody travels to keys that are everywhere.
IMPOSSIBLE = {
    frozenset({("heads", "MQA"), ("masks of heads", "one for each group")}),
    frozenset({("queries", "some travel"), ("keys", "replicated")}),
}

Level = tuple[str, str]
CaseLevels = dict[str, str]


def all_pairs(factors: dict[str, tuple[str, ...]], seed: int = 0) -> list[CaseLevels]:
    """Few cases, each a level of every factor, that hold every possible pair of levels of two factors.

    Greedy: each case starts from a pair that is still missing and takes, factor by factor in random
    order, the level that adds most missing pairs; the best of some attempts is kept.
    """
    rng = random.Random(seed)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    } - IMPOSSIBLE
    cases = []
    while missing:
        first = min(missing, key=sorted)
        attempts = [_fill(dict(first), factors, missing, rng) for _ in range(30)]
        best = max(
            (case for case in attempts if case), key=lambda case: len(missing & _pairs(case))
        )
        missing -= _pairs(best)
        cases.append({name: best[name] for name in factors})
    return cases


def _fill(case: CaseLevels, factors, missing, rng) -> CaseLevels | None:
    for name in rng.sample(list(factors), len(factors)):
        if name in case:
            continue
        allowed = [level for level in factors[name] if not _with(case, name, level) & IMPOSSIBLE]
        if not allowed:
            return None
        gains = [len(_with(case, name, level) & missing) for level in allowed]
        best = [x for x, gain in zip(allowed, gains, strict=True) if gain == max(gains)]
        case[name] = rng.choice(best)
    return case


def _with(case: CaseLevels, name: str, level: str) -> set[frozenset[Level]]:
    return {frozenset({(name, level), other}) for other in case.items()}


def _pairs(case: CaseLevels) -> set[frozenset[Level]]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


# Seeds of which the cases are few.
@functools.cache
def one_device_cases() -> list[CaseLevels]:
    """Cases of `flex_flash_attention`."""
    return all_pairs(ONE_DEVICE, seed=1)


@functools.cache
def distributed_cases() -> list[CaseLevels]:
    """Cases of `dist_attention`."""
    return all_pairs(DISTRIBUTED, seed=0)


def on_a_gpu(case: CaseLevels) -> CaseLevels:
    """The same case with what CUDA kernels take."""
    implementation = {"cpu": "sm80", "reference": "sm90"}[case["implementation"]]
    dtype = {"float32": "bfloat16"}.get(case["dtype"], case["dtype"])
    return case | {"implementation": implementation, "dtype": dtype}
