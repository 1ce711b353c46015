"""The balanced dispatcher: what it may do, what it must reach, and its two engines against each other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax import masks
from magi_jax.masks import bands
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem
from magi_jax.solver.dispatch import balanced as balanced_module
from magi_jax.solver.dispatch.balanced import balanced, placement_maker
from magi_jax.solver.dispatch.runs import ALL_ORDERS, runs
from magi_jax.solver.dispatch.starts import GREEDY, Site, node_first_starts
from magi_jax.solver.dispatch.units import make_units
from magi_jax.solver.work import remote
from magi_jax.testing.cases import mask_cases

SQUARE = {name: mask for name, mask in mask_cases(384).items() if mask.q_len == mask.k_len}
TRAINING = ("varlen_full", "varlen_causal", "varlen_block_causal", "shared_question", "prefix_lm")


def problem_of(mask, chunk_size, cp_size, **options):
    edges = dispatch.chunk_edges(mask.q_len, chunk_size)
    return DispatchProblem(mask.slices, edges, cp_size, **options)


def measure(assignment, problem, per_node):
    """(received, sent, entering each node, area) per rank, from the dense mask, row by row."""
    cp_size, length = problem.cp_size, int(problem.edges[-1])
    owner = np.repeat(assignment.owner, np.diff(assignment.edges))
    dense = masks.AttnMask(problem.slices, length, length).dense()
    needs = np.stack([dense[owner == rank].any(axis=0) for rank in range(cp_size)])
    far = needs & (owner != np.arange(cp_size)[:, None])
    node_needs = needs.reshape(-1, per_node, length).any(axis=1)
    entering = node_needs & (owner // per_node != np.arange(cp_size // per_node)[:, None])
    area = np.bincount(owner, weights=dense.sum(axis=1), minlength=cp_size)
    sent = np.bincount(owner, weights=far.sum(axis=0), minlength=cp_size)
    return far.sum(axis=1), sent, entering.sum(axis=1), area


@given(
    length=st.integers(1, 300),
    chunk_size=st.integers(1, 40),
    cp_size=st.integers(1, 12),
    name=st.sampled_from(["causal", "full", "empty", "window", "documents", "global"]),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_equal_up_to_one_chunk(length, chunk_size, cp_size, name):
    lengths = [length // 3, length // 7, length - length // 3 - length // 7]
    mask = {
        "causal": lambda: masks.causal(length),
        "full": lambda: masks.full(length),
        "empty": lambda: masks.empty(length),
        "window": lambda: masks.local(length, window=(9, 0)),
        "documents": lambda: masks.varlen(lengths, causal=True),
        "global": lambda: masks.causal(length) | masks.global_rows(length, rows=(0, 1)),
    }[name]()
    assignment = balanced(problem_of(mask, chunk_size, cp_size))
    assert assignment.edges[[0, -1]].tolist() == [0, length]
    assert (np.diff(assignment.edges) > 0).all()
    tokens = np.bincount(assignment.owner, weights=np.diff(assignment.edges), minlength=cp_size)
    assert len(tokens) == cp_size
    assert tokens.max() - tokens.min() <= chunk_size
    num_chunks = math.ceil(length / chunk_size)
    assert tokens.max() <= math.ceil(num_chunks / cp_size) * chunk_size


@pytest.mark.parametrize("name", ["varlen_causal", "block_causal_global", "zero_length_documents"])
def test_compiled_and_numpy_searches_are_the_same(name):
    problem = problem_of(SQUARE[name], 16, 8, ranks_per_node=4)
    compiled = balanced(problem)
    twin = balanced(problem._replace(engine="numpy"))
    assert compiled.edges.tolist() == twin.edges.tolist()
    assert compiled.owner.tolist() == twin.owner.tolist()


@pytest.mark.parametrize("name", sorted(SQUARE))
@pytest.mark.parametrize("engine", ["compiled", "numpy"])
def test_loads_are_those_of_the_dense_mask(name, engine):
    problem = problem_of(SQUARE[name], 16, 6)
    units = make_units(problem)
    placement = placement_maker(engine)(units, 6, 3)
    owner = np.random.default_rng(len(name)).integers(0, 6, len(units.area)).astype(np.int32)
    rows, area = placement.measure(owner)
    real = dispatch.Assignment(units.edges, owner[: len(units.chunk)])
    received, sent, entering, dense_area = measure(real, problem, 3)
    assert rows[:6].tolist() == received.tolist()
    assert rows[6:12].tolist() == sent.tolist()
    assert rows[12:14].tolist() == entering.tolist()
    assert area.tolist() == dense_area.tolist()


@pytest.mark.parametrize("name", sorted(SQUARE))
@pytest.mark.parametrize("period", [0, 3])
def test_engines_take_the_same_steps(name, period):
    """The compiled search updates counts and the twin measures anew, so each checks the other."""
    problem = problem_of(SQUARE[name], 8, 8)
    units = make_units(problem)
    order = np.lexsort((-units.area, -units.spare)).astype(np.int32)
    capacity = (units.slots * units.slot, units.slot, units.split_chunks, units.light_area)
    limit = int(1.01 * units.area.sum() / 8)
    engines = [placement_maker(engine)(units, 8, 2) for engine in ("compiled", "numpy")]
    weights = tuple(GREEDY[len(name) % len(GREEDY)])
    start, twin_start = (engine.greedy(order, capacity, weights) for engine in engines)
    assert start.tolist() == twin_start.tolist()
    found, twin = (engine.refine(start, limit, 800, 7, 0.5, 0.5, period) for engine in engines)
    for of_compiled, of_numpy in zip(found, twin, strict=True):
        assert of_compiled.tolist() == of_numpy.tolist()
    for loads, measured in zip(found[1:], engines[1].measure(found[0]), strict=True):
        assert loads.tolist() == measured.tolist()


@pytest.mark.parametrize("name", sorted(SQUARE))
@pytest.mark.parametrize("fineness", [0, 2])
def test_engines_find_the_same_units(name, fineness):
    for away in (slice(0, 0), slice(0, 2)):
        problem = problem_of(SQUARE[name], 16, 8)._replace(travelling=SQUARE[name].slices[away])
        compiled, twin = (make_units(problem, fineness, engine) for engine in ("compiled", "numpy"))
        for a, b in zip(compiled, twin, strict=True):
            assert np.array_equal(a, b)


def as_list(owner):
    return None if owner is None else owner.tolist()


@pytest.mark.parametrize("name", sorted(SQUARE))
@pytest.mark.parametrize("fineness", [0, 2])
def test_engines_deal_and_fill_alike(name, fineness):
    mask = SQUARE[name]
    units = make_units(problem_of(mask, 16, 8), fineness)
    compiled, twin = (
        Site(units, 8, 2, placement_maker(engine)) for engine in ("compiled", "numpy")
    )
    node = np.random.default_rng(len(name)).integers(0, 4, len(units.area)).astype(np.int32)
    node = np.sort(node)  # few nodes overflow, so that both outcomes occur
    for call in (
        lambda placement: placement.deal(compiled.capacity),
        lambda placement: placement.greedy(
            compiled.order, compiled.capacity, tuple(GREEDY[0]), node
        ),
    ):
        found = (call(site.make_placement(units, 8, 2)) for site in (compiled, twin))
        assert as_list(next(found)) == as_list(next(found))


@pytest.mark.parametrize("name", TRAINING)
def test_dealing_and_settling_nodes_first_keep_places_and_nodes(name):
    units = make_units(problem_of(mask_cases(8192)[name], 64, 16, ranks_per_node=4))
    site = Site(units, 16, 4, placement_maker("compiled"))
    placement = site.make_placement(units, 16, 4)
    starts = [placement.greedy(site.order, site.capacity, tuple(weights)) for weights in GREEDY]
    dealt = placement.deal(site.capacity)
    found = node_first_starts(site, placement, starts, 8)
    assert found
    for owner in (*found, *([] if dealt is None else [dealt])):
        tokens = np.bincount(owner, units.size, 16)
        assert (tokens == units.slots * units.slot).all()
        assert np.bincount(owner, units.spare, 16).max() <= 1


@pytest.mark.parametrize("name", TRAINING)
def test_moves_less_than_lpt_at_like_balance(name):
    mask = mask_cases(8192)[name]
    problem = problem_of(mask, 64, 16, ranks_per_node=4)
    rows, nodes, imbalance = {}, {}, {}
    for strategy in (dispatch.lpt, balanced):
        layout = dispatch.make_layout(strategy(problem), 16)
        cut = remote.cut_queries(mask.slices, layout)
        far = remote.remote_ranges(cut, layout)
        size = far.end - far.begin
        received, sent = np.bincount(far.dst, size, 16), np.bincount(far.src, size, 16)
        area = np.bincount(cut.rank, bands.area(cut.slices), 16)
        rows[strategy] = max(received.max(), sent.max())
        nodes[strategy] = np.bincount(far.dst // 4, size, 4).max()
        imbalance[strategy] = area.max() / area.mean()
    assert imbalance[balanced] <= max(1.015, imbalance[dispatch.lpt])
    assert rows[balanced] <= 0.95 * rows[dispatch.lpt]
    assert nodes[balanced] <= 0.95 * nodes[dispatch.lpt]


def test_windows_stay_contiguous():
    problem = problem_of(masks.local(8192, window=(127, 0)), 128, 8)
    received, sent, _, _ = measure(balanced(problem), problem, 8)
    assert received.max() == sent.max() == 127
    assert received.sum() == 7 * 127


@pytest.mark.parametrize("window", [(63, 0), (32, 31)])
def test_high_effort_looks_no_further_than_an_even_window(window, monkeypatch):
    """Ranks of neighbouring rows receive what crosses one edge each: nothing can be better."""

    def search(*args):
        raise AssertionError("searched")

    monkeypatch.setattr(balanced_module, "_search", search)
    problem = problem_of(masks.local(1 << 17, window=window), 128, 64, ranks_per_node=8)
    owner = balanced(problem._replace(effort="high")).owner
    np.testing.assert_array_equal(owner, np.arange(64))
    with pytest.raises(AssertionError, match="searched"):
        balanced(
            problem_of(
                masks.varlen([3000] * 20, causal=True), 128, 8, ranks_per_node=4, effort="high"
            )
        )


def test_keys_that_all_rows_see_are_dealt_to_all_ranks():
    """As even as a window, but in neighbouring rows one rank would send to all others."""
    mask = masks.full(1 << 14, 1 << 11).shift(0, 0, 1 << 14, 1 << 14)
    problem = problem_of(mask, 128, 8)
    received, sent, _, _ = measure(balanced(problem), problem, 8)
    assert sent.max() < 2 * received.max()


def test_two_ranks_compare_chunks_with_long_runs():
    lengths = [1884, 19, 372, 139, 156, 198, 33, 195, 104, 2000, 307, 172, 185, 126, 86, 166, 397]
    problem = problem_of(masks.varlen([*lengths, 193, 638, 201, 251, 370], causal=True), 128, 2)
    received, _, _, area = measure(balanced(problem), problem, 2)
    dealt = [measure(placed, problem, 2)[0].max() for placed in runs(problem, ALL_ORDERS[-2:-1])]
    assert received.max() < 0.5 * min(dealt)
    assert area.max() <= 1.014 * area.mean()


def test_causal_is_a_zigzag_at_exact_balance():
    problem = problem_of(masks.causal(4096), 64, 8)
    received, _, _, area = measure(balanced(problem), problem, 8)
    # Three quarters of an all-gather, less the rows that a rank's first half shard sees of its own.
    assert received.sum() == 0.75 * 7 * 4096
    assert area.max() == area.min()


def test_chunks_too_heavy_for_balance_are_split():
    mask = masks.uniform_block_causal([512] * 16, 64) | masks.global_rows(8192, rows=(8092, 8192))
    problem = problem_of(mask, 128, 8)
    units = make_units(problem)
    assert len(units.edges) > len(problem.edges)
    whole = np.isin(problem.edges, units.edges)
    assert whole.all()
    for strategy, most in ((dispatch.lpt, np.inf), (balanced, 1.05)):
        area = measure(strategy(problem), problem, 8)[3]
        assert area.max() / area.mean() <= most


def test_even_masks_are_not_split():
    for mask in (masks.full(1024), masks.local(1024, window=(99, 0)), masks.causal(1024)):
        problem = problem_of(mask, 16, 8)
        assert make_units(problem).edges.tolist() == problem.edges.tolist()


def test_high_effort_is_not_worse():
    problem = problem_of(mask_cases(4096)["varlen_causal"], 64, 8)
    fast = measure(balanced(problem), problem, 8)
    high = measure(balanced(problem._replace(effort="high")), problem, 8)
    assert max(high[0].max(), high[1].max()) <= 1.02 * max(fast[0].max(), fast[1].max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_node": 3}, "cp_size=8 is not a multiple of ranks_per_node=3"),
        ({"effort": "extreme"}, "effort must be one of"),
        ({"engine": "quantum"}, "engine must be"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        balanced(problem_of(masks.causal(256), 16, 8, **options))


@pytest.mark.parametrize("effort", ["fast", "high"])
def test_no_more_tokens_than_ranks_stay_in_order(effort):
    assignment = balanced(problem_of(masks.causal(40), 1, 64, ranks_per_node=8, effort=effort))
    assert assignment.edges.tolist() == list(range(41))
    assert (np.diff(assignment.owner) > 0).all()
    assert assignment.owner[0] >= 0
    assert assignment.owner[-1] < 64


def test_a_machine_smaller_than_a_node_is_one_node():
    problem = problem_of(SQUARE["varlen_causal"], 16, 4)
    alone = balanced(problem._replace(ranks_per_node=8))
    assert alone.owner.tolist() == balanced(problem).owner.tolist()


@pytest.mark.parametrize(
    ("mask", "chunk_size", "cp_size"),
    [
        (masks.causal(5), 1, 8),
        (masks.causal(300), 128, 64),
        (masks.empty(512), 16, 8),
        (masks.varlen(np.ones(20000, np.int64), causal=True), 128, 8),
        (masks.AttnMask.from_slices([(0, 1)], [(511, 512)], 0, 512), 16, 8),
    ],
    ids=["shorter than cp", "fewer chunks than ranks", "empty", "tiny documents", "one cell"],
)
def test_unusual_input(mask, chunk_size, cp_size):
    problem = problem_of(mask, chunk_size, cp_size)
    assignment = balanced(problem)
    assert assignment.edges[-1] == mask.q_len
    assert ((assignment.owner >= 0) & (assignment.owner < cp_size)).all()
