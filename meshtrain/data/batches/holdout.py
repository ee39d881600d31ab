"""Splits a source into training and validation documents. The split is a function of the source's lengths alone, so
that another seed, batch or mixture holds out the same documents. A fixed hash draws whole runs of neighbouring
documents (contracts.run_length); nothing is kept per document. This module knows no batches."""
from __future__ import annotations

import numpy as np

from meshtrain.data.batches import order
from meshtrain.data.documents.contracts import Source, run_length


def split(source: Source, fraction: float, cut: bool = True) -> tuple[order.SourcePart, order.SourcePart]:
    """Return (train, validation). At most this fraction of the tokens is held out.

    If whole documents cannot fill half of that (one file, a few books), the tail of every document is held out instead,
    as a document of its own. If documents may not be cut, or a run of neighbours exceeds the fraction, the shortest run
    is held out; nothing is held out if there is only one run.
    """
    total = int(source.totals.sum())
    wanted = int(total * fraction)
    if not wanted:
        return order.whole(source), order.whole(source, np.zeros(0, np.int64))
    rank = order.permutation(len(source.totals), 0)
    lengths = source.totals[rank]
    # Each is at most half of the target, so the first one that does not fit leaves it at least half full.
    fits = (lengths > 0) & (2 * lengths <= wanted)
    rank, lengths = rank[fits], lengths[fits]
    rank, held = rank[np.cumsum(lengths) <= wanted], int(lengths[np.cumsum(lengths) <= wanted].sum())
    if cut and run_length(source.num_documents) == 1 and 2 * held < wanted:
        return _tails(source, wanted / total)
    if not held and np.count_nonzero(source.totals) > 1:
        rank = np.flatnonzero(source.totals == source.totals[source.totals > 0].min())[:1]
    out = np.zeros(len(source.totals), bool)
    out[rank] = True
    return order.whole(source, np.flatnonzero(~out)), order.whole(source, np.flatnonzero(out))


def _tails(source: Source, fraction: float) -> tuple[order.SourcePart, order.SourcePart]:
    parts = []
    for side in ("head", "tail"):
        part = order.SourcePart(source, np.zeros(0, np.int32), np.zeros(0, np.int64), side, fraction)
        _, length = part.spans(np.arange(source.num_documents))
        runs = np.flatnonzero(length)   # one document per run here
        parts.append(order.SourcePart(source, runs.astype(np.int32), length[runs] + 1, side, fraction))
    head, tail = parts
    return head, tail
