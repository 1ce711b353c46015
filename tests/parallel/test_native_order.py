"""Distributed attention with the native transport, lowered for GPUs that need not be there: what
each call waits for, which no scheduler can change.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.comm.native import NativeCalls
from magi_jax.parallel import DistOptions
from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.plan import PlanConfig, make_plan

STAGES = 3


class Program:
    """The operations of one function of a StableHLO module, and what depends on what."""

    def __init__(self, text: str):
        self.lines: dict[str, str] = {}
        self.operands: dict[str, list[str]] = {}  # such as "%5#1"
        self.calls: list[tuple[str, str]] = []  # (value, target), in the order of the text
        for line in text.splitlines():
            found = re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)
            if not found:
                continue
            value, rest = found.groups()
            self.lines[value] = rest
            self.operands[value] = re.findall(r"%\w+(?:#\d+)?", rest.split(" : ")[0].split(" {")[0])
            call = re.search(r"custom_call @(magi_jax\w+)", rest)
            if call:
                self.calls.append((value, call[1]))

    def source(self, operand: str) -> str:
        """The operation that gives a value, barriers looked through."""
        value, _, index = operand.partition("#")
        if "optimization_barrier" not in self.lines.get(value, ""):
            return value
        return self.source(self.operands[value][int(index or 0)])

    def ancestors(self, value: str) -> set[str]:
        seen, waiting = set(), [value]
        while waiting:
            for operand in self.operands.get(waiting.pop(), []):
                operand = operand.partition("#")[0]
                if operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
        return seen


def functions_with(text: str, target: str) -> list[str]:
    return [part for part in text.split("func.func")[1:] if target in part]


@pytest.fixture(scope="module")
def text():
    """A train step's attention in stages, forward and backward, lowered for CUDA."""
    plan = make_plan(masks.causal(1024), 2, PlanConfig(chunk_size=64, overlap=STAGES))
    assert plan.spec.num_remote_stages == STAGES
    return lowered(plan)


def lowered(plan):
    mesh = jax.sharding.AbstractMesh((2,), ("cp",), axis_types=(AxisType.Auto,))
    options = DistOptions(transport=NativeCalls(1, 2, "cp", 2).transport())

    def loss(q, k, v, plan):
        out = dist_attention(q, k, v, plan, implementation="reference", options=options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def gradients(q, k, v, plan):
        return jax.grad(loss, (0, 1, 2))(q, k, v, plan)

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P("cp"),) * 4, out_specs=P("cp"), check_vma=False
    )
    rows = 2 * plan.spec.local_len
    arrays = [jax.ShapeDtypeStruct((rows, n, 16), jnp.bfloat16) for n in (4, 2, 2)]
    plan = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plan)
    return jax.jit(mapped).trace(*arrays, plan).lower(lowering_platforms=("cuda",)).as_text()


def test_late_queries_hide_their_keys_and_the_way_back():
    plan = make_plan(
        masks.local(1024, window=(63, 0)), 2, PlanConfig(chunk_size=64, overlap="late")
    )
    for body in functions_with(lowered(plan), "magi_jax_group_cast"):
        program = Program(body)
        names = [target.removeprefix("magi_jax_group_") for _, target in program.calls]
        is_backward = "reduce_sum" in names
        assert names == ["cast", "finish", *(["reduce_sum", "finish"] if is_backward else [])]
        values = [value for value, _ in program.calls]
        for start, finish in zip(values[::2], values[1::2], strict=True):
            between = program.ancestors(finish) - program.ancestors(start)
            behind = {v for v in between if start in program.ancestors(v)}
            # The first fetch of the backward pass has only the sum of dout * out to hide behind.
            expected = not is_backward or start != values[0]
            assert any("dot_general" in program.lines[v] for v in behind) == expected


def test_no_copy_of_results_in_flight(text):
    for body in functions_with(text, "magi_jax_group_cast"):
        program = Program(body)
        starts = {v for v, target in program.calls if target != "magi_jax_group_finish"}
        for value, target in program.calls:
            if target == "magi_jax_group_finish":
                # Through barriers at most, which cost nothing.
                assert program.source(program.operands[value][1]) in starts
                assert "output_operand_alias" in program.lines[value]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_waits_for_the_start_of_a_call_and_its_finish_for_attention(text, direction):
    bodies = functions_with(text, "magi_jax_group_cast")
    (body,) = [b for b in bodies if ("magi_jax_group_reduce_sum" in b) == (direction == "backward")]
    program = Program(body)
    targets = [target for _, target in program.calls]
    reduces = STAGES if direction == "backward" else 0
    assert targets.count("magi_jax_group_cast") == STAGES
    assert targets.count("magi_jax_group_reduce_sum") == reduces
    finishes = [v for v, target in program.calls if target == "magi_jax_group_finish"]
    assert len(finishes) == STAGES + reduces
    hidden = 0
    for finish in finishes:
        start = program.source(program.operands[finish][0])
        between = program.ancestors(finish) - program.ancestors(start)
        behind = {v for v in between if start in program.ancestors(v)}
        hidden += any("dot_general" in program.lines[v] for v in behind)
    # The first fetch of the backward pass has no attention to hide behind yet.
    assert hidden == len(finishes) - (direction == "backward")
