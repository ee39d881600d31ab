"""The batches of a run: packed documents, or pairs of preferences."""
from __future__ import annotations

from meshtrain.data import sources
from meshtrain.data.batches import packing, preferences
from meshtrain.data.documents.contracts import Batches


def open_corpus(data, corpus: sources.Corpus, seed: int, position: dict | None = None) -> Batches:
    """Return the run file's [data] as batches. position: the data position of the previous run, or None. Raises:
    ValueError, as `packing.pack` and `preferences.open_pairs`."""
    opened = preferences.open_pairs if data.source == "preferences" else packing.open_batches
    return opened(data, corpus, seed, position)
