"""Attention and tokens across the ranks of a mesh axis."""

from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.parallel.options import DistOptions
from magi_jax.parallel.tokens import dispatch, positions, roll, undispatch

__all__ = ["DistOptions", "dispatch", "dist_attention", "positions", "roll", "undispatch"]
