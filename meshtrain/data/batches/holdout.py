"""Which tokens of a source are held out for validation: a function of its lengths alone, so that another seed, batch or
mixture trains on the same documents. Held out are whole runs of neighbouring documents (contracts.run_length: one
document each up to a million of them), drawn by a fixed hash; nothing is kept per document. This module knows no
batches.
"""
from __future__ import annotations

import numpy as np

from meshtrain.data.batches import order
from meshtrain.data.documents.contracts import Source, run_length


def split(source: Source, fraction: float, cut: bool = True) -> tuple[order.SourcePart, order.SourcePart]:
    """(train, validation): at most this fraction of the tokens is held out.

    Where whole documents cannot fill half of that (one file, a few books), every document gives its tail instead, a
    document of its own. Where none may be cut, and where there are millions and a run of neighbours is more than asked
    for, the shortest run is held out; of a single one nothing is.
    """
    total = int(source.totals.sum())
    wanted = int(total * fraction)
    if not wanted:
        return order.whole(source), order.whole(source, np.zeros(0, np.int64))
    rank = order.permutation(len(source.totals), 0)
    lengths = source.totals[rank]
    # None is longer than half of what is wanted, so the first that no longer fits finds it at least half full.
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
        runs = np.flatnonzero(length)   # a run is a document here
        parts.append(order.SourcePart(source, runs.astype(np.int32), length[runs] + 1, side, fraction))
    return tuple(parts)
