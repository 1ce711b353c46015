"""Ways to lay work out that a config names: in stages, or with late queries."""

from magi_jax.plan.frame import Frame
from magi_jax.solver.overlap.choose_stages import Counts, Settled
from magi_jax.solver.overlap.late import LateWork, find_late, late_rows
from magi_jax.solver.work.find_work import Work
from magi_jax.solver.work.stages import Staged

# "auto", "late", or remote stages: how many in both directions, or what is settled of (forward, backward).
Overlap = int | str | tuple[Settled, Settled]
AUTO, LATE = "auto", "late"


def late_work(
    work: Work, frame: Frame, most: float, staged: Staged | None = None
) -> LateWork | None:
    """The work with late queries, where there may be any and they are at most a share ``most`` of the rows
    of a rank; ``staged`` are any stages of the work, where they are known.
    """
    if work.layout.cp_size == 1 or work.keys.layout is None:
        return None
    if work.travel is not None:
        return None
    staged = work.staged(1) if staged is None else staged
    rows = late_rows(staged, frame.cp_size, frame.tile_size, frame.local_len)
    if rows.held.max() > most * frame.local_len:
        return None
    return find_late(work, rows, frame.local_len)


def settled_counts(overlap: Overlap, work: Work) -> Counts:
    """Settled numbers of remote stages, forward and backward; 0 where nothing can be remote, or where nothing
    is and the number is open.
    """
    if work.layout.cp_size == 1 or work.keys.layout is None:
        return 0, 0
    if overlap == AUTO and not work.moves_keys:
        return 0, 0
    if isinstance(overlap, str):
        return None, None
    return overlap if isinstance(overlap, tuple) else (overlap, overlap)
