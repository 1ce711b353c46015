"""Dispatch: which rank owns which tokens.

`problem` is what a strategy is asked; `regular` and `balanced` answer it, by the names in `strategies`;
`layout` is what becomes of an answer, and `bounds` what no answer can beat. `balanced` places `units`: it
improves what `starts` gives it by exchanges, in the compiled module or in its NumPy twin
(`numpy_placement`, `numpy_search`).
"""

from magi_jax.solver.dispatch.layout import Layout, make_layout
from magi_jax.solver.dispatch.problem import (
    Assignment,
    DispatchProblem,
    areas,
    chunk_areas,
    chunk_edges,
    cut_at,
)
from magi_jax.solver.dispatch.regular import contiguous, lpt, zigzag

__all__ = [
    "Assignment",
    "DispatchProblem",
    "Layout",
    "areas",
    "chunk_areas",
    "chunk_edges",
    "contiguous",
    "cut_at",
    "lpt",
    "make_layout",
    "zigzag",
]
