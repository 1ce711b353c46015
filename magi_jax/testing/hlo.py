"""What a compiled program communicates and holds, read off its HLO text.

    compiled = jax.jit(step).lower(*args).compile()
    hlo.assert_no_all_gather(compiled)
    hlo.collective_bytes(compiled, "all-to-all")

Counts are of the text: a collective in the body of a loop counts once. Shapes are those of one
device.
"""

import math
import re
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

# HLO's names of dtypes that NumPy spells otherwise; the rest follow the pattern letter and bits.
_DTYPE_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_TENSOR = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")


class Tensor(NamedTuple):
    """Type of an array in HLO."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size, with dtypes of less than a byte rounded up as a whole."""
        return -(-self.elements * (_bits(self.dtype) or 0) // 8)


class Collective(NamedTuple):
    """A collective instruction and the arrays that it gives on one device."""

    op: str
    name: str
    results: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the results."""
        return sum(tensor.num_bytes for tensor in self.results)


def collectives(program: Any, op: str | None = None) -> list[Collective]:
    """Collectives of a program, in the order of its text.

    Args:
        program: HLO text, or anything with ``as_text()``, such as a compiled jitted function.
        op: one of `COLLECTIVES`; None for all.

    Raises:
        ValueError: there is no such collective.
    """
    if op is not None and op not in COLLECTIVES:
        raise ValueError(f"op must be one of {COLLECTIVES}, got {op!r}")
    found = []
    for line in _text(program).splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        result, rest = _split_type(instruction[2])
        kind = re.match(r"([a-z\-]+)\(", rest)
        if kind is None:
            continue
        started = kind[1].removesuffix("-start")
        if started in COLLECTIVES and op in (None, started):
            tensors = _results(kind[1], result)
            found.append(Collective(started, instruction[1], tensors))
    return found


def collective_bytes(program: Any, op: str | None = None) -> int:
    """Bytes that the collectives of a program give on each device; see `collectives`."""
    return sum(collective.num_bytes for collective in collectives(program, op))


def tensors_of_at_least(program: Any, elements: int) -> list[Tensor]:
    """Distinct array types of a program with so many elements, largest first.

    Exact attention that was compiled well holds none of ``T * S`` elements. (Choose lengths for
    which ``T * S`` exceeds everything legitimate.)
    """
    tensors = set(_tensors(_text(program)))
    large = [tensor for tensor in tensors if tensor.elements >= elements]
    return sorted(large, key=lambda tensor: (-tensor.elements, tensor))


def assert_no_all_gather(program: Any) -> None:
    """Raises AssertionError naming the all-gathers of a program: a sharded operand was made
    whole.
    """
    gathers = collectives(program, "all-gather")
    if gathers:
        raise AssertionError(f"the program gathers {[(g.name, g.results) for g in gathers]}")


def _text(program: Any) -> str:
    return program if isinstance(program, str) else program.as_text()


def _split_type(text: str) -> tuple[str, str]:
    """Splits ``type op(...)`` after the type, which may be a nested tuple."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _results(op: str, result: str) -> tuple[Tensor, ...]:
    """Arrays that an instruction gives; the type of some asynchronous starts lists operands
    first.
    """
    tensors = _tensors(result)
    if op in ("all-gather-start", "collective-permute-start"):
        tensors = tuple(tensor for tensor in tensors if tensor != Tensor("u32", ()))
        return tensors[len(tensors) // 2 :]
    return tensors


def _tensors(text: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _TENSOR.findall(text)
        if _bits(dtype) is not None
    )


def _bits(dtype: str) -> int | None:
    """Bits of an element; None for a word that is no dtype."""
    if dtype in _DTYPE_BITS:
        return _DTYPE_BITS[dtype]
    if dtype.startswith("f8") or dtype.startswith("f4"):
        return int(dtype[1])
    number = re.fullmatch(r"[sufc](\d+)", dtype)
    return int(number[1]) if number else None
