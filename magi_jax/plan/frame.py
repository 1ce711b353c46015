"""The identities of a plan: what is settled before anything is solved."""

from typing import NamedTuple

from magi_jax.masks import AttnMask
from magi_jax.plan.spec import PlanSpec

DOES_NOT_FIT = "the mask does not fit the given spec"


class Frame(NamedTuple):
    """The identities of a plan; names as in `PlanSpec`."""

    cp_size: int
    seq_len: int
    chunk_size: int
    local_len: int
    tile_size: int
    roll_shifts: tuple[int, ...]


def frame_of(spec: PlanSpec) -> Frame:
    """The identities of a spec."""
    return Frame(*(getattr(spec, name) for name in Frame._fields))


def require_frame(spec: PlanSpec, frame: Frame) -> None:
    """Raises ValueError unless a spec has the identities of a plan; the first that differs is
    named.
    """
    for name, value in frame._asdict().items():
        if getattr(spec, name) != value:
            raise ValueError(
                f"the spec is of another kind: its {name} is {getattr(spec, name)},"
                f" the plan's is {value}"
            )


def check_mask(mask: AttnMask, seq_len: int) -> None:
    """Raises ValueError unless a mask is square and fits into the sequence."""
    if mask.q_len != mask.k_len:
        raise ValueError(
            "make_plan is for self-attention, whose queries and keys are the same tokens; the mask has"
            f" q_len={mask.q_len} and k_len={mask.k_len} (for cross-attention plan the queries' own"
            " sequence and call plan.with_mask(mask, keys=...))"
        )
    if mask.q_len > seq_len:
        raise ValueError(f"the mask has {mask.q_len} tokens, the sequence only {seq_len}")


def check_cross_mask(mask: AttnMask, q_len: int, k_len: int) -> None:
    """Raises ValueError unless a mask fits into the sequences of queries and of keys."""
    if mask.q_len > q_len or mask.k_len > k_len:
        raise ValueError(
            f"the mask has {mask.q_len} queries and {mask.k_len} keys, the sequences have only"
            f" {q_len} and {k_len}"
        )


def does_not_fit(problem: str) -> ValueError:
    """The error of a mask whose plan or table is larger than the spec it was to be laid out in."""
    return ValueError(f"{DOES_NOT_FIT}: {problem}")
