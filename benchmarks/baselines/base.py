"""What the strategies share: a mesh, a layout of tokens, tables, and local code."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from magi_jax.masks import AttnMask
from magi_jax.solver.dispatch import Layout


class Problem(NamedTuple):
    """A mask and the lengths of the documents that it keeps apart, ``[D]``; one where it keeps none."""

    mask: AttnMask
    lengths: np.ndarray


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """A way to share out attention. Hashable.

    Attributes:
        name: how it is called in results.
        axes: mesh axes in the order of ranks, (name, size).
    """

    name: str
    axes: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of all axes."""
        return int(np.prod([size for _, size in self.axes]))

    @abc.abstractmethod
    def layout(self, problem: Problem) -> Layout:
        """Which rank holds which tokens."""

    @abc.abstractmethod
    def tables(self, problem: Problem) -> Any:
        """What `attend` needs to know of the mask: a pytree with a leading axis of all ranks."""

    @abc.abstractmethod
    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """Attention of one rank's rows, inside a `shard_map` over all axes; ``[T, N, Hv]``."""

    def attention(self, devices: list) -> Callable:
        """The jitted ``(q, k, v, tables) -> out`` over sharded rows ``[ranks * T, N, H]``."""
        shape = tuple(size for _, size in self.axes)
        mesh = Mesh(np.array(devices[: self.num_ranks]).reshape(shape), [n for n, _ in self.axes])
        rows = PartitionSpec(tuple(name for name, _ in self.axes))

        def local(q, k, v, tables):
            return self.attend(q, k, v, jax.tree.map(lambda leaf: leaf[0], tables))

        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
        )
