"""Sources for tests whose tokens are all different, so that every token of a batch tells where it comes from."""
import dataclasses
import functools

import numpy as np
from hypothesis import strategies as st

from meshtrain.data.batches import packing
from meshtrain.data.documents import contracts

BOS = 256
FIRST_ID = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered:
    """Documents whose tokens are first_id, first_id + 1, … through them all."""
    lengths: np.ndarray
    first_id: int = FIRST_ID
    given: list = dataclasses.field(default_factory=list)   # every token that was read

    @property
    def num_documents(self):
        return len(self.lengths)

    @functools.cached_property
    def totals(self):
        return contracts.totals(self.num_documents, self.ends)

    def ends(self, documents):
        return np.cumsum(self.lengths)[documents]

    def read(self, document, start, stop):
        assert 0 <= start < stop <= self.lengths[document]
        before = self.first_id + int(self.lengths[:document].sum())
        self.given.extend(range(before + start, before + stop))
        return np.arange(before + start, before + stop)


SETTINGS = {field.name for field in dataclasses.fields(packing.Packing)}


def pack(corpus, weights, **settings):
    """packing.pack, with the fields of Packing among the keywords. eos is bos, and names are numbers, by default."""
    names = [""] if len(corpus) == 1 else [str(i) for i in range(len(corpus))]
    settings = {"eos": settings["bos"], "names": names, **settings}
    shape = packing.Packing(**{name: value for name, value in settings.items() if name in SETTINGS})
    return packing.pack(corpus, weights, shape,
                        **{name: value for name, value in settings.items() if name not in SETTINGS})


def numbered(lengths, **settings):
    return pack([Numbered(np.array(lengths, np.int64))], [1.0],
                **{"bos": BOS, "seed": 0, "seq_len": 1, "global_batch": 1, **settings})


def mixed(corpora, weights, **settings):
    """A mixture of such sources: the tokens of source i begin at FIRST_ID * (i + 1)."""
    assert all(sum(lengths) < FIRST_ID for lengths in corpora)
    return pack([Numbered(np.array(lengths, np.int64), FIRST_ID * (i + 1)) for i, lengths in enumerate(corpora)],
                weights, **{"bos": BOS, "seed": 0, "seq_len": 1, "global_batch": 1, **settings})


def source_of(batch):
    """Of each token of a mixture without empty documents, its source, from 0; of a separator that of its document (its
    target)."""
    return np.where(batch["tokens"] == BOS, batch["targets"], batch["tokens"]) // FIRST_ID - 1


def sequences(packed, count, first=0):
    """`count` sequences of training, from batch `first` on, all keys stacked."""
    batches = [packed.batch(first + n) for n in range(-(-count // packed.shape.global_batch))]
    return {key: np.concatenate([batch[key] for batch in batches])[:count] for key in batches[0]}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def validation(held, key=None):
    """All batches of a validation set, or one key of them flat."""
    batches = [held.batch(i) for i in range(held.num_batches)]
    return batches if key is None else np.concatenate([batch[key].ravel() for batch in batches])


corpora = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
full = st.lists(st.integers(1, 40), min_size=1, max_size=8)
shapes = st.tuples(st.integers(1, 17), st.integers(1, 5), st.integers(0, 2**40))


def pack_drawn(lengths, shape, **settings):
    """Documents at least a batch long, however the numbers fall."""
    seq_len, global_batch, seed = shape
    while sum(lengths) < seq_len * global_batch:
        lengths = lengths + lengths
    return lengths, numbered(lengths, seq_len=seq_len, global_batch=global_batch, seed=seed, **settings)


drawn = st.lists(st.integers(1, 30), max_size=8).map(lambda lengths: [*lengths, 30]) | st.just([900]) | st.just(
    [1] * 50)
mixtures = st.lists(st.tuples(drawn, st.floats(0.05, 1)), min_size=2, max_size=5)


def mix_drawn(mixture, shape, **settings):
    """Sources at least a batch long, however the numbers fall."""
    seq_len, global_batch, seed = shape
    lengths, weights = zip(*mixture)
    needed = seq_len * global_batch
    lengths = [one if sum(one) >= needed else [*one, needed] for one in lengths]
    return lengths, mixed(lengths, weights, seq_len=seq_len, global_batch=global_batch, seed=seed, **settings)
