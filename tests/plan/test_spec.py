"""Buckets, and specs that cover, unite and refuse."""

import dataclasses
import itertools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_plan
from test_make_plan import square_masks, varlen_causal

from magi_jax import masks
from magi_jax.plan import PlanConfig, bucket, make_plan
from magi_jax.solver.cost.model import CostModel

CONFIG = PlanConfig(chunk_size=8, tile_size=16, overlap=2)


@given(st.integers(0, 10**7))
def test_bucket_is_the_next_quarter_step(size):
    got = bucket(size)
    assert got >= size
    assert got <= max(size * 1.25, 4)
    steps = [step * 2**i for i in range(30) for step in (1, 1.25, 1.5, 1.75)]
    assert size == 0 or got == min(s for s in steps if s >= size and s == int(s))


def test_bucket_minimum():
    assert bucket(3, 16) == 16
    assert bucket(17, 16) == 20


@settings(max_examples=30, deadline=None)
@given(square_masks(max_len=40), square_masks(max_len=40))
def test_union_covers_both_and_serves_both(first, second):
    config = dataclasses.replace(CONFIG, seq_len=40)
    plans = [make_plan(mask, 4, config) for mask in (first, second)]
    union = plans[0].spec.union(plans[1].spec)
    for mask, plan in zip((first, second), plans, strict=True):
        assert union.covers(plan.spec)
        assert plan.spec.covers(plan.spec)
        padded = make_plan(mask, 4, CONFIG, spec=union)
        assert padded.spec == union
        check_plan(padded, mask)
    assert union == plans[1].spec.union(plans[0].spec)
    assert union.union(plans[0].spec) == union


def test_a_union_takes_any_number_of_its_like():
    config = dataclasses.replace(CONFIG, seq_len=520)
    lengths = [300, 220], [30, 20, 400, 9], [520]
    plans = [make_plan(varlen_causal(each), 4, config) for each in lengths]
    first, second, third = (plan.spec for plan in plans)
    assert first.union(second, third) == first.union(second).union(third) != first.union(second)
    assert first.union() == first
    for other in (plans[1], second.calc[0], None):
        with pytest.raises(TypeError, match=r"a PlanSpec is united with its like, got \w+"):
            first.union(other)


def test_one_spec_gives_one_tree():
    config = dataclasses.replace(CONFIG, seq_len=520)
    pair = [varlen_causal([300, 20, 200]), varlen_causal([30, 20, 400, 9])]
    first, second = (make_plan(mask, 4, config).spec for mask in pair)
    first, second = (make_plan(mask, 4, CONFIG, spec=first.union(second)) for mask in pair)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(plan)] for plan in (first, second)]
    assert shapes[0] == shapes[1]


def capacities(spec, path="spec"):
    """(path, value) of every capacity."""
    for field in dataclasses.fields(spec):
        value, name = getattr(spec, field.name), f"{path}.{field.name}"
        if "capacity" in field.metadata:
            yield name
        elif isinstance(value, tuple) and field.name != "roll_shifts":
            for i, entry in enumerate(value):
                yield from capacities(entry, f"{name}[{i}]")
        elif dataclasses.is_dataclass(value):
            yield from capacities(value, name)


def shrink(spec, path):
    """A copy with the capacity at ``path`` set to zero."""
    head, _, rest = path.partition(".")
    name, _, index = head.partition("[")
    value = getattr(spec, name)
    if not rest:
        return dataclasses.replace(spec, **{name: 0})
    if not index:
        return dataclasses.replace(spec, **{name: shrink(value, rest)})
    i = int(index[:-1])
    entries = (*value[:i], shrink(value[i], rest), *value[i + 1 :])
    return dataclasses.replace(spec, **{name: entries})


def test_every_capacity_is_refused_by_name_when_too_small():
    mask = varlen_causal([300, 20, 200])
    spec = make_plan(mask, 4, CONFIG).spec
    paths = [p for p in capacities(spec) if not p.endswith("k_len") and "comm[0].self" not in p]
    assert len(paths) > 25
    for path in paths:
        too_small = shrink(spec, path.removeprefix("spec."))
        if too_small == spec:  # a capacity that is zero already: nothing stays in a cast
            assert path.endswith("self_rows")
            continue
        assert not too_small.covers(spec)
        with pytest.raises(ValueError, match="does not fit the given spec") as error:
            make_plan(mask, 4, CONFIG, spec=too_small)
        assert f"{path} is 0, but " in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp_size": 2}, "its cp_size is 4, the plan's is 2"),
        ({"chunk_size": 4}, "its chunk_size is 8, the plan's is 4"),
        ({"tile_size": 128}, "its tile_size is 16, the plan's is 128"),
        ({"roll_shifts": (1,)}, r"its roll_shifts is \(-1,\), the plan's is \(1,\)"),
        ({"seq_len": 600}, "its seq_len is 520, the plan's is 600"),
        ({"overlap": 3}, "overlap=3 .* the spec has 2"),
    ],
)
def test_a_spec_of_another_kind_is_refused(change, message):
    mask = varlen_causal([300, 20, 200])
    spec = make_plan(mask, 4, CONFIG).spec
    cp_size = change.pop("cp_size", 4)
    with pytest.raises(ValueError, match=message):
        make_plan(mask, cp_size, dataclasses.replace(CONFIG, **change), spec=spec)


def test_no_union_of_different_kinds():
    mask = varlen_causal([300, 20, 200])
    spec = make_plan(mask, 4, CONFIG).spec
    with pytest.raises(ValueError, match=r"spec.cp_size is 4 in one and 2 in the other"):
        spec.union(make_plan(mask, 2, CONFIG).spec)
    with pytest.raises(ValueError, match=r"spec.roll_shifts is \(-1,\) in one and \(-1, 1\)"):
        spec.union(make_plan(mask, 4, dataclasses.replace(CONFIG, roll_shifts=(-1, 1))).spec)


KINDS = [
    {"overlap": 1},
    {"overlap": 3},
    {"overlap": (1, 2)},
    {"overlap": (3, 1), "travelling": ((100, 110), (200, 203))},
    {"overlap": 2, "travelling": ((0, 5),)},
    {"overlap": "late"},
]


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.combinations_with_replacement(range(len(KINDS)), 2)]
)
def test_plans_of_all_kinds_unite_and_are_padded(first, second):
    mask_of = [varlen_causal([150, 20, 81]), varlen_causal([30, 20, 201])]
    configs = [dataclasses.replace(CONFIG, **KINDS[i]) for i in (first, second)]
    plans = [make_plan(m, 4, c) for m, c in zip(mask_of, configs, strict=True)]
    union = plans[0].spec.union(plans[1].spec)
    assert union == plans[1].spec.union(plans[0].spec)
    for mask, plan, config in zip(mask_of, plans, configs, strict=True):
        assert union.covers(plan.spec)
        padded = plan.pad_to(union)
        assert padded.spec == union
        assert padded.planning_ms == plan.planning_ms
        check_plan(padded, mask)
        solved = make_plan(mask, 4, dataclasses.replace(config, overlap="auto"), spec=union)
        assert solved.spec == union
        check_plan(solved, mask, walk=False)
        check_plan(plan.pad_to(union.scaled(1.5)), mask, walk=False)


@settings(max_examples=25, deadline=None)
@given(square_masks(max_len=60), st.sampled_from([4, 16, 128]), st.floats(1.0, 3.0))
def test_padding_keeps_the_meaning(mask, tile_size, factor):
    config = dataclasses.replace(CONFIG, tile_size=tile_size, overlap=(2, 1))
    plan = make_plan(mask, 4, config)
    check_plan(plan.pad_to(plan.spec.scaled(factor)), mask)


def test_a_last_tile_that_was_short_is_full_no_longer_where_its_buffer_grows():
    """All of a stage's 160 rows are seen, in tiles of 64: of the third tile, then of 64 rows, not all."""
    mask = masks.full(480)
    plan = make_plan(mask, 3, PlanConfig(chunk_size=32, tile_size=64, overlap=2))
    wide = plan.spec.scaled(1.5)
    assert (plan.calc[1].k_len, wide.calc[1].k_len) == (160, 256)
    check_plan(plan.pad_to(wide), mask)


@pytest.mark.parametrize("factor", [0.5, 0, float("nan")])
def test_a_spec_is_not_made_smaller(factor):
    with pytest.raises(ValueError, match=f"factor of at least 1, got {factor}"):
        make_plan(masks.causal(16), 2).spec.scaled(factor)


def test_padding_refuses_what_is_too_small():
    mask = varlen_causal([300, 20, 200])
    plan = make_plan(mask, 4, dataclasses.replace(CONFIG, travelling=((0, 5),)))
    with pytest.raises(ValueError, match=r"spec\.travel is None, but one is needed"):
        plan.pad_to(dataclasses.replace(plan.spec, travel=None))
    fewer = dataclasses.replace(plan.spec, comm=plan.spec.comm[:1], calc=plan.spec.calc[:2])
    with pytest.raises(ValueError, match=r"spec\.calc has 2 entries, but 3 are needed"):
        plan.pad_to(fewer)


def test_scaled_specs_have_room_for_more_rows():
    plan = make_plan(varlen_causal([60] * 20), 4, dataclasses.replace(CONFIG, overlap=1))
    wide = plan.spec.scaled(2.0)
    assert wide.comm[0].dst_rows >= min(2 * plan.spec.comm[0].dst_rows, 3 * 300)
    assert wide.calc[1].k_len == wide.comm[0].dst_rows
    assert wide.covers(plan.spec)
    assert plan.spec.scaled(100.0).comm[0].dst_rows <= bucket(3 * plan.spec.local_len)


def test_tables_get_more_room_than_buffers():
    """Entries cost a few bytes, and differ most from mask to mask."""
    plan = make_plan(varlen_causal([700, 900, 400, 48]), 4, PlanConfig(overlap=2))
    wide = plan.spec.scaled(1.25)
    for table, wider in zip(plan.spec.calc, wide.calc, strict=True):
        assert wider.query_runs >= 2 * table.query_runs
        assert wider.key_ids >= 4 * table.key_ids
    for comm, wider in zip(plan.spec.comm, wide.comm, strict=True):
        assert wider.pieces >= 2 * comm.pieces
        assert comm.pair_rows <= wider.pair_rows <= bucket(int(1.25 * comm.pair_rows) + 1)
    assert wide.transfer.self_rows == plan.spec.transfer.src_rows
    assert plan.spec.scaled(1.0).calc == plan.spec.calc


def test_a_union_serves_masks_that_take_other_ways():
    """Late queries in both directions, forward alone, or stages: each mask fits as it was planned."""
    model = CostModel(
        link_gbps=311.0,
        memory_gbps=3000.0,
        latency_us=45.0,
        launch_us=45.0,
        backward_launch_us=200.0,
    )
    config = PlanConfig(seq_len=32_768, cost_model=model)
    ways = set()
    mask_of = {n: varlen_causal([n] * (32_768 // n)) for n in (600, 3_000, 16_000)}
    plans = {n: make_plan(mask, 8, config) for n, mask in mask_of.items()}
    for plan in plans.values():
        ways.add((plan.late is not None, plan.backward_stages.late is not None))
    assert ways == {(True, True), (True, False), (False, False)}
    for some in itertools.combinations(mask_of, 2):
        union = plans[some[0]].spec.union(plans[some[1]].spec)
        for n in some:
            assert make_plan(mask_of[n], 8, config, spec=union).spec == union


def test_rolls_get_room_for_more_pieces():
    spec = make_plan(varlen_causal([700, 900, 400, 48]), 4, PlanConfig(chunk_size=64)).spec
    assert spec.scaled(1.5).rolls[0].pair_rows >= min(2 * spec.rolls[0].pair_rows, spec.local_len)


def test_room_for_travelling_queries_that_see_other_keys():
    """Keys of another number than queries keep theirs."""
    config = PlanConfig(chunk_size=64)
    of_keys, own = (make_plan(masks.causal(n), 2, config) for n in (1024, 256))
    plan = own.with_mask(masks.full(256, 1024), keys=of_keys, travelling=((0, 16),))
    roomy = plan.spec.scaled(1.5)
    assert roomy.travel.calc.k_len == plan.spec.travel.calc.k_len == 512
    own.with_mask(masks.full(256, 1024), keys=of_keys, travelling=((0, 16),), spec=roomy)


def test_late_queries_get_room_for_more_keys_of_their_rank_and_of_others():
    config = PlanConfig(chunk_size=256, overlap="late", dispatch="contiguous")
    spec = make_plan(varlen_causal([60] * 64), 4, config).spec
    late, wide = spec.late.comm, spec.scaled(2.0).late.comm
    assert 0 < late.self_rows < wide.src_rows / 2
    assert wide.self_rows >= 2 * late.self_rows
    assert wide.dst_rows >= 2 * late.dst_rows
