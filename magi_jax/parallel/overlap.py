"""Order of communication and computation, told to XLA.

XLA may run an independent collective whenever it likes, which is usually too late. `barrier` makes
a stage's attention wait for its keys *and* for the stage before, so that the transfer has that
stage to hide behind; `after` keeps a transfer from starting earlier than one stage ahead, which
would hold its buffer. Native transports start a call and finish it; in between it runs on a stream
of its own. `behind` lets the attention in between start after the call has, since a kernel that
fills the device would leave it no SM.
"""

from typing import Any

import jax

from magi_jax.comm import InFlight


def barrier(*values: Any) -> tuple:
    """The same values, none of which is there before all of them are."""
    return jax.lax.optimization_barrier(values)


def after(value: Any, *earlier: Any) -> Any:
    """``value``, there only once ``earlier`` is."""
    return jax.lax.optimization_barrier((value, earlier))[0]


def behind(value: Any, in_flight: InFlight | None) -> Any:
    """``value``, there only once a call that runs beside computation has been started."""
    if in_flight is None or not in_flight.parts:
        return value
    return after(value, [part.map for part in in_flight.parts])
