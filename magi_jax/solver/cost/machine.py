"""The machine that times are predicted for: its rates, and how its ranks are wired."""

from typing import NamedTuple

from magi_jax.solver.cost.model import CostModel


class Machine(NamedTuple):
    """What times are predicted for.

    Attributes:
        ranks_per_node: ranks that share a fast link; None takes all for one node.
        cost_model: rates.
        two_level: whether rows move in two steps, across nodes and then inside (`solver/work/two_level.py`):
            True, False, or "auto" for what is predicted faster.
    """

    ranks_per_node: int | None = None
    cost_model: CostModel = CostModel()
    two_level: bool | str = "auto"

    def node_of(self, cp_size: int) -> int:
        """Ranks of a node."""
        return min(self.ranks_per_node or cp_size, cp_size)

    def ways(self, cp_size: int) -> tuple[bool, ...]:
        """Ways that rows may take: in one step (False), in two (True), or either.

        Raises:
            ValueError: two steps are asked for, and the ranks are not whole nodes.
        """
        per_node = self.node_of(cp_size)
        if per_node == cp_size or self.two_level is False:
            return (False,)
        whole = cp_size % per_node == 0
        if self.two_level is True:
            if not whole:
                raise ValueError(
                    f"two_level=True wants whole nodes, {cp_size} ranks are not whole nodes of {per_node}"
                )
            return (True,)
        return (False, True) if whole and per_node > 1 else (False,)
