"""What the native kernels read out of tables, computed by their own code on the host, and the calls
that a program for GPUs makes.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, padded, pairs, random_comm

from magi_jax.comm import group_cast, staging_bytes, symmetric_memory
from magi_jax.comm.native import NativeCalls
from magi_jax.comm.pools import seats_of
from magi_jax.ops import ffi
from magi_jax.plan import CommSpec


def read_table(table, cp_size, *, is_cast):
    """``(map, digests)`` of one rank's table."""
    ffi.load()
    rows = DST_ROWS if is_cast else SRC_ROWS
    slots = 2 if is_cast else cp_size + -(-cp_size // 32)
    call = jax.ffi.ffi_call(
        ffi.target("magi_jax_group_map"),
        (
            jax.ShapeDtypeStruct((slots, rows), jnp.int32),
            jax.ShapeDtypeStruct((cp_size, 2), jnp.int32),
        ),
    )
    attributes = {"cp_size": cp_size, "src_rows": SRC_ROWS, "dst_rows": DST_ROWS}
    attributes = {name: np.int32(value) for name, value in attributes.items()}
    found = call(jnp.asarray(table), **attributes, is_cast=np.int32(is_cast))
    return tuple(map(np.asarray, found))


def seen_by(words, peer):
    return (words[peer // 32] >> (peer % 32)) & 1 == 1


@pytest.mark.parametrize("cp_size", [1, 2, 8, 40])
def test_maps_say_what_the_pieces_say(cp_size, rng):
    comm = padded(random_comm(rng, cp_size, with_self=True), longest=400)
    cast = np.full((cp_size, 2, DST_ROWS), -1)
    reduce = np.full((cp_size, cp_size, SRC_ROWS), -1)
    for src, src_row, dst, dst_row in pairs(comm):
        cast[dst, :, dst_row] = src, src_row
        reduce[src, dst, src_row] = dst_row
    for rank in rng.permutation(cp_size)[:4]:
        found, _ = read_table(comm.recv[rank], cp_size, is_cast=True)
        np.testing.assert_array_equal(found[0], cast[rank, 0])
        has = found[0] >= 0
        np.testing.assert_array_equal(found[1][has], cast[rank, 1][has])
        found, _ = read_table(comm.send[rank], cp_size, is_cast=False)
        words = found[cp_size:].view(np.uint32)
        for peer in range(cp_size):
            has = seen_by(words, peer)
            np.testing.assert_array_equal(np.where(has, found[peer], -1), reduce[rank, peer])


@pytest.mark.parametrize("is_cast", [True, False])
def test_damaged_tables_lead_nowhere_outside(is_cast, rng):
    """Any bytes at all: every row that is entered lies in both buffers."""
    cp_size = 3
    for low, high in ((-(2**31), 2**31), (-50, 60), (2**31 - 40, 2**31)):
        for _ in range(20):
            table = rng.integers(low, high, (64, 5)).astype(np.int32)
            table[::2, 0] = rng.integers(-1, cp_size + 1, 32)
            found, _ = read_table(table, cp_size, is_cast=is_cast)
            if is_cast:
                has = found[0] >= 0
                assert (found[0][has] < cp_size).all()
                assert ((found[1][has] >= 0) & (found[1][has] < SRC_ROWS)).all()
            else:
                words = found[cp_size:].view(np.uint32)
                for peer in range(cp_size):
                    rows = found[peer][seen_by(words, peer)]
                    assert ((rows >= 0) & (rows < DST_ROWS)).all()
                assert not any(seen_by(words, peer).any() for peer in range(cp_size, 32))


def test_digests_agree_at_both_ends_and_tell_plans_apart(rng):
    cp_size = 4
    comm = padded(random_comm(rng, cp_size, with_self=True))
    sent = np.stack([read_table(t, cp_size, is_cast=False)[1] for t in comm.send])
    received = np.stack([read_table(t, cp_size, is_cast=True)[1] for t in comm.recv])
    np.testing.assert_array_equal(sent, received.swapaxes(0, 1))
    for column in (1, 2, 3):
        other = comm.send[0].copy()
        other[0, column] += 1
        assert (read_table(other, cp_size, is_cast=False)[1] != sent[0]).any()
    # The parts of two pieces swapped.
    other = comm.send[0].copy()
    other[:2, 1] = other[:2, 1][::-1]
    assert (read_table(other, cp_size, is_cast=False)[1] != sent[0]).any()


def abstract_mesh(**sizes):
    axes = tuple(sizes)
    kinds = (AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), axes, axis_types=kinds)


def lower(fn, mesh, *args, axes=None):
    """Text of ``fn`` on shards, for GPUs that need not be there."""
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"), axis_names=set(axes or mesh.axis_names)
    )
    return jax.jit(mapped).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def structs(cp_size=4):
    comm = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
        padded(random_comm(np.random.default_rng(0), cp_size)),
    )
    x = jax.ShapeDtypeStruct((cp_size * SRC_ROWS, 2, 3), jnp.bfloat16)
    return comm, x


def test_calls_of_a_program_and_of_its_derivative():
    transport = NativeCalls(7, 8, "cp", 4).transport()
    comm, x = structs()

    def loss(comm, x):
        def total(x):
            y = group_cast({"a": x, "b": x[:, 0]}, comm, "cp", transport=transport)
            return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(y))

        return jax.grad(total)(x)

    text = lower(loss, abstract_mesh(cp=4), comm, x)
    calls = dict(re.findall(rf"custom_call @(magi_jax_group_[cr]\w+)_v{ffi.INTERFACE}\((.*)", text))
    assert sorted(calls) == ["magi_jax_group_cast", "magi_jax_group_reduce_sum"]
    finished = re.findall(rf"custom_call @{ffi.target('magi_jax_group_finish')}\((.*)", text)
    for call, pool in zip(finished, (7, 8), strict=True):
        assert f"pool = {pool} : i32" in call
        # In place: a copy would be taken while results are still written.
        assert "output_operand_alias" in call
    rows = f"tensor<2x{DST_ROWS}xi32>, tensor<{DST_ROWS}x2x3xbf16>, tensor<{DST_ROWS}x3xbf16>"
    assert f"-> ({rows})" in calls["magi_jax_group_cast"]
    sums = f"tensor<5x{SRC_ROWS}xi32>, tensor<{SRC_ROWS}x2x3xf32>, tensor<{SRC_ROWS}x3xf32>"
    assert f"-> ({sums})" in calls["magi_jax_group_reduce_sum"]
    assert "pool = 7 : i32" in calls["magi_jax_group_cast"]
    assert "pool = 8 : i32" in calls["magi_jax_group_reduce_sum"]
    attributes = {"beside": 0, "cp_size": 4, "src_rows": SRC_ROWS, "self_rows": comm.self_rows}
    for name, value in attributes.items():
        assert all(f"{name} = {value} : i32" in call for call in calls.values())


def test_more_leaves_than_one_call_takes():
    transport = NativeCalls(1, 2, "cp", 4).transport()
    comm, x = structs()
    text = lower(
        lambda c, x: group_cast([x] * 19, c, "cp", transport=transport),
        abstract_mesh(cp=4),
        comm,
        x,
    )
    assert len(re.findall(r"custom_call @magi_jax_group_cast", text)) == 3


def test_refusals():
    comm, x = structs()

    def refused(error, match, transport, mesh, call=group_cast, axes=None):
        with pytest.raises(error, match=match):
            lower(lambda c, x: call(x, c, "cp", transport=transport), mesh, comm, x, axes=axes)

    here = abstract_mesh(cp=4)
    refused(ValueError, "set up for axis 'sp'", NativeCalls(1, 2, "sp", 4).transport(), here)
    two = NativeCalls(1, 2, "cp", 2).transport()
    refused(ValueError, "set up for 2 ranks, axis 'cp' has 4", two, here)
    refused(
        ValueError,
        r"\['dp'\] are not",
        NativeCalls(1, 2, "cp", 4).transport(),
        abstract_mesh(dp=2, cp=4),
        axes=["cp"],
    )
    mesh = jax.make_mesh((2,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="need NVIDIA GPUs, the mesh has devices of"):
        symmetric_memory(mesh, "cp")
    with pytest.raises(ValueError, match="placement must be one of"):
        symmetric_memory(mesh, "cp", placement="anywhere")
    with pytest.raises(ValueError, match="is no axis of the mesh"):
        symmetric_memory(mesh, "dp")


def test_the_portable_transport_serves_only_where_it_may(rng):
    mesh = jax.make_mesh((2,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:2])
    with symmetric_memory(mesh, "cp", allow_portable=True) as memory:
        assert memory.transport.name == "portable"
        assert "portable (padded all_to_all), since they need NVIDIA GPUs" in memory.describe()
        assert memory.failure() is None


def test_ranks_exchange_along_the_axis_alone():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), (AxisType.Auto,) * 3)
    seats = seats_of(mesh, "cp")
    assert {seat.device for seat in seats} == set(mesh.devices.flat)
    for seat in seats:
        ((dp, cp, tp),) = np.argwhere(mesh.devices == seat.device)
        assert seat.rank == cp
        assert seat.group == tuple(mesh.devices[dp, :, tp])


def test_room_for_staged_operands():
    spec = CommSpec(cp_size=2, src_rows=100, dst_rows=60, pair_rows=60, self_rows=0, pieces=8)
    assert staging_bytes([spec], 10) == 100 * 10 + 8 * 256
    assert staging_bytes([spec], 10, 20) == 60 * 20 + 8 * 256
