"""`python -m magi_jax explain`: what planning makes of a mask that stands in a JSON file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magi_jax import masks
from magi_jax.masks import AttnMask, MaskType
from magi_jax.plan.report import PlanReport

# Builders that take numbers and lists alone, by name.
BUILDERS = (
    "block_causal",
    "causal",
    "chunked_causal",
    "empty",
    "from_cu_seqlens",
    "from_segment_ids",
    "full",
    "global_columns",
    "global_rows",
    "local",
    "prefix_lm",
    "shared_question",
    "uniform_block_causal",
    "varlen",
)
SLICE_KEYS = {"q_ranges", "k_ranges", "types", "q_len", "k_len"}

# Past these a report is worth a word.
MAX_IMBALANCE, MAX_PADDING, MIN_EFFICIENCY = 1.05, 0.05, 0.8


def load_mask(path: str | Path) -> AttnMask:
    """Reads a mask from a JSON file; see `parse_mask`."""
    try:
        return parse_mask(json.loads(Path(path).read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


FORMS = """A mask is described by a JSON object, in one of four forms:

- {"builder": "varlen", "lengths": [300, 700], "causal": true, "window": [255, 0]}: a builder of
  magi_jax.masks and its arguments;
- {"q_ranges": [[0, 4]], "k_ranges": [[0, 4]], "types": ["CAUSAL"], "q_len": 8}: slices, with names
  of types or bands [d_min, d_max], null = unbounded;
- {"union": [...]} and {"intersection": [...]} of such objects."""


def parse_mask(described: Any) -> AttnMask:
    """The mask that a JSON object describes, in one of the four `FORMS`.

    Raises:
        ValueError: the object has none of these forms, or what it describes is no mask.
    """
    if not isinstance(described, Mapping):
        raise ValueError(
            f"a mask is described by a JSON object, got {type(described).__name__}: {described!r}"
        )
    if "builder" in described:
        arguments = {name: value for name, value in described.items() if name != "builder"}
        if described["builder"] not in BUILDERS:
            raise ValueError(f"builder must be one of {BUILDERS}, got {described['builder']!r}")
        try:
            return getattr(masks, described["builder"])(**arguments)
        except TypeError as error:
            raise ValueError(f"masks.{described['builder']}: {error}") from error
    if len(described) == 1 and ("union" in described or "intersection" in described):
        ((name, parts),) = described.items()
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"{name} must list masks, at least one, got {parts!r}")
        first, *others = map(parse_mask, parts)
        for other in others:
            first = first | other if name == "union" else first & other
        return first
    if not {"q_ranges", "k_ranges", "types", "q_len"} <= set(described) <= SLICE_KEYS:
        raise ValueError(
            'a mask has the key "builder", or "union" or "intersection" alone, or q_ranges, k_ranges,'
            f" types and q_len (k_len too where it differs); got {sorted(described)}"
        )
    return AttnMask.from_slices(**{**described, "types": list(map(_type, described["types"]))})


def _type(described: Any) -> Any:
    if isinstance(described, str):
        if described not in MaskType.__members__:
            raise ValueError(f"types must be {', '.join(MaskType.__members__)}, got {described!r}")
        return MaskType[described]
    return tuple(described) if isinstance(described, list) else described


def advice(report: PlanReport) -> list[str]:
    """What a reader of the report might want to change, one sentence each."""
    found = []
    if report.imbalance > MAX_IMBALANCE:
        found.append(
            f"The busiest rank has {report.imbalance:.3f} times the mean work: try a smaller"
            " chunk_size, or effort=high."
        )
    if report.padding > MAX_PADDING:
        found.append(
            f"{report.padding:.1%} of local rows are padding: choose a sequence length that"
            " cp_size * chunk_size divides, or a smaller chunk_size."
        )
    if report.efficiency < MIN_EFFICIENCY:
        found.append(
            f"Kernels would be busy for {report.efficiency:.0%} of the predicted time: communication"
            " shows. Fewer ranks per sequence (more replicas, or heads over an axis of their own), or a"
            " larger share of tokens per rank, would hide it."
        )
    return found or ["Balance, padding and overlap are fine."]
