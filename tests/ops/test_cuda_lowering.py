"""Programs for CUDA, lowered on a machine without a GPU: the custom calls and their operands."""

import re

import jax
import jax.numpy as jnp
import pytest

from magi_jax import flex_flash_attention, masks
from magi_jax.ops import cuda, ffi
from magi_jax.plan import slice_table

HAS_CUDA = ffi.build_info()["cuda"]
# The kernels that every build with CUDA has, the reduced one of continuous integration too.
DIMS = [("bfloat16", 128), ("float16", 64)]


def operands(dtype="bfloat16", head_dim=128, rows=300):
    shapes = [(rows, 4, head_dim), (rows, 2, head_dim), (rows, 2, head_dim)]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def lowered(f, *args):
    """Custom calls of a program: target to (operand and result types, attributes)."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.finditer(rf"custom_call @(magi_jax\w+)_v{ffi.INTERFACE}\((.*)", text)
    return {found[1]: found[2] for found in calls}


def types(call):
    """Operand types and result types of a call, as MLIR writes them."""
    signature = call[call.rindex(" : (") + 3 :]
    before, after = signature.split(" -> ")
    return re.findall(r"tensor<([^>]*)>", before), re.findall(r"tensor<([^>]*)>", after)


if HAS_CUDA:

    @pytest.mark.parametrize(("dtype", "head_dim"), DIMS)
    def test_forward_and_backward_calls(dtype, head_dim):
        table = slice_table(masks.varlen([100, 200], causal=True))

        def loss(q, k, v, table):
            out = flex_flash_attention(q, k, v, table, implementation="sm80", logits_soft_cap=9.0)
            return out.astype(jnp.float32).sum()

        q, k, v = operands(dtype, head_dim)
        calls = lowered(jax.grad(loss, (0, 1, 2)), q, k, v, table)
        assert sorted(calls) == ["magi_jax_ffa_backward_sm80", "magi_jax_ffa_forward_sm80"]
        short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        q_type, kv_type = f"300x4x{head_dim}x{short}", f"300x2x{head_dim}x{short}"
        tensors = [q_type, kv_type, kv_type]
        walks = [["x".join(map(str, leaf.shape)) + "xi32" for leaf in jax.tree.leaves(walk)]
                 for walk in (table.by_query, table.by_key)]  # fmt: skip
        slices = f"{len(table.slices)}x6xi32"
        results = [q_type, "300x4xf32", "0x4xf32"]
        assert types(calls["magi_jax_ffa_forward_sm80"]) == ([*tensors, slices, *walks[0]], results)
        rows = ["300x4xf32", "300x4xf32"]
        assert types(calls["magi_jax_ffa_backward_sm80"]) == (
            [q_type, *tensors, *rows, slices, *walks[0], *walks[1]],
            [f"300x4x{head_dim}xf32", kv_type, kv_type],
        )
        for call in calls.values():
            assert "logits_soft_cap = 9.0" in call
            assert "tile_size = 128 : i32" in call

    @pytest.mark.parametrize(
        ("head_dim", "tile_size", "implementation", "path"),
        [
            (128, 128, "sm90", "sm90"),
            (256, 128, "sm90", "sm90"),
            (128, 64, "sm90", "sm80"),
            (128, 128, "sm90_ordered", "sm90_ordered"),
            (256, 128, "sm90_ordered", "sm90_ordered"),
            (128, 64, "sm90_ordered", "sm80"),
        ],
    )
    def test_hopper_backward_brings_its_scratch(head_dim, tile_size, implementation, path):
        def padded(words):
            return -(-words // 32) * 32

        def loss(q, k, v, table):
            options = {"implementation": implementation, "logits_soft_cap": 9.0}
            out = flex_flash_attention(q, k, v, table, **options)
            return out.astype(jnp.float32).sum()

        table = slice_table(masks.causal(300), tile_size=tile_size)
        calls = lowered(jax.grad(loss, (0, 1, 2)), *operands("bfloat16", head_dim), table)
        assert sorted(calls) == [f"magi_jax_ffa_backward_{path}", "magi_jax_ffa_forward_sm90"]
        tiles = 3 if head_dim == 128 else 6
        # Words: a counter, lse and delta of 4 heads and 448 rows, a flag for 32 of these, four words for an
        # item of a tile and 2 heads, one for each tile, and sums of dK and dV; each padded to 128 bytes.
        words = 32 + 2 * 4 * 448 + 64 + padded(4 * 2 * tiles) + 32 + 2 * 300 * 2 * head_dim
        # dQ in float32, until it is rounded.
        words += 300 * 4 * head_dim
        # The ordered path: two words of progress of a tile for 4 heads, turns for 2 kv heads, both of two
        # warpgroups; the tiles' order and their first queries.
        words += (padded(2 * 4 * 2 * tiles) + 3 * 32) * (path == "sm90_ordered")
        scratch = [] if path == "sm80" else [f"{words}xi32"]
        _, results = types(calls[f"magi_jax_ffa_backward_{path}"])
        kv_type = f"300x2x{head_dim}xbf16"
        dq_dtype = "f32" if path == "sm80" else "bf16"
        assert results == [f"300x4x{head_dim}x{dq_dtype}", kv_type, kv_type, *scratch]

    def test_accumulate_is_in_place():
        table = slice_table(masks.causal(300))
        out, lse = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((300, 4, 128), (300, 4)))

        def merge(q, k, v, table, out, lse):
            options = {"scale": 1.0, "logits_soft_cap": 0.0}
            return cuda.SM80.forward(q, k, v, table, accumulate=(out, lse), **options)

        calls = lowered(merge, *operands(), table, out, lse)
        call = calls["magi_jax_ffa_forward_accumulate_sm80"]
        for result, operand in ((0, 8), (1, 9)):
            assert f"output_tuple_indices = [{result}], operand_index = {operand}" in call

    def test_one_program_serves_every_mask():
        def attend(q, k, v, table):
            return flex_flash_attention(q, k, v, table, implementation="sm80")

        q, k, v = operands()
        texts = {
            jax.jit(attend).trace(q, k, v, table).lower(lowering_platforms=("cuda",)).as_text()
            for table in map(slice_table, (masks.causal(300), masks.full(300)))
        }
        assert len(texts) == 1

    def test_describe_shows_kernels_and_tiles():
        text = cuda.SM80.describe(*operands(), slice_table(masks.causal(300)))
        assert re.fullmatch(
            r"sm80 forward, bfloat16 128/128: 128x64 tile, .*\n"
            r"sm80 backward, bfloat16 128/128: dK and dV 128x32 tile, .*",
            text,
        )

    @pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 128), ("bfloat16", 40)])
    def test_unsupported_operands_are_refused_with_what_there_is(dtype, head_dim):
        q, k, v = operands(dtype, head_dim)
        with pytest.raises(
            NotImplementedError,
            match=rf"{dtype} {head_dim}/{head_dim} .*this build has .*bfloat16 128/128",
        ):
            cuda.SM80.describe(q, k, v, slice_table(masks.causal(300)))

else:

    def test_a_build_without_cuda_says_so():
        with pytest.raises(
            NotImplementedError, match=r"no CUDA kernels: .* no nvcc was found, or MAGI_JAX_CUDA"
        ):
            cuda.SM80.describe(*operands(), slice_table(masks.causal(300)))


@pytest.mark.parametrize(
    ("capability", "paths"),
    [((8, 0), ("sm80",)), ((8, 9), ("sm80",)), ((9, 0), ("sm90", "sm80")), ((12, 0), ("sm80",))],
)
def test_capability_chooses_paths(capability, paths):
    chosen = cuda.for_capability(capability)
    assert (chosen.forward_paths, chosen.backward_paths) == (paths, paths)
    assert chosen.is_deterministic == ("sm90" not in paths)
    ordered = cuda.for_capability(capability, deterministic=True)
    assert ordered.is_deterministic
    assert ordered.backward_paths[0] == {"sm90": "sm90_ordered"}.get(paths[0], paths[0])
    assert hash(chosen) == hash(cuda.for_capability(capability))


def test_old_devices_are_refused():
    with pytest.raises(NotImplementedError, match=r"sm80 needs .* 8\.0 or newer, .* has 7\.5"):
        cuda.for_capability((7, 5))
    assert cuda.refusal("sm90", (10, 0)) == (
        "sm90 needs compute capability 9.0, the device has 10.0"
    )
