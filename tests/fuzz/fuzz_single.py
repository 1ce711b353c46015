"""One fuzz case on one device: a frame fixes what is compiled, a seed draws mask and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.ops import flex_flash_attention
from magi_jax.plan.part_specs import TableSpec
from magi_jax.plan.slice_table import build_table, slice_table
from magi_jax.testing.hostile_masks import HostileMask, hostile_mask
from magi_jax.testing.hostile_values import Answer, HostileValues, check_answer, hostile_values


@dataclasses.dataclass(frozen=True)
class Frame:
    """What cases share, so that they share a program too. ``heads`` is ``(N, K, H, Hv)``."""

    q_len: int
    k_len: int
    heads: tuple[int, int, int, int] = (4, 2, 16, 16)
    dtype: str = "float32"
    cap: float | None = None
    num_sinks: int = 0
    tile_size: int = 128
    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()


FRAMES = {
    "square": Frame(151, 151),
    "wide": Frame(61, 277, (2, 1, 8, 24), cap=3.0, num_sinks=1),
    "tall": Frame(263, 97, (3, 3, 17, 5)),
    "tiles": Frame(256, 256, (4, 1, 32, 16), "bfloat16"),
    "half": Frame(129, 127, (2, 2, 8, 8), "float16", num_sinks=2),
    "small_tiles": Frame(83, 89, (6, 2, 4, 4), cap=20.0, tile_size=16),
    "one_query": Frame(1, 131, (2, 2, 8, 8)),
    "one_key": Frame(131, 1, (2, 1, 8, 8), "bfloat16"),
    "one_walk": Frame(149, 139, (16, 16, 8, 8)),
    "thousands": Frame(
        2053,
        2053,
        (1, 1, 8, 8),
        families=("one_token_documents", "documents", "comb"),
        implementations=("cpu", "sm80", "sm90"),
    ),
}

# What the CUDA kernels take.
GPU_FRAMES = {
    "gpu_square": Frame(311, 311, (4, 2, 64, 64), "bfloat16"),
    "gpu_wide": Frame(131, 601, (2, 1, 128, 128), "bfloat16", cap=3.0, num_sinks=1),
    "gpu_tall": Frame(523, 97, (4, 1, 128, 128), "float16"),
    "gpu_tiles": Frame(512, 512, (8, 2, 128, 128), "bfloat16"),
    "gpu_thousands": Frame(
        2053,
        2053,
        (1, 1, 64, 64),
        "bfloat16",
        families=("one_token_documents", "documents", "comb"),
    ),
}


@functools.partial(jax.jit, static_argnames=("implementation", "cap"))
def compute(q, k, v, dout, dlse, sinks, table, *, implementation, cap):
    """An `Answer` of an implementation."""

    def attend(q, k, v, sinks):
        return flex_flash_attention(
            q,
            k,
            v,
            table,
            sinks=sinks,
            logits_soft_cap=cap,
            return_residual=True,
            implementation=implementation,
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v, sinks)
    return Answer(out, lse, *pull_back((dout, dlse)))


class SingleDevice:
    """Runs cases of one frame on the given implementations; its tables grow when a mask needs it."""

    def __init__(self, name: str, implementations: tuple[str, ...]):
        self.name = name
        self.frame = (FRAMES | GPU_FRAMES)[name]
        allowed = self.frame.implementations or implementations
        self.implementations = tuple(name for name in implementations if name in allowed)
        self.refusals: dict[str, str] = {}
        self.spec: TableSpec | None = None

    def draw(self, seed: int) -> tuple[HostileMask, HostileValues, np.ndarray | None]:
        """The mask, the values and the sinks of a seed."""
        frame = self.frame
        rng = np.random.default_rng([seed, *self.name.encode()])
        family = str(rng.choice(frame.families)) if frame.families else None
        mask = hostile_mask(rng, frame.q_len, frame.k_len, family)
        values = hostile_values(rng, mask.dense, frame.heads, jnp.dtype(frame.dtype))
        sinks = None
        if frame.num_sinks:
            sinks = rng.normal(size=(frame.num_sinks, frame.heads[0])).astype(np.float32)
        return mask, values, sinks

    def run(self, seed: int) -> tuple[str, str]:
        """Runs a case; returns its family and kind.

        Raises:
            AssertionError: an implementation is wrong; it says which and where.
        """
        hostile, values, sinks = self.draw(seed)
        table = self._table(hostile)
        dtype = self.frame.dtype
        *tensors, dlse = values.operands
        tensors = [jnp.asarray(x, dtype) for x in tensors]
        for implementation in self.implementations:
            try:
                answer = compute(
                    *tensors, dlse, sinks, table, implementation=implementation, cap=self.frame.cap
                )
            except NotImplementedError as error:
                self.refusals[implementation] = str(error)
                continue
            answer = Answer(*(None if x is None else np.asarray(x, np.float32) for x in answer))
            try:
                check_answer(
                    answer,
                    values,
                    hostile.dense,
                    dtype,
                    logits_soft_cap=self.frame.cap,
                    sinks=sinks,
                )
            except AssertionError as error:
                what = f"{implementation}, {hostile.family}, {values.kind}"
                raise AssertionError(f"{what}: {error}") from error
        return hostile.family, values.kind

    def _table(self, hostile: HostileMask):
        mask, size = hostile.mask, self.frame.tile_size
        part = np.zeros(mask.num_slices, np.int64)
        needed = build_table(mask.slices, part, 1, mask.q_len, mask.k_len, size).spec
        if self.spec is None:
            # Room for most masks to come; doubling keeps the number of programs small.
            self.spec = dataclasses.replace(
                needed.rounded(),
                slices=128,
                query_runs=128,
                query_ids=512,
                key_runs=128,
                key_ids=512,
            )
        if not self.spec.covers(needed):
            self.spec = _doubled(self.spec, needed)
        return slice_table(mask, tile_size=size, spec=self.spec)


def _doubled(spec: TableSpec, needed: TableSpec) -> TableSpec:
    grown = {}
    for name in ("slices", "query_runs", "query_ids", "key_runs", "key_ids"):
        size = getattr(spec, name)
        while size < getattr(needed, name):
            size *= 2
        grown[name] = size
    return dataclasses.replace(spec, **grown)
