"""Distributed attention with the native transport, lowered for GPUs that need not be there: what
each call waits for, which no scheduler can change.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.comm.native import NativeCalls
from magi_jax.ops import ffi
from magi_jax.parallel import DistOptions
from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.parallel.pipeline import MOST_CROSSING
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver.cost.model import CostModel

STAGES = 3
SINKS = 4  # place among the operands


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
            call = re.search(rf"custom_call @(magi_jax\w+)_v{ffi.INTERFACE}\b", rest)
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


NEAR = (True, False, False), (True, False, True)


@pytest.fixture(
    scope="module", params=[1, 2, NEAR], ids=["one step", "two steps", "own nodes first"]
)
def steps(request):
    """Steps of each transfer: the second is inside pretended nodes of two ranks. Or, for each direction,
    which stages take the second alone.
    """
    return request.param


def steps_of(steps, backward):
    """Steps of the transfer of each stage."""
    if isinstance(steps, int):
        return [steps] * STAGES
    return [1 if is_near else 2 for is_near in steps[backward]]


@pytest.fixture(scope="module")
def text(steps):
    """A train step's attention, forward and backward, lowered for CUDA."""
    overlap, cp_size = (STAGES, 2 * steps) if isinstance(steps, int) else (steps, 4)
    config = PlanConfig(
        chunk_size=64, overlap=overlap, ranks_per_node=2, two_level=cp_size == 4, travelling="never"
    )
    plan = make_plan(masks.causal(1024), cp_size, config)
    assert plan.spec.num_remote_stages == STAGES
    found = [
        [len(comm.steps) for comm in s.comm] for s in (plan.forward_stages, plan.backward_stages)
    ]
    assert found == [steps_of(steps, backward) for backward in (False, True)]
    return lowered(plan, gradients=True)


def traced(plan, gradients=False, of=(0, 1, 2), keep_remote_kv=False, **options):
    """Attention under a plan, or its gradients with respect to some of q, k, v, plan and sinks."""
    cp_size = plan.cp_size
    mesh = jax.sharding.AbstractMesh((cp_size,), ("cp",), axis_types=(AxisType.Auto,))
    transport = NativeCalls(1, 2, "cp", cp_size).transport()
    how = DistOptions(
        transport=transport, implementation="reference", keep_remote_kv=keep_remote_kv
    )

    def attend(q, k, v, plan, sinks=None):
        return dist_attention(q, k, v, plan, sinks=sinks, options=how, **options)

    def loss(*args):
        return jnp.sum(attend(*args).astype(jnp.float32) ** 2)

    mapped = jax.shard_map(
        jax.grad(loss, of) if gradients else attend,
        mesh=mesh, in_specs=(*(P("cp"),) * 4, *(P(),) * (SINKS in of)), out_specs=P("cp"), check_vma=False,
    )  # fmt: skip
    rows = cp_size * plan.spec.local_len
    arrays = [jax.ShapeDtypeStruct((rows, n, 16), jnp.bfloat16) for n in (4, 2, 2)]
    plan = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), plan)
    sinks = [jax.ShapeDtypeStruct((4,), jnp.float32)] * (SINKS in of)
    return jax.jit(mapped).trace(*arrays, plan, *sinks)


def lowered(plan, **options):
    """The same for CUDA, as text."""
    return traced(plan, **options).lower(lowering_platforms=("cuda",)).as_text()


def targets_in(jaxpr):
    """Targets of all custom calls of a jaxpr and those within it."""
    for equation in jaxpr.eqns:
        yield equation.params.get("target_name", "")
        for inner in jaxprs_in_params(equation.params):
            yield from targets_in(inner)


def test_no_copy_of_results_in_flight(text):
    for body in functions_with(text, "magi_jax_group_cast"):
        program = Program(body)
        starts = {v for v, target in program.calls if target != "magi_jax_group_finish"}
        for value, target in program.calls:
            if target == "magi_jax_group_finish":
                # Through barriers at most, which cost nothing.
                assert program.source(program.operands[value][1]) in starts
                assert "output_operand_alias" in program.lines[value]


# Calls that run beside no attention: in the backward pass the first fetch, and in two steps those that fill
# the pipeline: the step inside the node of the first stage, with both steps before it where no attention
# comes first, and that of the last sums, which leaves the step between nodes to the attention over own keys.
# Where rows of own nodes come first and last, it is the first fetch of the backward pass alone, and beside
# it the step between nodes of the second.
EXPOSED = {
    ("forward", 1): 0, ("backward", 1): 1, ("forward", 2): 1, ("backward", 2): 4,
    ("forward", NEAR): 0, ("backward", NEAR): 2,
}  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_waits_for_the_start_of_a_call_and_its_finish_for_attention(
    text, steps, direction
):
    bodies = functions_with(text, "magi_jax_group_cast")
    (body,) = [b for b in bodies if ("magi_jax_group_reduce_sum" in b) == (direction == "backward")]
    program = Program(body)
    targets = [target for _, target in program.calls]
    casts = sum(steps_of(steps, direction == "backward"))
    reduces = casts * (direction == "backward")
    assert targets.count("magi_jax_group_cast") == casts
    assert targets.count("magi_jax_group_reduce_sum") == reduces
    finishes = [v for v, target in program.calls if target == "magi_jax_group_finish"]
    assert len(finishes) == casts + reduces
    hidden = 0
    for finish in finishes:
        start = program.source(program.operands[finish][0])
        between = program.ancestors(finish) - program.ancestors(start)
        behind = {v for v in between if start in program.ancestors(v)}
        hidden += any("dot_general" in program.lines[v] for v in behind)
    assert len(finishes) - hidden == EXPOSED[direction, steps]


def test_own_keys_hide_the_first_fetch_of_a_backward_pass():
    """Where some queries see them first, no transfer runs beside nothing, and what comes back is added to
    what these gave.
    """
    model = CostModel(backward_launch_us=0.0, latency_us=0.0)
    config = PlanConfig(chunk_size=64, travelling="never", cost_model=model)
    plan = make_plan(masks.causal(1024), 2, config)
    assert plan.backward_stages.first is not None
    (body,) = functions_with(lowered(plan, gradients=True), "magi_jax_group_reduce_sum")
    program = Program(body)
    starts = [value for value, target in program.calls if "finish" not in target]
    finishes = [value for value, target in program.calls if target == "magi_jax_group_finish"]
    assert len(finishes) == 2 * len(plan.backward_stages.comm)
    for finish in finishes:
        start = program.source(program.operands[finish][0])
        between = program.ancestors(finish) - program.ancestors(start)
        behind = {v for v in between if start in program.ancestors(v)}
        assert any("dot_general" in program.lines[v] for v in behind)
    reduce = next(v for v in starts if "reduce_sum" in program.lines[v])
    onto = [program.source(operand) for operand in program.operands[reduce][-2:]]
    assert not any("broadcast_in_dim" in program.lines[v] for v in onto)


def test_sums_are_added_to_those_of_the_stage_before(text, steps):
    """In their place, the first to zeros: the last pass reads one array, however many stages there are. Where
    sums cross between nodes several are under way at once.
    """
    (body,) = functions_with(text, "magi_jax_group_reduce_sum")
    program = Program(body)
    added = 0
    for value, target in program.calls:
        if target == "magi_jax_group_reduce_sum" and "operand_alias" in program.lines[value]:
            added += 1
            (place,) = re.findall(
                r"output_tuple_indices = \[1\],\s*operand_index = (\d+)", program.lines[value]
            )
            before = program.source(program.operands[value][int(place)])
            is_first = "broadcast_in_dim" in program.lines[before]  # zeros
            assert is_first or (before, "magi_jax_group_finish") in program.calls
    if steps == 1:
        assert added == STAGES


def test_stages_whose_keys_were_kept_are_walked_from_the_last_to_the_first():
    """Those of other nodes come last, and their gradients have the longer way."""
    config = PlanConfig(
        chunk_size=64, overlap=2, ranks_per_node=2, two_level=True, travelling="never"
    )
    plan = make_plan(masks.causal(1024), 4, config)
    sizes = [comm.dst_rows for comm in plan.forward_stages.comm]
    assert sizes[0] != sizes[1]
    (body,) = functions_with(
        lowered(plan, gradients=True, keep_remote_kv=True), "magi_jax_group_reduce_sum"
    )
    assert "magi_jax_group_cast" not in body
    program = Program(body)
    rows = [
        int(re.search(r"dst_rows = (\d+)", program.lines[value])[1])
        for value, target in program.calls
        if target == "magi_jax_group_reduce_sum"
    ]
    # The first sums that leave are of all rows of a stage's buffer.
    assert rows[0] == sizes[1]


def test_no_more_sums_cross_between_nodes_at_once_than_buffers_are_kept_for():
    config = PlanConfig(
        chunk_size=32, overlap=6, ranks_per_node=2, two_level=True, travelling="never"
    )
    plan = make_plan(masks.causal(1024), 4, config)
    assert plan.spec.num_remote_stages == 6
    (body,) = functions_with(lowered(plan, gradients=True), "magi_jax_group_reduce_sum")
    program, in_flight, most = Program(body), set(), 0
    for value, target in program.calls:
        if target == "magi_jax_group_reduce_sum":
            in_flight.add(value)
        elif target == "magi_jax_group_finish":
            in_flight.discard(program.source(program.operands[value][0]))
        most = max(most, len(in_flight))
    assert most == MOST_CROSSING + 1  # and those of one stage inside nodes


def test_each_call_has_transfers_of_its_own(text):
    """XLA makes one of two transfers with equal operands: those of two calls with equal keys must differ in
    what they wait for, as the calls do in their queries, results and cotangents.
    """
    for body in functions_with(text, "magi_jax_group_cast"):
        program = Program(body)
        queries = set(re.findall(r"(%\w+): tensor<\d+x4x16xbf16>", body))
        assert queries
        for value, target in program.calls:
            if target == "magi_jax_group_cast":
                table = program.operands[value][0].partition("#")[0]
                assert program.ancestors(table) >= queries


def test_calls_with_other_options_have_transfers_of_their_own():
    plan = make_plan(masks.causal(1024), 4, PlanConfig(chunk_size=64, overlap=1))
    marks = set()
    for scale in (0.5, 0.25):
        text = lowered(plan, scale=scale)
        (body,) = functions_with(text, "magi_jax_group_cast")
        marks |= {tuple(re.findall(r"dense<(\d+)> : tensor<ui32>", body))}
    assert len(marks) == 2
    assert all(marks)


@pytest.mark.parametrize("of", [(0,), (1,), (2,), (0, 2), (SINKS,), (1, SINKS)])
@pytest.mark.parametrize("overlap", ["late", 2])
def test_every_call_is_finished_whatever_gradients_are_read(of, overlap):
    """A start stays, since computation waits for it; without its finish its results would be written to
    after their buffers were given to others.
    """
    config = PlanConfig(chunk_size=64, overlap=overlap, travelling="never")
    whole = traced(make_plan(masks.causal(1024), 4, config), gradients=True, of=of).jaxpr.jaxpr
    read, _ = partial_eval.dce_jaxpr(whole, [True] * len(of))
    calls = [target for target in targets_in(read) if "magi_jax_group" in target]
    ends = [target for target in calls if "finish" in target]
    assert len(ends) >= 2
    assert len(ends) == sum("cast" in target or "reduce" in target for target in calls)
