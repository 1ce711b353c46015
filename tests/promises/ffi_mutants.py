"""Custom calls as the package makes them, and the same with something about them made wrong."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import masks, slice_table
from magi_jax.ops import BackwardOperands, ffi, get_implementation

# Around every edge that an int32 entry of a table can be compared with.
HOSTILE_INTEGERS = (
    *(-(2**31), -(2**31) + 1, -(2**30), -129, -128, -2, -1, 0, 1, 2),
    *(16, 95, 96, 97, 127, 128, 129, 255, 256, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1),
)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int8", "uint32", "bool")
ATTRIBUTES = {
    "scale": (np.nan, np.inf, 0.0, -1.0, 3e38),
    "logits_soft_cap": (np.nan, np.inf, -1.0, 1e-38),
    "tile_size": (-(2**31), -1, 0, 1, 127, 129, 2**30, 2**31 - 1),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A custom call: everything that its handler gets to see."""

    target: str
    operands: tuple[np.ndarray, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]

    def run(self) -> list[np.ndarray]:
        """Makes the call.

        Raises:
            ValueError, jax.errors.JaxRuntimeError: the handler refuses it.
        """
        attributes = tuple(sorted(self.attributes.items()))
        results = _compiled(self.target, self.results, attributes)(*self.operands)
        return [np.asarray(x) for x in results]


@functools.lru_cache(maxsize=64)
def _compiled(target, results, attributes):
    return jax.jit(
        lambda *operands: jax.ffi.ffi_call(target, results)(*operands, **dict(attributes))
    )


def package_calls(monkeypatch, q_len: int = 259, k_len: int = 301) -> dict[str, Call]:
    """Both directions on the CPU, plain and accumulating, as the package itself calls them."""
    ffi.load()
    recorded: dict[str, Call] = {}

    def record(target, results, **_):
        def call(*operands, **attributes):
            arrays = tuple(np.asarray(x) for x in operands)
            types = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results)
            recorded[target.removesuffix(f"_v{ffi.INTERFACE}")] = Call(
                target, arrays, types, attributes
            )
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        return call

    rng = np.random.default_rng(0)
    shapes = ((q_len, 4, 8), (k_len, 2, 8), (k_len, 2, 6), (q_len, 4, 6))
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    rows = jnp.zeros((q_len, 4), jnp.float32)
    lengths = [90, 100, q_len - 190]
    mask = masks.varlen(lengths, k_lengths=[90, 100, k_len - 190], causal=True)
    table, cpu = slice_table(mask), get_implementation("cpu")
    options = {"scale": 0.3, "logits_soft_cap": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", record)
        cpu.forward(q, k, v, table, **options)
        cpu.forward(q, k, v, table, accumulate=(dout * 0, rows), **options)
        operands = BackwardOperands(dout, q, k, v, rows, rows)
        cpu.backward(operands, table, **options)
        cpu.backward(operands, table, accumulate=q * 0, **options)
    return recorded


def with_hostile_integers(rng: np.random.Generator, call: Call) -> Call:
    """Some entries of the tables become other integers."""
    operands = [x.copy() for x in call.operands]
    tables = [x for x in operands if x.dtype == np.int32]
    for _ in range(int(rng.integers(1, 4))):
        table = tables[rng.integers(len(tables))]
        value = rng.choice(HOSTILE_INTEGERS)
        if rng.random() < 0.3:
            value = np.clip(table.flat[rng.integers(table.size)] + rng.integers(-2, 3), -5, 5)
        table.flat[rng.integers(table.size)] = value
    return dataclasses.replace(call, operands=tuple(operands))


def with_another_shape(rng: np.random.Generator, call: Call) -> Call:
    """An operand or a result gets another rank or extent."""
    index = int(rng.integers(len(call.operands) + len(call.results)))
    if index < len(call.operands):
        operands = list(call.operands)
        shape = _other_shape(rng, operands[index].shape)
        operands[index] = (
            np.resize(operands[index], shape)
            if np.prod(shape)
            else np.zeros(shape, operands[index].dtype)
        )
        return dataclasses.replace(call, operands=tuple(operands))
    index -= len(call.operands)
    results = list(call.results)
    shape = _other_shape(rng, results[index].shape)
    results[index] = jax.ShapeDtypeStruct(shape, results[index].dtype)
    return dataclasses.replace(call, results=tuple(results))


def _other_shape(rng, shape):
    axis, draw = int(rng.integers(len(shape))), rng.random()
    if draw < 0.2:
        return (*shape[:axis], *shape[axis + 1 :])
    if draw < 0.4:
        return (*shape[:axis], 1, *shape[axis:])
    extent = int(rng.choice([0, 1, 3, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]]))
    return (*shape[:axis], max(extent, 0), *shape[axis + 1 :])


def with_another_dtype(rng: np.random.Generator, call: Call) -> Call:
    """An operand or a result gets another dtype."""
    index, dtype = (
        int(rng.integers(len(call.operands) + len(call.results))),
        str(rng.choice(DTYPES)),
    )
    if index < len(call.operands):
        operands = list(call.operands)
        operands[index] = np.zeros(operands[index].shape, jnp.dtype(dtype))
        return dataclasses.replace(call, operands=tuple(operands))
    results = list(call.results)
    index -= len(call.operands)
    results[index] = jax.ShapeDtypeStruct(results[index].shape, jnp.dtype(dtype))
    return dataclasses.replace(call, results=tuple(results))


def with_another_attribute(rng: np.random.Generator, call: Call) -> Call:
    """An attribute gets another value, or is missing."""
    name = str(rng.choice(sorted(ATTRIBUTES)))
    attributes = dict(call.attributes)
    kind = type(attributes.pop(name))
    if rng.random() < 0.9:
        attributes[name] = kind(rng.choice(ATTRIBUTES[name]))
    return dataclasses.replace(call, attributes=attributes)


def with_another_count(rng: np.random.Generator, call: Call) -> Call:
    """An operand or a result too few or too many."""
    draw = int(rng.integers(4))
    if draw == 0:
        return dataclasses.replace(call, operands=call.operands[:-1])
    if draw == 1:
        return dataclasses.replace(call, operands=(*call.operands, call.operands[0]))
    if draw == 2:
        return dataclasses.replace(call, results=call.results[:-1])
    return dataclasses.replace(call, results=(*call.results, call.results[0]))


STRUCTURAL_MUTANTS = (
    with_another_shape,
    with_another_dtype,
    with_another_attribute,
    with_another_count,
)
