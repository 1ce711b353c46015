"""A planned batch has every token with its label, in one set of shapes whatever the batch holds."""

import dataclasses
import functools
import itertools
import operator
import pickle

import grain
import jax
import numpy as np
import pytest

import magi_jax as mj
from magi_jax.data import NO_LABEL, PlanBatch, Prefetch, batch, pack, planning
from magi_jax.plan.frame import does_not_fit

SEQ_LEN, CP = 600, 4  # no chunk size divides it evenly over the ranks
CAUSAL = functools.partial(mj.masks.from_segment_ids, causal=True)
WINDOW = functools.partial(mj.masks.from_segment_ids, causal=True, window=(20, 0))
CONFIG = mj.PlanConfig(chunk_size=32)


def _batches(seed=0, replicas=2):
    """Endless batches of documents with long-tailed lengths, whose tokens are all different."""
    rng = np.random.default_rng(seed)

    def documents():
        start = 1
        while True:
            length = int(min(rng.lognormal(3.5, 1.2), SEQ_LEN)) + 1
            yield np.arange(start, start + length)
            start += length

    return batch(pack(documents(), SEQ_LEN, window=32), replicas)


def test_planned_batch_holds_the_same_tokens_in_dispatched_order():
    packed = next(_batches())
    planned = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG)(packed)
    rows = CP * planned.plans[0].spec.local_len
    for plan in planned.plans:
        assert plan.positions.shape == (2, CP, rows // CP)
        np.testing.assert_array_equal(plan.positions, planned.plans[0].positions)
    for replica, positions in enumerate(planned.plans[0].positions.reshape(2, -1)):
        is_token = positions >= 0
        assert is_token.sum() == SEQ_LEN
        for before, after in zip(packed, planned.packed, strict=True):
            np.testing.assert_array_equal(
                after[replica, is_token], before[replica, positions[is_token]]
            )
        assert (planned.packed.labels[replica, ~is_token] == NO_LABEL).all()
        assert (planned.packed.segment_ids[replica, ~is_token] == 0).all()


SLOW_LINKS = mj.CostModel(
    link_gbps=1e-3, latency_us=0.1, launch_us=0.1, backward_launch_us=0.1, memory_gbps=1e6
)


@pytest.mark.parametrize("options", [{}, {"overlap": 3}, {"cost_model": SLOW_LINKS}], ids=str)
def test_plans_are_those_of_each_sequence(options):
    packed = next(_batches())
    config = dataclasses.replace(CONFIG, **options)
    planned = PlanBatch(CP, (CAUSAL, WINDOW), config)(packed)
    full, window = (plan.spec for plan in planned.plans)
    for replica in range(2):
        ids = packed.segment_ids[replica]
        alone = mj.make_plan(CAUSAL(ids), CP, config)
        other = alone.with_mask(WINDOW(ids), overlap=config.overlap, machine=config.machine)
        if options:
            assert other.fingerprint() != alone.with_mask(WINDOW(ids)).fingerprint()
        padded = alone.pad_to(full), other.pad_to(window)
        for plan, stacked in zip(padded, planned.plans, strict=True):
            of_replica = jax.tree.map(operator.itemgetter(replica), stacked)
            assert plan.fingerprint() == of_replica.fingerprint()


def test_fitted_specs_are_shared_by_batches_to_come():
    planner = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG).fit(_batches(), num_batches=8, margin=1.5)
    shapes = {
        tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(planned))
        for planned in map(planner, itertools.islice(_batches(seed=1), 12))
    }
    assert len(shapes) == 1
    assert all(
        plan.spec == spec
        for plan, spec in zip(planner(next(_batches())).plans, planner.specs, strict=True)
    )


def test_batch_that_does_not_fit_is_refused_with_the_size():
    lengths = [SEQ_LEN // 2, *[3] * (SEQ_LEN // 6)]
    (short,) = batch(pack(list(map(np.arange, lengths)), SEQ_LEN, window=SEQ_LEN), 1)
    (long,) = batch(pack([np.arange(SEQ_LEN)], SEQ_LEN), 1)
    planner = PlanBatch(CP, (CAUSAL,), CONFIG).fit([long], margin=1.0)
    with pytest.raises(ValueError, match=r"spec\.\w+.* is \d+, but \d+ is needed") as refusal:
        planner(short)
    assert "larger margin" in "".join(refusal.value.__notes__)
    (grown,) = dataclasses.replace(planner, grow=True)(short).plans
    assert grown.spec.covers(planner.specs[0])
    (same,) = dataclasses.replace(planner, grow=True)(long).plans
    assert same.spec == planner.specs[0]


def test_batch_that_fits_as_it_is_planned_alone_is_served(monkeypatch):
    """A spec is for many masks: what it makes of one may be larger than what that one asks for."""
    planner = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG).fit(_batches(), num_batches=2, margin=2.0)
    packed = next(_batches())

    def planned_alone(mask, cp_size, config, spec=None):
        if spec is not None:
            raise does_not_fit("spec.comm[0].pair_rows is 1, but 2 is needed")
        return mj.make_plan(mask, cp_size, config)

    monkeypatch.setattr(planning, "make_plan", planned_alone)
    for plan, spec in zip(planner(packed).plans, planner.specs, strict=True):
        assert plan.spec == spec


def test_fit_needs_a_batch():
    with pytest.raises(ValueError, match="got none"):
        PlanBatch(CP, (CAUSAL,)).fit([])
    with pytest.raises(ValueError, match=r"margin must be at least 1, got 0\.5"):
        PlanBatch(CP, (CAUSAL,)).fit(_batches(), margin=0.5)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"masks": CAUSAL}, "tuple of functions, got one"),
        ({"masks": ()}, "masks must be functions, at least one"),
        ({"masks": (mj.masks.causal(SEQ_LEN),)}, r"masks must be functions.*\(AttnMask\("),
        ({"config": {"chunk_size": 8}}, "config must be a PlanConfig, got dict"),
        ({"cp_size": "cp"}, "cp_size must be an integer, got 'cp'"),
    ],
)
def test_planners_are_checked_when_they_are_made(fields, match):
    with pytest.raises((TypeError, ValueError), match=match):
        PlanBatch(**{"cp_size": CP, "masks": (CAUSAL,)} | fields)


def test_planner_travels_to_other_processes_and_plans_ahead():
    planner = pickle.loads(pickle.dumps(PlanBatch(CP, (CAUSAL, WINDOW), CONFIG).fit(_batches())))
    with Prefetch(itertools.islice(_batches(), 5), planner, workers=2) as ahead:
        for planned, packed in zip(ahead, _batches(), strict=False):
            expected = planner(packed)
            same = jax.tree.map(np.array_equal, planned, expected)
            assert all(jax.tree.leaves(same))


def test_planner_is_a_transformation_of_a_grain_dataset():
    packed = list(itertools.islice(_batches(), 3))
    planner = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG).fit(packed)
    dataset = grain.MapDataset.source(packed).map(planner)
    for planned, batch_before in zip(dataset, packed, strict=True):
        same = jax.tree.map(np.array_equal, planned, planner(batch_before))
        assert all(jax.tree.leaves(same))


def test_dictionary_of_another_pipeline_goes_in_as_it_is(rng):
    """MaxText's names and layout; arrays with more axes travel too."""
    packed = next(_batches())
    images = rng.normal(size=(2, SEQ_LEN, 3)).astype(np.float32)
    theirs = {
        "inputs": packed.tokens,
        "inputs_position": packed.positions,
        "inputs_segmentation": packed.segment_ids,
        "targets": np.maximum(packed.labels, 0),
        "targets_segmentation": packed.segment_ids * (packed.labels != NO_LABEL),
        "images": images,
    }
    planner = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG, segment_ids="inputs_segmentation")
    planned, ours = planner(theirs), PlanBatch(CP, (CAUSAL, WINDOW), CONFIG)(packed)
    for plan, expected in zip(planned.plans, ours.plans, strict=True):
        assert plan.fingerprint() == expected.fingerprint()
    assert set(planned.packed) == set(theirs)
    np.testing.assert_array_equal(planned.packed["inputs"], ours.packed.tokens)
    np.testing.assert_array_equal(planned.packed["inputs_segmentation"], ours.packed.segment_ids)
    is_labelled = planned.packed["targets_segmentation"] > 0
    np.testing.assert_array_equal(is_labelled, ours.packed.labels != NO_LABEL)
    back = mj.undispatch(planned.packed["images"], planned.plans[0])
    np.testing.assert_array_equal(back, images)


def test_dictionary_without_the_named_segment_ids_is_refused():
    with pytest.raises(KeyError, match=r"no 'segment_ids', it has \['inputs'\]"):
        PlanBatch(CP, (CAUSAL,))({"inputs": np.ones((1, 8))})


def test_batches_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"masks must be a tuple of functions, got one"):
        PlanBatch(CP, CAUSAL)
    planner = PlanBatch(CP, (CAUSAL,))
    with pytest.raises(ValueError, match=r"\[R, L\].* got shape \(8,\)"):
        planner({"segment_ids": np.ones(8, int)})
    with pytest.raises(TypeError, match="before they go to the devices"):
        planner({"segment_ids": jax.numpy.ones((1, 8), int)})
    with pytest.raises(TypeError, match=r"Packed or a dictionary of arrays .* got list"):
        planner([np.ones((1, 8), int)])
    with pytest.raises(TypeError, match=r"fit takes several batches, such as \[batch\]"):
        planner.fit({"segment_ids": np.ones((1, 8), int)})
    with pytest.raises(
        ValueError, match=r"needs 8 rows on axis 1 of \['weight'\], got shape \(1,\)"
    ):
        planner({"segment_ids": np.ones((1, 8), int), "weight": np.ones(1)})
    longer = PlanBatch(CP, (CAUSAL,), mj.PlanConfig(seq_len=16))
    with pytest.raises(ValueError, match=r"needs 16 rows on axis 1 of .*, got shape \(1, 8\)"):
        longer({"segment_ids": np.ones((1, 8), int)})
    fitted = dataclasses.replace(planner, grow=True).fit([{"segment_ids": np.ones((1, 8), int)}])
    with pytest.raises(ValueError, match="fitted to sequences of 8 tokens, the batch has 6: pad"):
        fitted({"segment_ids": np.ones((1, 6), int)})


def test_masks_may_end_before_the_padding():
    """As those do that are built from lengths; batches with other paddings share one spec."""

    def from_lengths(ids):
        return mj.masks.varlen(np.bincount(ids)[1:], causal=True)

    batches = [
        batch(pack([np.arange(1, n)] * 2, SEQ_LEN, window=2), 1) for n in (SEQ_LEN - 7, 290, 120)
    ]
    first, *others = (next(each) for each in batches)
    planner = PlanBatch(CP, (from_lengths,), CONFIG).fit([first, *others])
    for packed in (first, *others):
        (plan,) = planner(packed).plans
        (expected,) = PlanBatch(CP, (CAUSAL,), CONFIG, planner.specs)(packed).plans
        assert plan.fingerprint() == expected.fingerprint()


def test_grain_packs_plans_and_resumes():
    """Packed by grain, planned in its pipeline, and resumed from the state of its iterator."""
    rng = np.random.default_rng(0)
    documents = [{"inputs": rng.integers(1, 99, n)} for n in rng.integers(1, 200, 40)]
    dataset = grain.MapDataset.source(documents).seed(1).shuffle().repeat().to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset, length_struct={"inputs": SEQ_LEN}, num_packing_bins=4
    ).batch(2)
    planner = PlanBatch(CP, (CAUSAL, WINDOW), CONFIG, segment_ids="inputs_segment_ids")
    planned = packed.map(planner.fit(packed, num_batches=6))
    batches, plain = iter(planned), iter(packed)
    for _ in range(2):
        batch_before, found = next(plain), next(batches)
        back = mj.undispatch(found.packed["inputs"], found.plans[0])
        np.testing.assert_array_equal(back, batch_before["inputs"])
    state = batches.get_state()
    expected = jax.tree.leaves(next(batches))
    again = iter(planned)
    again.set_state(state)
    assert all(map(np.array_equal, expected, jax.tree.leaves(next(again))))


@pytest.mark.parametrize("cp_size", [1, 3])
def test_any_number_of_ranks_is_fitted(cp_size):
    planner = PlanBatch(cp_size, (CAUSAL, WINDOW), CONFIG).fit(_batches(), num_batches=2)
    planned = planner(next(_batches()))
    assert [plan.spec for plan in planned.plans] == list(planner.specs)


@pytest.mark.parametrize("travelling", ["auto", "never"])
def test_what_the_config_says_of_travelling_holds_for_all_masks(travelling):
    frames = mj.masks.uniform_block_causal([4096] * 16, 512)
    everywhere = frames | mj.masks.global_rows(65_536, rows=(64_512, 65_536))
    config = mj.PlanConfig(travelling=travelling)
    planner = mj.data.PlanBatch(16, (lambda _: frames, lambda _: everywhere), config)
    planned = planner({"segment_ids": np.ones((1, 65_536), np.int32)})
    travels = [plan.travel is not None for plan in planned.plans]
    assert travels == [False, travelling == "auto"]
