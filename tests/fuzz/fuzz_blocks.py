"""One fuzz case of tables that are built on the device from chosen blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_single import compute

from magi_jax import block_sparse_table
from magi_jax.testing.hostile_values import Answer, check_answer, hostile_values

# Indices that choose nothing, beside and far from those that do.
NOTHING = (-(2**31), -129, -2, -1, 2**31 - 1, 2**30, 10**6)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What cases share. ``chosen`` is the number of indices of a query block, None for a bool array."""

    q_len: int
    k_len: int
    block: tuple[int, int]
    chosen: int | None
    causal: bool = False
    tile_size: int = 128
    heads: tuple[int, int, int, int] = (2, 1, 8, 8)

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        return -(-self.q_len // self.block[0]), -(-self.k_len // self.block[1])


BLOCKS = {
    "blocks_index": Blocks(263, 263, (32, 16), 5),
    "blocks_bool_causal": Blocks(199, 211, (17, 23), None, causal=True),
    "blocks_index_causal": Blocks(151, 151, (1, 40), 9, causal=True, tile_size=50),
    "blocks_wider_than_all": Blocks(61, 300, (100, 301), 2),
    "blocks_of_one": Blocks(37, 41, (1, 1), None, tile_size=16),
    "blocks_across_tiles": Blocks(300, 290, (192, 129), 1),
}


class BlockTables:
    """Runs cases of one grid of blocks: draws the choice, and builds the table in a program."""

    def __init__(self, name: str, implementations: tuple[str, ...]):
        self.name, self.setup, self.implementations = name, BLOCKS[name], implementations
        setup = self.setup
        self.build = jax.jit(
            functools.partial(
                block_sparse_table,
                block_size=setup.block,
                q_len=setup.q_len,
                k_len=setup.k_len,
                causal=setup.causal,
                tile_size=setup.tile_size,
            )
        )

    def run(self, seed: int) -> tuple[str, str]:
        """Runs a case; returns its family and kind.

        Raises:
            AssertionError: an implementation is wrong; it says which and where.
        """
        setup = self.setup
        rng = np.random.default_rng([seed, *self.name.encode()])
        blocks, visible = self._choice(rng)
        dense = visible.repeat(setup.block[0], 0).repeat(setup.block[1], 1)
        dense = dense[: setup.q_len, : setup.k_len]
        if setup.causal:
            dense = dense & (np.arange(setup.k_len) <= np.arange(setup.q_len)[:, None])
        values = hostile_values(rng, dense, setup.heads, np.float32)
        table = self.build(blocks)
        for implementation in self.implementations:
            answer = compute(*values.operands, None, table, implementation=implementation, cap=None)
            answer = Answer(*(None if x is None else np.asarray(x) for x in answer))
            try:
                check_answer(answer, values, dense, "float32")
            except AssertionError as error:
                raise AssertionError(f"{implementation}, {values.kind}: {error}") from error
        return "blocks", values.kind

    def _choice(self, rng: np.random.Generator) -> tuple[jax.Array, np.ndarray]:
        """What is handed over, and the blocks that are visible ``[QB, KB]`` by definition."""
        rows, columns = self.setup.grid
        if self.setup.chosen is None:
            visible = rng.random((rows, columns)) < rng.choice([0.0, 0.1, 0.5, 0.95, 1.0])
            return jnp.asarray(visible), visible
        blocks = rng.integers(0, columns, (rows, self.setup.chosen))
        idle = rng.random(blocks.shape) < rng.choice([0.0, 0.3, 1.0])
        blocks = np.where(idle, rng.choice([*NOTHING, columns], blocks.shape), blocks)
        visible = np.zeros((rows, columns), bool)
        for row, chosen in enumerate(blocks.tolist()):
            for column in chosen:
                if 0 <= column < columns:
                    visible[row, column] = True
        return jnp.asarray(blocks, jnp.int32), visible
