"""Times the kernels on a GPU beside cuDNN, FlashAttention, tokamax, PyTorch's and a matrix product.

    python benchmarks/kernels.py [--quick] [--lengths 8192 32768] [--head-dims 128 64] [--json FILE]

64 query heads, 8 kv heads, bfloat16; masks and documents of `kernel_documents.json`. Three passes: forward;
the gradients alone from saved residuals; both. TFLOP/s are those of the area of the mask: 4 * area * N * H,
2.5 times that backward. Ours and the peers take turns, each with calls back to back for a while, so that the
card is at the pace at which it can run them for good; programs of JAX, ours and peers alike, repeat short
passes. Compare only figures of one run, best as the ratio to the best peer. `--quick` takes 8192 and 32768
tokens at head dim 128 beside cuDNN alone. `pip install dew-flash-attn-cu13 "fa4-jax[cu13]"` brings the peers
fa3_jax and fa4_jax; see ``flash_peers.py``.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from agreement import as_rows, refuse_difference
from kernel_peers import FRAME, WINDOW, Case, Passes, jax_passes
from peers import available
from provenance import save
from timing import matmul_tflops, mean_seconds

import magi_jax
from magi_jax import masks
from magi_jax.plan import slice_table
from magi_jax.plan.tables import SliceTable

NUM_HEADS, NUM_KV_HEADS = 64, 8
DOCUMENTS = json.loads(pathlib.Path(__file__).with_name("kernel_documents.json").read_text())
FLOPS = {"forward": 4, "backward": 10, "both": 14}  # per visible pair, head and head dim
PEERS = ("cudnn", "tokamax", "torch_sdpa", "torch_varlen")  # torch_flex compiles for minutes
MOST_REPEATS = 16  # of a pass in one program
TURNS = 3  # in which implementations are timed one after the other
# Calls of a turn at least, where one takes less: the host takes up to 0.4 ms to begin with the first.
LEAST_CALLS, LONG_S = 4, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    lengths = [1024, 2048, 4096, 8192, 32768, 65536]
    parser.add_argument("--quick", action="store_true", help="a short set; see above")
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--masks", nargs="+", help="names of masks; all by default")
    parser.add_argument("--passes", nargs="+", choices=list(FLOPS), default=list(FLOPS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help="see peers.py")
    parser.add_argument("--implementations", nargs="+", default=["default"])
    parser.add_argument(
        "--lead-ms", type=float, default=100.0, help="calls before those of a figure"
    )
    parser.add_argument("--budget-ms", type=float, default=100.0, help="time of one figure")
    parser.add_argument("--commit", help="commit of a tree without git")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.head_dims, args.peers = [8192, 32768], [128], ["cudnn"]
    rows = []
    for head_dim in args.head_dims:
        for length in args.lengths:
            for found in measure_length(length, head_dim, args):
                rows += found
                if args.json:
                    save(args.json, args.commit, {"rows": rows})


class Named(NamedTuple):
    """A mask, and what it is in the words of `kernel_peers.Case`."""

    kind: str
    lengths: np.ndarray
    mask: masks.AttnMask


def cases(length: int) -> dict[str, Named]:
    """The masks of one length, by name."""
    lengths = np.array(DOCUMENTS["varlen"].get(str(length), [length]))
    whole = np.array([length])
    result = {
        "full": ("full", whole, masks.full(length)),
        "causal": ("causal", whole, masks.causal(length)),
        "window": ("window", whole, masks.local(length, window=(WINDOW - 1, 0))),
        "varlen_full": ("varlen_full", lengths, masks.varlen(lengths)),
        "varlen_causal": ("varlen_causal", lengths, masks.varlen(lengths, causal=True)),
    }
    blocks = masks.uniform_block_causal(lengths, FRAME)
    result["varlen_block_causal"] = ("varlen_block_causal", lengths, blocks)
    if str(length) in DOCUMENTS["tiny"]:
        tiny = np.array(DOCUMENTS["tiny"][str(length)])
        result["tiny_varlen_full"] = ("varlen_full", tiny, masks.varlen(tiny))
        result["tiny_varlen_causal"] = ("varlen_causal", tiny, masks.varlen(tiny, causal=True))
    return {name: Named(*case) for name, case in result.items()}


def measure_length(length: int, head_dim: int, args: argparse.Namespace) -> Iterator[list[dict]]:
    """Rows of each mask of one length, printed as they come."""
    operands = make_operands(length, head_dim)
    chosen = {name: case for name, case in cases(length).items() if name in (args.masks or [name])}
    # One shape for the tables of all masks: a program for each length, not for each mask.
    first, *others = (slice_table(case.mask).spec for case in chosen.values())
    spec = first.union(*others)
    calls = {}
    for name, (kind, lengths, mask) in chosen.items():
        repeats = _repeats(mask.area, head_dim)
        table = jax.device_put(slice_table(mask, spec=spec))
        calls[name] = make_calls(Case(kind, lengths, operands, repeats), table, args)
    compile_all(calls, args.passes)
    matmul = matmul_tflops()
    for name in chosen:
        area = chosen[name].mask.area
        timed = measure_mask(calls.pop(name), operands[0].shape, args)
        rows = []
        for which in args.passes:
            work = FLOPS[which] * area * NUM_HEADS * head_dim / 1e12
            rates = {who: work / t[which] for who, t in timed["seconds"].items() if which in t}
            row = {
                "mask": name, "length": length, "head_dim": head_dim, "pass": which, "area": area,
                "repeats": _repeats(area, head_dim), "tflops": rates,
                "errors": timed["errors"], "matmul": matmul,
            }  # fmt: skip
            rows.append({**row, **against_best(rates)})
            print_row(rows[-1])
        yield rows


def _repeats(area: int, head_dim: int) -> int:
    """Passes of one program: about two milliseconds of them."""
    expected_s = FLOPS["forward"] * area * NUM_HEADS * head_dim / 300e12
    repeats = 1
    while repeats * expected_s < 1.5e-3 and repeats < MOST_REPEATS:
        repeats *= 2
    return repeats


@functools.cache
def ours(implementation: str | None) -> Callable:
    """A call of ours; the same function each time, so that its programs are found again."""

    def call(q, k, v, table):
        return magi_jax.flex_flash_attention(q, k, v, table, implementation=implementation)

    return call


class Calls(NamedTuple):
    """Who runs a mask, why others do not, and who gives its output but not its gradients."""

    passes: dict[str, Passes]
    errors: dict[str, str]
    forward_only: set[str]

    def of(self, which: str) -> dict[str, Passes]:
        """Those that run a pass."""
        left_out = () if which == "forward" else self.forward_only
        return {name: passes for name, passes in self.passes.items() if name not in left_out}


def make_calls(case: Case, table: SliceTable, args: argparse.Namespace) -> Calls:
    """Ours and the peers that take a case, lazily where they are not of JAX."""
    calls = Calls({}, {}, set())
    for implementation in args.implementations:
        named = None if implementation == "default" else implementation
        label = "ours" if named is None else f"ours_{named}"
        calls.passes[label] = jax_passes(ours(named), case, table)
    for name, peer in available(args.peers).items():
        with refusals(name, calls):
            calls.passes[name] = peer(case)
    return calls


@contextlib.contextmanager
def refusals(name: str, calls: Calls, which: str = "forward") -> Iterator[None]:
    """A peer that refuses a pass is reported, never hidden; ours has to take every one."""
    try:
        yield
    except Exception as problem:
        if name.startswith("ours"):
            raise
        if which == "forward":
            calls.passes.pop(name, None)
        else:
            calls.forward_only.add(name)
        calls.errors[name] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def compile_all(calls: dict[str, Calls], passes: list[str]) -> None:
    """Makes all programs of JAX side by side; a compiler may refuse a case too."""

    def compile(place: tuple[Calls, str, str]) -> None:
        here, name, which = place
        with refusals(name, here, which):
            if name in here.of(which):
                here.passes[name].compile(which)

    every = [(here, name) for here in calls.values() for name in here.passes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile, ((*place, which) for which in passes for place in every)))


def measure_mask(calls: Calls, shape: tuple[int, ...], args: argparse.Namespace) -> dict:
    """Seconds by implementation and pass, and why a peer has none."""
    gradients = {"backward", "both"} & set(args.passes)
    compare(calls, shape, ["forward", *(["backward"] if gradients else [])])
    found: dict[str, dict] = {name: {} for name in calls.passes}
    for which in args.passes:
        for name, passed in in_turns(
            calls, which, args.lead_ms / 1e3, args.budget_ms / 1e3
        ).items():
            found[name][which] = passed / calls.passes[name].repeats
    return {"seconds": {name: found[name] for name in calls.passes}, "errors": calls.errors}


def compare(calls: Calls, shape: tuple[int, ...], passes: list[str]) -> None:
    """Leaves out peers whose output is not ours, and from other passes those whose gradients are not."""
    for which in passes:
        expected: list[jax.Array] = []
        for name, each in calls.of(which).items():
            with refusals(name, calls, which):
                found = as_rows(getattr(each, which)(), shape)
                expected = expected or found
                refuse_difference(which, found, expected)


def in_turns(calls: Calls, which: str, lead_s: float, budget_s: float) -> dict[str, float]:
    """Seconds of a pass of each implementation, the median of a few turns that all take one after the other.

    The pace of a card drifts by several per cent in a second: so what is compared runs in the same second.
    In a turn calls run untimed until the pace is theirs, then timed; the card never rests.
    """
    once: dict[str, float] = {}
    times: dict[str, list[float]] = collections.defaultdict(list)
    for turn in range(-1, TURNS):
        for name, passes in calls.of(which).items():
            with refusals(name, calls, which):
                call, wait = getattr(passes, which), passes.wait
                if turn < 0:
                    wait(call())
                    once[name] = mean_seconds(call, wait, 1)
                    continue
                if once[name] < lead_s / TURNS:
                    mean_seconds(call, wait, int(lead_s / TURNS / once[name]))
                least = LEAST_CALLS if once[name] < LONG_S else 1
                count = max(least, int(budget_s / TURNS / once[name]))
                times[name].append(mean_seconds(call, wait, count))
    return {name: statistics.median(times[name]) for name in calls.of(which)}


def make_operands(length: int, head_dim: int) -> tuple[jax.Array, ...]:
    """Normal q, k, v and dout in bfloat16."""
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    keys = jax.random.split(jax.random.key(length), 4)
    return tuple(
        jax.random.normal(key, (length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )


def against_best(rates: dict[str, float]) -> dict:
    """The best peer and the ratio of our best to it."""
    peers = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
    ours = [rate for name, rate in rates.items() if name.startswith("ours")]
    if not peers or not ours:
        return {}
    best = max(peers, key=peers.__getitem__)
    return {"best_peer": best, "ratio": max(ours) / peers[best]}


def print_row(row: dict) -> None:
    figures = "  ".join(f"{name} {rate:4.0f}" for name, rate in row["tflops"].items())
    ratio = f"  {row['ratio']:.2f} of {row['best_peer']}" if "ratio" in row else ""
    label = f"{row['mask']}@{row['length']} h{row['head_dim']} {row['pass']}"
    print(f"{label:40} {figures}  matmul {row['matmul']:4.0f}{ratio}", flush=True)
    if row["pass"] == "forward":
        for name, error in row["errors"].items():
            print(f"    {name}: {error}", flush=True)


if __name__ == "__main__":
    main()
