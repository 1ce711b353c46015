"""One fuzz case of results in parts: two calls, the second of which adds to what the first gave."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_single import FRAMES, GPU_FRAMES, SingleDevice

from magi_jax.masks import AttnMask
from magi_jax.ops import BackwardOperands, get_implementation
from magi_jax.plan.slice_table import build_table, slice_table
from magi_jax.testing.hostile_values import Answer, check_answer

# How the parts are cut.
SLICES, TILES = "slices", "tiles of queries"


@dataclasses.dataclass(frozen=True)
class Parts:
    """What cases share: a frame of `fuzz_single`, the cut, and whether results are float32."""

    frame: str
    cut: str
    in_float32: bool


PARTS = {
    "parts_merged": Parts("square", SLICES, True),
    "parts_of_tiles": Parts("tiles", SLICES, True),
    "parts_late": Parts("half", TILES, False),
}
GPU_PARTS = {
    "gpu_parts_merged": Parts("gpu_square", SLICES, True),
    "gpu_parts_late": Parts("gpu_tall", TILES, False),
    "gpu_parts_late_wide": Parts("gpu_wide", TILES, False),
}


@functools.partial(jax.jit, static_argnames=("implementation", "parts", "cap"))
def compute(tensors, dlse, tables, *, implementation, parts: Parts, cap: float):
    """An `Answer` of an implementation; the second table adds to the results of the first."""
    q, k, v, dout = tensors
    chosen = get_implementation(implementation)
    options = {"scale": q.shape[-1] ** -0.5, "logits_soft_cap": cap}
    out_dtype = jnp.float32 if parts.in_float32 else q.dtype
    partial = chosen.forward(q, k, v, tables[0], out_dtype=out_dtype, **options)
    out, lse = chosen.forward(q, k, v, tables[1], accumulate=partial, **options)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    operands = BackwardOperands(dout, q, k, v, lse, delta)
    dq, keys = None, []
    for table in tables:
        dq, *dkv = chosen.backward(operands, table, accumulate=dq, dkv_dtype=jnp.float32, **options)
        keys.append(dkv)
    return Answer(out, lse, dq, *map(jnp.add, *keys), None)


class InParts:
    """Runs cases of one cut on the given implementations."""

    def __init__(self, name: str, implementations: tuple[str, ...]):
        self.name, self.parts = name, (PARTS | GPU_PARTS)[name]
        self.single = SingleDevice(self.parts.frame, implementations)
        self.frame = dataclasses.replace((FRAMES | GPU_FRAMES)[self.parts.frame], num_sinks=0)
        self.implementations = implementations
        self.spec = None

    def run(self, seed: int) -> tuple[str, str]:
        """Runs a case; returns its family and kind.

        Raises:
            AssertionError: an implementation is wrong; it says which and where.
        """
        hostile, values, _ = self.single.draw(seed)
        tables = self._tables(np.random.default_rng([seed, *self.name.encode()]), hostile.mask)
        dtype, cap = self.frame.dtype, self.frame.cap
        *tensors, dlse = values.operands
        tensors = [jnp.asarray(x, dtype) for x in tensors]
        for implementation in self.implementations:
            answer = compute(
                tensors, dlse, tables,
                implementation=implementation, parts=self.parts, cap=cap or 0.0,
            )  # fmt: skip
            answer = Answer(*(None if x is None else np.asarray(x, np.float32) for x in answer))
            try:
                check_answer(answer, values, hostile.dense, dtype, logits_soft_cap=cap)
            except AssertionError as error:
                what = f"{implementation}, {hostile.family}, {values.kind}"
                raise AssertionError(f"{what}: {error}") from error
        return hostile.family, values.kind

    def _tables(self, rng: np.random.Generator, mask: AttnMask):
        """Tables of two masks without a common cell; of one size, which grows when a mask needs it."""
        size = self.frame.tile_size
        if self.parts.cut == SLICES:
            second = rng.random(mask.num_slices) < rng.choice([0.0, 0.3, 0.7, 1.0])
            masks = [
                AttnMask(mask.slices[chosen], mask.q_len, mask.k_len, disjoint=True)
                for chosen in (~second, second)
            ]
        else:
            masks = _by_tiles(rng, mask, size)
        part = [np.zeros(each.num_slices, np.int64) for each in masks]
        needed = [
            build_table(each.slices, none, 1, mask.q_len, mask.k_len, size).spec
            for each, none in zip(masks, part, strict=True)
        ]
        common = needed[0].union(*needed[1:]).rounded()
        self.spec = common if self.spec is None else self.spec.union(common)
        return [slice_table(each, tile_size=size, spec=self.spec) for each in masks]


def _by_tiles(rng: np.random.Generator, mask: AttnMask, size: int) -> list[AttnMask]:
    """Some tiles of queries with all that they see, and the others."""
    tiles = range(0, mask.q_len, size)
    late = rng.random(len(tiles)) < rng.choice([0.0, 0.5, 1.0])
    kept = []
    for wanted in (False, True):
        rows = [(0, 0, 0, 0, 0, 0)]
        for begin, is_late in zip(tiles, late, strict=True):
            if is_late == wanted:
                end = min(begin + size, mask.q_len)
                part = mask.crop((begin, end), (0, mask.k_len))
                rows += part.shift(begin, 0, mask.q_len, mask.k_len).slices.tolist()
        kept.append(AttnMask(np.array(rows, np.int64), mask.q_len, mask.k_len, disjoint=True))
    return kept
