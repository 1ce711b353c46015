"""Times what each rank of distributed attention computes, alone on one GPU, beside half of the whole.

    python benchmarks/ranks.py [--cp 2] [--tokens 32768] [--heads 64:8] [--masks full ...] [--json FILE]

Masks, plans and heads are those of ``distributed.py``. A rank makes the calls of both passes in their order,
with what XLA computes between them; rows that peers would send lie ready, and nothing is sent. `ratio` is of
the time of the whole sequence on this GPU, over the ranks, to that of the rank: what communication cannot
mend.
"""

import argparse
import functools
import pathlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from distributed import HEAD_DIM, cases, described, operands, plan_of, single_gpus
from jax.sharding import AxisType, Mesh
from provenance import save
from turns import in_turns, means

from magi_jax.comm import InFlight
from magi_jax.comm.portable import PORTABLE
from magi_jax.ops import get_implementation
from magi_jax.parallel.pipeline import Link
from magi_jax.parallel.stages import Stages
from magi_jax.plan import AttentionPlan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768, help="per rank")
    parser.add_argument("--heads", nargs="+", default=["64:8"], help="query heads:kv heads")
    parser.add_argument("--masks", nargs="+", help="names of masks, in order; all by default")
    parser.add_argument("--overlap", default="auto", help="remote stages, or late")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    args.overlap = args.overlap if args.overlap in ("auto", "late") else int(args.overlap)
    mesh = Mesh(np.array(jax.devices()[:1]), ("cp",), axis_types=(AxisType.Auto,))
    rows = []
    for text in args.heads:
        heads = tuple(map(int, text.split(":")))
        named = cases(args.tokens * args.cp)
        for name in args.masks or named:
            plan = plan_of(named[name], args.cp, heads, overlap=args.overlap)
            calls = {"alone": single_gpus(mesh, named[name], *heads, first_only=True)}
            calls |= {f"rank {r}": rank_calls(mesh, plan, r, *heads) for r in range(args.cp)}
            rows += figures(
                {"mask": name, "heads": text} | described(plan), means(in_turns(calls)), args
            )
            if args.json:
                save(args.json, args.commit, {"ranks": args.cp, "rows": rows})


@dataclass(frozen=True)
class Still(Link):
    """A link over which nothing moves: what would come is there, in arrays by shape and dtype."""

    ready: dict[str, jax.Array] | None = None
    wanted: dict[str, tuple] | None = None

    def start_cast(self, rows, step, exposed: bool = False) -> InFlight:
        return self._rows(rows, step.dst_rows)

    def start_reduce(self, partials, step, onto=None) -> InFlight:
        if onto is not None:
            return InFlight(tuple(onto))
        return self._rows([x.astype(jnp.float32) for x in partials], step.src_rows)

    def finish(self, in_flight: InFlight) -> list[jax.Array]:
        return list(in_flight.leaves)

    def _rows(self, like, num_rows: int) -> InFlight:
        leaves = []
        for x in like:
            shape = (num_rows, *x.shape[1:])
            key = f"{shape} {x.dtype}"
            self.wanted[key] = (shape, x.dtype)
            leaves.append(self.ready[key] if key in self.ready else jnp.zeros(shape, x.dtype))
        return InFlight(tuple(leaves))


@dataclass(frozen=True, kw_only=True)
class Alone(Stages):
    """Stages of a rank without peers."""

    still: Still

    @property
    def _link(self) -> Still:
        return self.still


def rank_calls(mesh, plan: AttentionPlan, rank: int, num_heads: int, num_kv_heads: int) -> dict:
    """Both passes of one rank, as `distributed.passes` gives them."""
    q, k, v, dout = operands(mesh, plan.spec.local_len, num_heads, num_kv_heads)
    part = jax.tree.map(jnp.asarray, plan.local(rank))
    wanted: dict[str, tuple] = {}

    def stages(ready):
        return Alone(
            implementation=get_implementation(None, platform=jax.default_backend()),
            axis_name="cp",
            scale=HEAD_DIM**-0.5,
            logits_soft_cap=0.0,
            transport=PORTABLE,
            reduce_dtype=None,
            keep_remote_kv=False,
            still=Still("cp", PORTABLE, None, ready, wanted),
        )

    def forward(ready, q, k, v, part):
        return stages(ready).forward((q, k, v, None), part)[:2]

    def backward(ready, dout, results, q, k, v, part):
        cotangents = dout, jnp.zeros_like(results[1])
        return stages(ready).backward(cotangents, (*results, ()), (q, k, v, None), part)[:3]

    results = jax.eval_shape(forward, {}, q, k, v, part)
    jax.eval_shape(backward, {}, dout, results, q, k, v, part)
    # Of equal numbers products draw less power, and a card at its limit would be faster.
    ready = {key: _normal(shape, dtype) for key, (shape, dtype) in wanted.items()}
    forward, backward = jax.jit(forward), jax.jit(backward)
    results = forward(ready, q, k, v, part)
    return {
        "forward": lambda: forward(ready, q, k, v, part),
        "backward": lambda: backward(ready, dout, results, q, k, v, part),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape, dtype)


def figures(label: dict, times: dict[str, dict[str, float]], args) -> list[dict]:
    """A row of figures for each rank."""
    rows = []
    for which in list(times)[1:]:
        row = label | {"rank": int(which.split()[1]), "tokens": args.tokens}
        words = []
        for name in ("forward", "backward"):
            share = times["alone"][name] / args.cp
            row |= {f"{name}_ms": times[which][name] * 1e3, f"{name}_share_ms": share * 1e3}
            row[f"{name}_ratio"] = share / times[which][name]
            words.append(f"{name} {row[f'{name}_ms']:8.3f} ms {row[f'{name}_ratio']:.3f}")
        text = f"{label['mask']:20} {label['heads']:6} {which} {'  '.join(words)}"
        text += f"  stages {label['remote_stages']}/{label['backward_stages']} late {label['late_rows']}"
        print(f"{text} imbalance {label['imbalance']:.4f}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
