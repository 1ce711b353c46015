"""Transfers in two steps: rows between nodes, stages cut by node, and their timeline."""

import dataclasses

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.solver import dispatch
from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.overlap.choose_stages import choose_stages
from magi_jax.solver.work import two_level
from magi_jax.solver.work.find_work import Keys, find_work
from magi_jax.solver.work.transfer import Pieces


def scattered_work(rng, cp_size=8, length=512, engine="numpy"):
    """Attention of packed documents whose chunks lie anywhere."""
    lengths = rng.multinomial(length - 20, np.ones(20) / 20) + 1
    documents = masks.varlen(lengths, causal=bool(rng.integers(2)))
    mask = documents | masks.global_columns(length, columns=(0, 40))
    edges = dispatch.chunk_edges(length, 8)
    problem = dispatch.DispatchProblem(mask.slices, edges, cp_size)
    layout = dispatch.make_layout(dispatch.lpt(problem), cp_size)
    keys = Keys(layout, length // cp_size)
    return find_work(mask.slices, mask.slices[:0], layout, keys, engine)


def cells(pieces):
    """All (src, src_row, dst, dst_row) of pieces, sorted."""
    return sorted(
        (src, row + i, dst, to + i)
        for src, dst, row, to, n in zip(*pieces, strict=True)
        for i in range(n)
    )


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_steps_join_to_the_transfer_that_was_split(ranks_per_node, rng):
    for _ in range(20):
        count = int(rng.integers(0, 30))
        src, dst = rng.integers(0, 8, (2, count))
        n_rows = rng.integers(1, 9, count)
        dst_row = np.zeros(count, np.int64)
        for rank in range(8):  # rows of a receiver do not overlap
            mine = dst == rank
            dst_row[mine] = np.cumsum(n_rows[mine]) - n_rows[mine] + rng.integers(0, 3)
        pieces = Pieces(src, dst, rng.integers(0, 20, count), dst_row, n_rows)
        steps = two_level.split(pieces, ranks_per_node, 8)
        compiled = two_level.split(pieces, ranks_per_node, 8, "compiled")
        for found, twin in zip(compiled, steps, strict=True):
            assert all(map(np.array_equal, found, twin))
        assert cells(two_level.joined(steps)) == cells(pieces)
        across, within = steps
        assert (across.src % ranks_per_node == across.dst % ranks_per_node).all()
        assert (within.src // ranks_per_node == within.dst // ranks_per_node).all()
        arrived = [(dst, to) for _, _, dst, to in cells(across)]
        assert len(arrived) == len(set(arrived))  # at the relay, rows lie side by side
        for rank in range(8):
            rows = [to for dst, to in arrived if dst == rank]
            assert sorted(rows) == list(range(len(rows)))
        wanted = {(s, row, d // ranks_per_node) for s, row, d, _ in cells(pieces)}
        assert len(arrived) == len(wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_a_node_gets_a_row_in_one_stage_for_all_its_ranks(ranks_per_node, turned, rng):
    work = scattered_work(rng)
    far = work.far
    staged = two_level.split_stages(far, 3, 8, ranks_per_node, turned)
    stage_of, held = {}, [[] for _ in range(8 * 3)]
    for dst, src, begin, end, row, stage, to in zip(*staged, strict=True):
        held[dst * 3 + stage].append((begin, end, to))
        for i in range(end - begin):
            assert stage_of.setdefault((dst // ranks_per_node, begin + i), stage) == stage
        segment = work.layout.segment_of(begin)
        assert (row, src) == (begin + work.layout.offset[segment], work.layout.owner[segment])
    rows = {(d, b + i) for d, _, b, e, *_ in zip(*far, strict=True) for i in range(e - b)}
    kept = {(d, b + i) for d, _, b, e, *_ in zip(*staged, strict=True) for i in range(e - b)}
    assert rows == kept
    for parts in held:  # in global order, packed
        assert parts == sorted(parts)
        sizes = [end - begin for begin, end, _ in parts]
        assert [to for *_, to in parts] == (np.cumsum(sizes) - sizes).tolist()
    for node in range(8 // ranks_per_node):
        counts = np.bincount([s for (n, _), s in stage_of.items() if n == node], minlength=3)
        assert counts.max() - counts.min() <= 1


def test_both_engines_cut_alike_and_count_the_same(rng):
    for _ in range(3):
        seed = int(rng.integers(1 << 30))
        found = [
            scattered_work(np.random.default_rng(seed), engine=engine).staged(3, True, 4)
            for engine in ("numpy", "compiled")
        ]
        for a, b in zip(*(staged.slices for staged in found), strict=True):
            np.testing.assert_array_equal(a.slices, b.slices)
            np.testing.assert_array_equal(a.rank, b.rank)
        across, within = two_level.traffic(found[0].remote, 3, 8, 4)
        node = np.arange(8) // 4
        assert not across[:, node[:, None] == node].any()
        assert not within[:, node[:, None] != node].any()
        distinct = {
            (src, row + i, dst // 4)
            for dst, src, begin, end, row, *_ in zip(*found[0].remote, strict=True)
            for i in range(end - begin)
            if dst // 4 != src // 4
        }
        assert across.sum() == len(distinct)


def work_of(kernel, cast, reduce, within, near=()):
    arrays = (np.array(part, float)[:, None] for part in (kernel, cast, reduce))
    """Times of one rank; in the backward pass where any gradients move."""
    within = np.array(within, float)[..., None]
    return timeline.DirectionWork(*arrays, 0.0, None, within, any(reduce) or any(within[1]), near)


def test_steps_run_beside_attention_on_links_of_their_own():
    """Of three stages: rows cross two stages ahead, and move inside the node one stage ahead."""
    found = schedule.simulate(work_of([20, 10, 10, 10], [8, 9, 7], [0] * 3, [[3, 4, 5], [0, 0, 0]]))
    assert found.cast[:, 0].tolist() == [[0, 8], [8, 17], [23, 30]]
    # The first has the local stage before it, and nothing to hide behind.
    assert found.within[0, :, 0].tolist() == [[20, 23], [23, 27], [33, 38]]
    assert found.compute[:, 0].tolist() == [[0, 20], [23, 33], [33, 43], [43, 53]]
    assert found.predicted_us == 53


def test_sums_are_made_in_the_node_before_they_cross():
    found = schedule.simulate(work_of([10, 10, 10], [1, 1], [7, 8], [[1, 1], [4, 20]]))
    assert found.compute[:, 0].tolist() == [[42, 52], [2, 12], [12, 22]]
    # Sums in the node run beside the next stage, and cross when it is done; the last cross beside own keys.
    assert found.within[1, :, 0].tolist() == [[12, 16], [22, 42]]
    assert found.reduce[:, 0].tolist() == [[22, 29], [42, 50]]
    assert found.predicted_us == 52


def test_rows_of_own_nodes_move_at_once_while_others_cross():
    near = True, False, False
    found = schedule.simulate(
        work_of([20, 10, 10, 10], [0, 24, 9], [0] * 3, [[3, 4, 5], [0, 0, 0]], near)
    )
    assert found.cast[1:, 0].tolist() == [[0, 24], [24, 33]]
    # Attention over near rows waits for others to have crossed, since they move inside the node beside it.
    assert found.within[0, :, 0].tolist() == [[0, 3], [24, 28], [34, 39]]
    assert found.compute[:, 0].tolist() == [[0, 20], [24, 34], [34, 44], [44, 54]]


def test_sums_of_near_rows_that_come_last_hide_beside_own_keys():
    near = True, False, True
    work = work_of([10, 10, 10, 10], [0, 1, 0], [0, 7, 0], [[3, 1, 1], [4, 5, 6]], near)
    found = schedule.simulate(work)
    assert found.within[0, :, 0].tolist() == [[0, 3], [3, 4], [17, 18]]
    assert found.compute[:, 0].tolist() == [[33, 43], [3, 13], [13, 23], [23, 33]]
    assert found.within[1, :, 0].tolist() == [[13, 17], [23, 28], [33, 39]]
    assert found.reduce[:, 0].tolist() == [[0, 0], [33, 40], [0, 0]]
    assert found.predicted_us == 43


def test_the_way_is_chosen_by_predicted_time(rng):
    work = scattered_work(rng)
    slow = CostModel(link_gbps=400.0, node_link_gbps=0.1, latency_us=0.0)
    machine = Machine(4, slow)
    assert machine.ways(8) == (False, True)
    chosen = choose_stages(work, 64, machine)
    settled = {
        way: choose_stages(work, 64, machine._replace(two_level=way)) for way in (False, True)
    }
    assert chosen.two_level
    assert chosen.predicted_us == settled[True].predicted_us < settled[False].predicted_us
    # Where links are alike, a second step is in vain.
    alike = dataclasses.replace(slow, node_link_gbps=400.0, latency_us=20.0)
    assert not choose_stages(work, 64, machine._replace(cost_model=alike)).two_level


def test_nodes_that_do_not_divide_the_ranks():
    assert Machine(3).ways(8) == (False,)
    assert Machine(8, two_level=True).ways(8) == (False,)
    assert Machine(None).ways(8) == (False,)
    with pytest.raises(ValueError, match="8 ranks are not whole nodes of 3"):
        Machine(3, two_level=True).ways(8)
