"""Order of communication and computation, told to XLA.

XLA may run an independent collective whenever it likes, which is usually too late. `barrier` makes
a stage's attention wait for its keys *and* for the stage before, so that the transfer has that
stage to hide behind; `after` keeps a transfer from starting earlier than one stage ahead, which
would hold its buffer.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on


def barrier(*values: Any) -> tuple:
    """The same values, none of which is there before all of them are."""
    return jax.lax.optimization_barrier(values)


def after(value: Any, *earlier: Any) -> Any:
    """``value``, there only once ``earlier`` is."""
    return jax.lax.optimization_barrier((value, earlier))[0]


def on_communication_stream(fn: Callable) -> Callable:
    """Lets ``fn``, whose work is custom calls for GPUs, run beside computation.

    XLA puts its own collectives on such a stream by itself. Calls on it run in the order of the
    program.
    """
    # jax 0.10 has this form under another name.
    annotate: Callable = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return annotate(
        fn,
        compute_type="gpu_stream:collective",
        out_memory_spaces=jax.memory.Space.Device,
    )
