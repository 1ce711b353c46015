"""Where the keys of a mask are: with its queries, in the dispatch of another plan, or whole on every rank."""

from typing import NamedTuple

from magi_jax.masks.attn_mask import AttnMask
from magi_jax.plan.frame import check_cross_mask, check_mask
from magi_jax.plan.lay_out.dispatch import layout_of
from magi_jax.plan.spec import OTHER_KEYS, OWN_KEYS, REPLICATED_KEYS, PlanSpec
from magi_jax.plan.tables import DispatchMeta
from magi_jax.solver.work.find_work import Keys


class Tokens(NamedTuple):
    """Tokens of a plan: where they are, and its sizes."""

    dispatch: DispatchMeta
    spec: PlanSpec

    def as_keys(self) -> Keys:
        """Where they are for those that see them."""
        return Keys(layout_of(self.dispatch, self.spec.cp_size), self.spec.local_len)


def find_keys(mask: AttnMask, queries: Tokens, keys: Tokens | str | None) -> tuple[str, Keys, int]:
    """Checks a mask against the tokens that it speaks of, and says where the keys are.

    Args:
        mask: of these queries and those keys.
        queries: tokens that see.
        keys: tokens that are seen; "replicated" for keys that are whole on every rank, None for the queries
            themselves.

    Returns:
        `OWN_KEYS`, `OTHER_KEYS` or `REPLICATED_KEYS`; the keys; and how many of them queries that travel
        are weighed against.

    Raises:
        TypeError: ``keys`` are none of these.
        ValueError: the mask is of other lengths, or keys and queries are on different numbers of ranks.
    """
    spec = queries.spec
    if keys is None:
        check_mask(mask, spec.seq_len)
        return OWN_KEYS, queries.as_keys(), spec.seq_len
    if not isinstance(keys, (Tokens, str)):
        raise TypeError(
            f"keys must be the AttentionPlan that dispatched them, {REPLICATED_KEYS!r} or None, got"
            f" {type(keys).__name__}: make_plan(mask_of_the_keys, cp_size={spec.cp_size}) makes one"
        )
    if isinstance(keys, str):
        if keys != REPLICATED_KEYS:
            raise ValueError(f'keys must be a plan, "{REPLICATED_KEYS}" or None, got {keys!r}')
        check_cross_mask(mask, spec.seq_len, mask.k_len)
        return REPLICATED_KEYS, Keys(None, mask.k_len), spec.seq_len
    if keys.spec.cp_size != spec.cp_size:
        raise ValueError(
            f"the keys are on {keys.spec.cp_size} ranks, the queries on {spec.cp_size}; both must share"
            " the ranks of one mesh axis"
        )
    check_cross_mask(mask, spec.seq_len, keys.spec.seq_len)
    return OTHER_KEYS, keys.as_keys(), keys.spec.seq_len
