"""Placements that keep documents whole: on one rank each, or in one node, whose ranks they are then dealt to.

Ranks, or nodes, are bins (`bins`) that documents are packed into. In nodes, and on ranks where no documents
fit exactly, few rows of light documents even the tokens out, so that these are cut.

Weights are areas less what as many rows have by which tokens are evened out: how many tokens a bin has hardly
matters to them.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.solver.dispatch.bins import Contents
from magi_jax.solver.dispatch.deal import deal
from magi_jax.solver.dispatch.documents import document_edges
from magi_jax.solver.dispatch.problem import Assignment, DispatchProblem, RowAreas, even_cuts
from magi_jax.solver.dispatch.runs import (
    BY_TURNS,
    FALLING,
    Documents,
    assignment_of,
)

# Rows by which tokens are evened out: those that see fewest keys, one of so many, or what four bins hold.
FILLERS = 8
# Of the imbalance that is allowed, what a single document may take.
SLACK = 0.8
# With more documents than this, or fewer for each bin, bins come out equal or unequal anyhow.
MOST_DOCUMENTS, FEWEST = 4096, 3
# With more slices, finding documents takes too long for what they may save.
MOST_SLICES = 8192
# Of a bin: with more, a number of tokens and an area no longer fit into one integer.
MOST_TOKENS = 1 << 19


class Bins(NamedTuple):
    """Rows of every bin: intervals ``[n]`` of the sequence, sorted by bin.

    Attributes:
        begin, end: rows of whole documents and of parts.
        bin: which has them.
    """

    begin: np.ndarray
    end: np.ndarray
    bin: np.ndarray


class WholeDocuments:
    """Placements of one problem, each made when it is asked for.

    Args:
        problem: what is to be placed.
        limit: area of a bin over the mean, beyond which there is none.
    """

    def __init__(self, problem: DispatchProblem, limit: float):
        self.problem, self.limit = problem, limit
        self.tokens = np.diff(even_cuts(int(problem.edges[-1]), problem.cp_size))
        self.documents = _documents_of(problem)

    def on_ranks(self) -> Assignment | None:
        """Whole documents on every rank; None where some are too large, or all too few."""
        found = self._packed(self.tokens, exactly=True)
        if found is None:
            return None
        pieces = np.stack([found.begin, found.end - found.begin, found.bin], axis=1)
        return assignment_of(pieces, int(self.problem.edges[-1]))

    def in_nodes(self, per_node: int) -> Assignment | None:
        """Whole documents in every node, dealt to its ranks in runs; None as in `on_ranks`."""
        tokens = self.tokens.reshape(-1, per_node)
        found = self._packed(tokens.sum(axis=1), exactly=False)
        if self.documents is None or found is None:
            return None
        rows, dealt = self.documents.rows, []
        for node, of_ranks in enumerate(tokens):
            mine = found.bin == node
            parts = Documents.between(rows, found.begin[mine], found.end[mine])
            shares = np.stack([of_ranks, np.zeros_like(of_ranks)], axis=1)
            pieces = deal(rows, *parts.piles((BY_TURNS, FALLING)), shares, self.problem.engine)
            dealt.append(pieces + np.array([0, 0, node * per_node]))
        return assignment_of(np.concatenate(dealt), int(self.problem.edges[-1]))

    def _packed(self, tokens: np.ndarray, exactly: bool) -> Bins | None:
        if self.documents is None:
            return None
        found = pack(self.documents, tokens, exactly, self.limit, self.problem.engine)
        if found is None:
            return None
        before = self.documents.rows.before
        area = np.bincount(found.bin, before(found.end) - before(found.begin))
        return found if area.max() <= self.limit * area.mean() else None


def _documents_of(problem: DispatchProblem) -> Documents | None:
    """Documents of the sequence; None where queries travel, whose work falls on others, and where there are
    too many or too few for any bins.
    """
    if len(problem.travelling) or len(problem.slices) > MOST_SLICES:
        return None
    edges = document_edges(problem.slices, int(problem.edges[-1]))
    if not 2 * FEWEST < len(edges) <= MOST_DOCUMENTS + 1:
        return None
    return Documents.of(RowAreas.of(problem.slices, edges), edges)


def pack(
    documents: Documents, tokens: np.ndarray, exactly: bool, limit: float, engine: str = "numpy"
) -> Bins | None:
    """Whole documents in bins of so many ``tokens [N]`` and of equal area; None where some do not fit.

    Args:
        documents: all of the sequence.
        tokens: of each bin.
        exactly: look for bins that no document need be cut for, else for those of most equal area.
        limit: area of a bin over the mean that a single document may fill.
        engine: "numpy" or "compiled"; both pack alike.
    """
    number = len(tokens)
    if number < 2 or len(documents.area) < FEWEST * number:
        return None
    if int(tokens.max()) > MOST_TOKENS:
        return None
    light = _fillers(documents, number)
    weight = _weights(documents, light)
    most = int(weight.sum()) + SLACK * (limit - 1.0) * int(documents.area.sum())
    if number * int(weight.max()) > most or documents.size.max() > tokens.min():
        return None
    contents = Contents(documents.size, weight, light, tokens, exactly, engine)
    if not exactly:
        contents.even_out()
    return _cut_evenly(documents, contents)


def _fillers(documents: Documents, number: int) -> np.ndarray:
    """Which documents even tokens of ``number`` bins out: those whose rows see fewest keys, bool ``[D]``."""
    order = np.argsort(documents.area / documents.size, kind="stable")
    before = np.cumsum(documents.size[order]) - documents.size[order]
    light = np.zeros(len(order), bool)
    light[order[before <= documents.size.sum() // max(FILLERS, number // 4)]] = True
    return light


def _weights(documents: Documents, fillers: np.ndarray) -> np.ndarray:
    """Areas less what as many rows of ``fillers`` have ``[D]``."""
    area, rows = int(documents.area[fillers].sum()), int(documents.size[fillers].sum())
    return documents.area - area * documents.size // rows


def _cut_evenly(documents: Documents, contents: Contents) -> Bins | None:
    """Rows of every bin; the lightest of bins with too many tokens go to those with too few. None where that
    takes more than the documents of a bin.
    """
    document = np.concatenate([np.array(held, np.int64) for held in contents.held])
    bins = np.repeat(np.arange(len(contents.held)), [len(held) for held in contents.held])
    begin, end = documents.table[document, 0], documents.table[document, 1].copy()
    density = (documents.area / documents.size)[document]
    left = np.array(contents.left)
    spare: list[tuple[int, int]] = []
    for i in np.flatnonzero(left < 0).tolist():
        give = -int(left[i])
        mine = np.flatnonzero(bins == i)
        for at in mine[np.lexsort((document[mine], density[mine]))].tolist():
            cut = min(give, int(end[at] - begin[at]))
            if cut:
                spare.append((int(end[at]) - cut, int(end[at])))
                end[at] -= cut
                give -= cut
        if give > 0:
            return None
    moved: list[tuple[int, int, int]] = []
    for i in np.flatnonzero(left > 0).tolist():
        need = int(left[i])
        while need > 0:
            first, last = spare.pop()
            taken = min(need, last - first)
            moved.append((first, first + taken, i))
            need -= taken
            if first + taken < last:
                spare.append((first + taken, last))
    kept = np.stack([begin, end, bins], axis=1)[begin < end]
    rows = np.concatenate([kept, np.array(moved, np.int64).reshape(-1, 3)])
    rows = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
    return Bins(*rows.T)
