"""Each wrong input gives one error that names the values."""

import jax
import jax.numpy as jnp
import numpy as np
import ops_problem as problem
import pytest

from magi_jax import masks
from magi_jax.ops import BackwardOperands, ffi, flex_flash_attention, get_implementation
from magi_jax.plan import slice_table

MASK = masks.causal(8)


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def attend(q=None, k=None, v=None, mask=MASK, **options):
    q, k, v = (zeros(8, 2, 4) if x is None else x for x in (q, k, v))
    return flex_flash_attention(q, k, v, mask, **options)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"q": zeros(8, 2)}, r"expected q \[\*B, T, N, H\].*\(8, 2\)"),
        ({"q": zeros(8, 3, 4)}, "q has 3 heads, which is not a multiple of the 2 of k"),
        ({"q": zeros(8, 2, 5)}, "one head dim; got 5 and 4"),
        ({"v": zeros(8, 1, 4)}, "agree in length and heads"),
        ({"k": zeros(9, 2, 4), "v": zeros(9, 2, 4)}, "8 queries and 8 keys.*k has 9"),
        ({"q": zeros(7, 2, 4)}, "8 queries and 8 keys, but q has 7"),
        (dict.fromkeys("qkv", zeros(2, 8, 4)), r"q has 2 rows and k has 2; rows come before heads"),
        ({"q": zeros(8, 2, 4, dtype="bfloat16")}, "one dtype; got bfloat16, float32"),
        ({"q": zeros(2, 8, 2, 4)}, "same leading axes"),
        ({"v": zeros(8, 2, 0)}, "head dims must be positive"),
        ({"scale": float("nan")}, "scale must be finite; got nan"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be positive, or None; got -1.0"),
        ({"sinks": zeros(3)}, r"N = 2 heads; got sinks.shape=\(3,\)"),
        ({"sinks": zeros(2, dtype="int32")}, "sinks must be floating; got int32"),
        ({"implementation": "gpu"}, "implementation must be one of cpu, reference.*'gpu'"),
    ],
)
def test_operands(operands, message):
    with pytest.raises(ValueError, match=message):
        attend(**operands)


def test_integers_are_no_operands():
    x = zeros(8, 2, 4, dtype="int32")
    with pytest.raises(ValueError, match="q must be one of float32, bfloat16, float16; got int32"):
        attend(x, x, x)


def test_dense_arrays_are_no_masks():
    with pytest.raises(TypeError, match="AttnMask or a SliceTable, got ndarray"):
        attend(mask=np.ones((8, 8), bool))


def test_tables_of_several_ranks_are_refused():
    table = jax.tree.map(lambda leaf: leaf[None], slice_table(MASK))
    with pytest.raises(ValueError, match="that of one rank"):
        attend(mask=table)


def test_a_table_for_each_sequence_is_refused_with_the_way_to_do_it():
    x = zeros(2, 8, 2, 4)
    tables = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), slice_table(MASK))
    with pytest.raises(ValueError, match=r"jax\.vmap the call over arrays and tables"):
        attend(x, x, x, mask=tables)
    assert jax.vmap(attend)(x, x, x, tables).shape == x.shape


def test_reference_stops_before_memory_does():
    size = 40_000
    x = jax.ShapeDtypeStruct((size, 1, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match="holds all 1600000000 logits"):
        jax.eval_shape(lambda x: attend(x, x, x, masks.causal(size), implementation="reference"), x)


def damaged(leaf, index, value, walk=None):
    """The table of a two-tile mask with one entry overwritten."""
    table = jax.tree.map(np.array, slice_table(masks.causal(problem.SIZE)))
    target = table.slices if walk is None else getattr(getattr(table, walk), leaf)
    target[index] = value
    return table


@pytest.mark.parametrize("walk", ["by_query", "by_key"])
@pytest.mark.parametrize(
    ("leaf", "index", "value", "message"),
    [
        ("ptr", -1, 10_000, "ptr goes from 0 to 10000"),
        ("ptr", 1, -5, "ptr falls from 0 to -5"),
        ("runs", (0, 1), 10_000, r"runs\[0\] of tile 0 .* must lie in \[0, 151\)"),
        ("runs", (0, 0), -1, r"runs\[0\] of tile 0 is \(-1, "),
        ("runs", (0, 3), 10_000, "full interval is outside"),
        ("runs", (0, 5), 10_000, "but there are 16 ids"),
        ("ids", 0, 16, r"ids\[0\] is 16, but there are 16 slices"),
        ("ids", 0, -1, r"ids\[0\] is -1"),
        ("order", 0, 2, r"order\[0\] is 2"),
        ("order", 0, 1, "each of 2 tiles once"),
    ],
)
def test_cpu_refuses_damaged_tables(walk, leaf, index, value, message, rng):
    table = damaged(leaf, index, value, walk)
    if (leaf, index, value) == ("order", 0, 1):
        getattr(table, walk).order[:] = 1
    x = zeros(problem.SIZE, 1, 4)

    def step(x, table):
        return jax.grad(lambda x: attend(x, x, x, table, implementation="cpu").sum())(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{walk}.*{message}"):
        jax.block_until_ready(jax.jit(step)(x, table))


@pytest.mark.parametrize(("column", "value"), [(0, -1), (1, 152), (3, 152), (4, -400), (5, 400)])
def test_cpu_refuses_damaged_slices(column, value):
    table = damaged("slices", (0, column), value)
    x = zeros(problem.SIZE, 1, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"slices\[0\] is .*151 queries"):
        jax.block_until_ready(attend(x, x, x, table, implementation="cpu"))


def test_backward_dtypes():
    kernel = get_implementation("cpu")
    x = zeros(8, 2, 4, dtype="bfloat16")
    table = slice_table(MASK)
    options = {"scale": 1.0, "logits_soft_cap": 0.0}
    with pytest.raises(ValueError, match="out_dtype must be float32 or the dtype of the operand"):
        kernel.forward(x, x, x, table, out_dtype=jnp.float16, **options)
    partial = (zeros(8, 2, 4), zeros(8, 2))
    with pytest.raises(ValueError, match="has its dtype, float32; got out_dtype"):
        kernel.forward(x, x, x, table, accumulate=partial, out_dtype=x.dtype, **options)
    with pytest.raises(ValueError, match="the dtype of q, bfloat16; got float16 and float32"):
        kernel.forward(x, x, x, table, accumulate=(x.astype("float16"), zeros(8, 2)), **options)
    with pytest.raises(ValueError, match=r"accumulate must be \(out \(8, 2, 4\)"):
        kernel.forward(x, x, x, table, accumulate=(zeros(8, 2, 5), zeros(8, 2)), **options)
    operands = BackwardOperands(x, x, x, x, zeros(8, 2), zeros(8, 2))
    grads = kernel.backward(operands, table, **options)
    assert [g.dtype.name for g in grads] == ["float32", "bfloat16", "bfloat16"]
    half = x.astype("float16")
    with pytest.raises(ValueError, match=r"dq \(8, 2, 4\) in float32 or bfloat16; got .* float16"):
        kernel.backward(operands, table, accumulate=half, **options)
    wide = kernel.backward(operands, table, dkv_dtype=jnp.float32, **options)
    assert [g.dtype.name for g in wide] == ["float32"] * 3
    narrow = kernel.backward(operands, table, dq_dtype=x.dtype, **options)
    assert [g.dtype.name for g in narrow] == ["bfloat16"] * 3
    with pytest.raises(ValueError, match="dq_dtype must be float32 or the dtype of the operand"):
        kernel.backward(operands, table, dq_dtype=jnp.float16, **options)
    for given, dtype in ((zeros(8, 2, 4), x.dtype), (x, jnp.float32)):
        with pytest.raises(ValueError, match=f"dtype of accumulate, {given.dtype}; got dq_dtype"):
            kernel.backward(operands, table, accumulate=given, dq_dtype=dtype, **options)


@pytest.mark.parametrize("built", [(0, 5), (1, 0), (0, 9)])
def test_library_for_a_newer_runtime_is_refused(built):
    with pytest.raises(ImportError, match=r"jaxlib 9\.9.*jaxlib 0\.10\.2 has API 0\.3"):
        ffi.check_ffi_api_version(built, (0, 3), built_jaxlib="9.9", running_jaxlib="0.10.2")


@pytest.mark.parametrize("built", [(0, 0), (0, 3)])
def test_library_for_an_older_runtime_is_taken(built):
    ffi.check_ffi_api_version(built, (0, 3), built_jaxlib="0.1", running_jaxlib="0.10.2")


def test_runtime_version_is_found():
    assert ffi.build_info()["ffi_api_version"] <= ffi.runtime_ffi_api_version()
