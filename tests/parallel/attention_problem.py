"""Random attention problems, their float64 answers, and plans that share one program."""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from magi_jax.parallel import dispatch, dist_attention, undispatch
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.testing import oracle


class Problem(NamedTuple):
    """Inputs ``[*B, T, heads, dim]`` and the weights of out and lse in the loss."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray

    @property
    def rows(self):
        """What is sharded by rows: all but the sinks."""
        return {name: getattr(self, name) for name in self._fields if name != "sinks"}


class Answer(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray


def random_problem(rng, length, *, lead=(), heads=4, kv_heads=2, dim=8, v_dim=6):
    def normal(*shape):
        return rng.normal(size=(*lead, length, *shape)).astype(np.float32)

    sinks = rng.normal(size=heads).astype(np.float32)
    q, k, v = normal(heads, dim), normal(kv_heads, dim), normal(kv_heads, v_dim)
    return Problem(q, k, v, sinks, normal(heads, v_dim), normal(heads))


def expected(problem, mask, *, sinks=True, **options):
    """The answer in float64 for one sequence; without sinks, ``dlse`` counts only where lse is finite."""
    q, k, v, sink_logits, dout, dlse = problem
    options["sinks"] = sink_logits if sinks else None
    dense = mask.dense()
    out, lse = oracle.attention(q, k, v, dense, **options)
    dlse = np.where(np.isfinite(lse), dlse, 0)
    return Answer(out, lse, *oracle.attention_grads(q, k, v, dense, dout, dlse, **options))


def expected_batch(problem, masks, **options):
    """The answer for a batch, sequence ``b`` under ``masks[b]``."""
    rows = [
        expected(
            Problem(**{n: x[b] for n, x in problem.rows.items()}, sinks=problem.sinks),
            mask,
            **options,
        )
        for b, mask in enumerate(masks)
    ]
    stacked = Answer(*map(np.stack, zip(*rows, strict=True)))
    return stacked._replace(dsinks=stacked.dsinks.sum(0))


def dispatched(problem, plan, axis=0):
    """The problem in the layout of a NumPy plan."""
    return Problem(**dispatch(problem.rows, plan, axis=axis), sinks=problem.sinks)


def check(answer, plan, wanted, axis=0, tolerance=2e-5):
    """Compares a dispatched answer with the expected one."""
    for name, got in answer._asdict().items():
        if name != "dsinks":
            got = undispatch(np.asarray(got, np.float32), plan, axis=axis)
        want = getattr(wanted, name)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance, err_msg=name
        )


def shared_plans(masks, cp_size, config=None):
    """Plans of several masks, all with one spec."""
    config = PlanConfig() if config is None else config
    specs = [make_plan(mask, cp_size, config).spec for mask in masks]
    spec = specs[0].union(*specs[1:])
    return [make_plan(mask, cp_size, config, spec) for mask in masks]


def value_and_grads(attention, problem):
    """An `Answer` of ``attention(q, k, v, sinks) -> out, lse`` on dispatched arrays."""

    def loss(q, k, v, sinks):
        out, lse = attention(q, k, v, sinks)
        finite = jax.numpy.where(jax.numpy.isfinite(lse), lse, 0.0)
        return (out * problem.dout).sum() + (finite * problem.dlse).sum(), (out, lse)

    q, k, v, sinks = problem[:4]
    grads, results = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
    return Answer(*results, *grads)


def run_with(mesh, **options):
    """A jitted function of a dispatched problem and its plan that gives the `Answer`."""

    @jax.jit
    def run(problem, plan):
        def attention(q, k, v, sinks):
            return dist_attention(
                q, k, v, plan, mesh=mesh, sinks=sinks, return_residual=True, **options
            )

        return value_and_grads(attention, problem)

    return run


def make_mesh(kind=AxisType.Auto, **axes):
    size = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices()[:size]
    )


def count_transfers(lowered):
    """Transfers before XLA merges equal ones, which it does on CPU, where barriers go early."""
    return lowered.as_text().count("stablehlo.all_to_all")
