"""The data order: every token once an epoch, the same batch on every layout, and nothing learnt across documents."""
import dataclasses
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from meshtrain import names
from meshtrain.data import packing, sources

BOS, NO_LOSS = 256, names.NO_TARGET
FIRST_ID = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered:
    """Documents whose tokens are all different: first_id, first_id + 1, … through them all."""
    lengths: np.ndarray
    first_id: int = FIRST_ID
    given: list = dataclasses.field(default_factory=list)   # every token that was read

    def read(self, document, start, stop):
        assert 0 <= start < stop <= self.lengths[document]
        before = self.first_id + int(self.lengths[:document].sum())
        self.given.extend(range(before + start, before + stop))
        return np.arange(before + start, before + stop)


def numbered(lengths, **settings):
    return packing.pack([Numbered(np.array(lengths, np.int64))], [1.0],
                     **{"bos": BOS, "seed": 0, "seq_len": 1, "global_batch": 1, **settings})


def opened(name, paths=(), **settings):
    return packing.pack([sources.open_source(name, [str(path) for path in paths])], [1.0],
                     **{"bos": BOS, "seed": 0, "seq_len": 8, "global_batch": 2, **settings})


def mixed(corpora, weights, **settings):
    """A mixture of sources whose tokens are all different: those of source i begin at FIRST_ID * (i + 1)."""
    assert all(sum(lengths) < FIRST_ID for lengths in corpora)
    return packing.pack([Numbered(np.array(lengths, np.int64), FIRST_ID * (i + 1)) for i, lengths in enumerate(corpora)], weights,
                     **{"bos": BOS, "seed": 0, "seq_len": 1, "global_batch": 1, **settings})


def source_of(batch):
    """Of each token of a mixture, its source, from 0; of BOS that of the document behind it (its target)."""
    return np.where(batch["tokens"] == BOS, batch["targets"], batch["tokens"]) // FIRST_ID - 1


def sequences(packed, count):
    """The first `count` sequences of training, all keys stacked."""
    batches = [packed.batch(n) for n in range(-(-count // packed.global_batch))]
    return {key: np.concatenate([batch[key] for batch in batches])[:count] for key in batches[0]}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


corpora = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
shapes = st.tuples(st.integers(1, 17), st.integers(1, 5), st.integers(0, 2**40))


def pack_drawn(lengths, shape, **settings):
    """Documents at least a batch long, however the numbers fall."""
    seq_len, global_batch, seed = shape
    while sum(lengths) < seq_len * global_batch:
        lengths = lengths + lengths
    return lengths, numbered(lengths, seq_len=seq_len, global_batch=global_batch, seed=seed, **settings)


@settings(deadline=None, max_examples=50)
@given(corpora, shapes, st.booleans())
def test_every_token_is_an_input_once_and_a_target_once_per_epoch(lengths, shape, document_mask):
    lengths, packed = pack_drawn(lengths, shape, document_mask=document_mask)
    per_epoch, documents = sum(lengths) + np.count_nonzero(lengths), np.count_nonzero(lengths)
    # T epochs are a whole number of sequences: exact counts.
    rows = sequences(packed, per_epoch)
    for key, separators in (("tokens", documents), ("targets", 0 if document_mask else documents)):
        counts = np.bincount(rows[key][rows[key] >= 0], minlength=FIRST_ID + sum(lengths))
        assert (counts[FIRST_ID:] == packed.seq_len).all(), key
        assert counts[BOS] == separators * packed.seq_len
        assert counts.sum() == counts[FIRST_ID:].sum() + counts[BOS]
    # One epoch, its last sequence filled up from the next.
    first = sequences(packed, -(-per_epoch // packed.seq_len))["tokens"]
    counts = np.bincount(first.ravel(), minlength=FIRST_ID + sum(lengths))[FIRST_ID:]
    assert counts.min() == 1 and (counts > 1).sum() < packed.seq_len


@settings(deadline=None, max_examples=50)
@given(corpora, shapes)
def test_targets_segments_and_positions_stay_within_a_document(lengths, shape):
    lengths, packed = pack_drawn(lengths, shape)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    rows = sequences(packed, 20)
    for tokens, targets, segments, positions in zip(*(rows[k] for k in ("tokens", "targets", "segments", "positions"))):
        segment, position = 1, 0
        for t, token in enumerate(tokens):
            if token == BOS and t > 0:
                segment, position = segment + 1, 0
            assert (segments[t], positions[t]) == (segment, position)
            position += 1
            follows = document_of[1:] == document_of[:-1]
            if token == BOS:
                assert targets[t] in FIRST_ID + np.flatnonzero(np.diff(document_of, prepend=-1))
            elif token - FIRST_ID < len(follows) and follows[token - FIRST_ID]:
                assert targets[t] == token + 1
            else:
                assert targets[t] == NO_LOSS
            if t + 1 < len(tokens) and targets[t] != NO_LOSS:
                assert targets[t] == tokens[t + 1]


def test_without_document_mask_a_row_is_one_segment_and_targets_cross_documents():
    rows = numbered([3, 4, 5], seq_len=10, document_mask=False).batch(0)
    assert (rows["segments"] == 1).all()
    np.testing.assert_array_equal(rows["positions"], [range(10)])
    np.testing.assert_array_equal(rows["targets"][:, :-1], rows["tokens"][:, 1:])
    assert BOS in rows["targets"]


def test_arrays_are_int32_of_the_documented_shapes():
    rows = numbered([30, 50], seq_len=8, global_batch=4).batch(3, slice(1, 3))
    assert {key: (value.shape, value.dtype.name) for key, value in rows.items()} == {
        **{key: ((2, 8), "int32") for key in ("tokens", "targets", "segments", "positions", "index")},
        "sequence": ((2,), "int32")}
    np.testing.assert_array_equal(rows["index"], [range(8)] * 2)
    np.testing.assert_array_equal(rows["sequence"], [13, 14])


@settings(deadline=None, max_examples=50)
@given(corpora, shapes, st.integers(0, 200), st.randoms())
def test_a_batch_is_the_same_after_a_restart_and_however_its_rows_are_split(lengths, shape, n, random):
    lengths, packed = pack_drawn(lengths, shape)
    whole = packed.batch(n)
    _, restarted = pack_drawn(lengths, shape)
    assert_same(restarted.batch(n), whole)
    rows = list(range(packed.global_batch))
    random.shuffle(rows)
    assert_same(packed.batch(n, rows), {key: value[rows] for key, value in whole.items()})
    cut = random.randint(0, packed.global_batch)
    halves = packed.batch(n, slice(cut)), packed.batch(n, slice(cut, None))
    assert_same({key: np.concatenate([half[key] for half in halves]) for key in whole}, whole)


def test_regrouping_sequences_into_other_batches_keeps_their_order():
    lengths = [17, 60, 3, 44]
    two, six = (sequences(numbered(lengths, seq_len=7, global_batch=b), 36) for b in (2, 6))
    assert_same(two, six)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_iteration_from_any_step_gives_the_batches_of_those_steps(prefetch):
    packed = mixed([[100, 30, 55], [9] * 8], [2, 1], seq_len=5, global_batch=4)
    before = threading.active_count()
    batches = packed.iterate(7, slice(1, 3), prefetch=prefetch)
    for n in range(7, 40):
        assert_same(next(batches), packed.batch(n, slice(1, 3)))
    batches.close()
    for _ in range(500):  # they end on their own time
        if threading.active_count() <= before:
            return
        time.sleep(0.01)
    pytest.fail(f"threads left behind: {threading.enumerate()}")


def test_epochs_and_seeds_shuffle_documents_and_sequences_differently():
    packed, other = (numbered([5] * 40, seq_len=6, global_batch=40, seed=seed) for seed in (0, 1))
    documents = [tuple(p.train[0].lay_out(epoch)[0]) for p in (packed, other) for epoch in (0, 1)]
    assert len(set(documents)) == 4 and all(sorted(order) == list(range(40)) for order in documents)
    dealt = [tuple(p.train[0].deal(6, np.arange(40) + 40 * epoch) - 40 * epoch) for p in (packed, other) for epoch in (0, 1)]
    assert len(set(dealt)) == 4 and all(sorted(places) == list(range(40)) for places in dealt)


def test_the_order_of_a_seed_never_changes():
    """A golden row: whatever changes it sends every run that resumes to other data."""
    np.testing.assert_array_equal(
        numbered([4, 2, 7, 3], seq_len=8, global_batch=2, seed=3).batch(5)["tokens"],
        [[256, 1013, 1014, 1015, 256, 1006, 1007, 1008], [1009, 1010, 1011, 1012, 256, 1004, 1005, 256]])
    np.testing.assert_array_equal(sources.split(np.full(40, 5), 0.1)[1].document, [3, 11, 13, 20])


@pytest.mark.parametrize("seq_len, global_batch, seed, document_mask, train, validation", [
    (16, 4, 0, True, "dd82242fb3e8d4bf", "0abee56395bf0d9f"),
    (16, 4, 0, False, "f1d6f45866fe57c6", "d2837d6097d06f5a"),
    (7, 9, 5, True, "a02018591c1d657f", "0260a99235a33903"),
    (128, 3, 2**40 + 7, True, "ab5d331224441793", "a337645ce5faf5e5"),
    (33, 5, 9, False, "48d01201d590d5f6", "413c04f196596f68"),
])
def test_every_array_of_a_seed_never_changes(seq_len, global_batch, seed, document_mask, train, validation):
    """Golden hashes, of the packing that read row by row."""
    packed = numbered((np.random.PCG64(1).random_raw(60) % np.uint64(90)).astype(np.int64), seq_len=seq_len,
                      global_batch=global_batch, seed=seed, document_mask=document_mask, validation_fraction=0.2)

    def digest(batches):
        hashed = hashlib.blake2b(digest_size=8)
        for batch in batches:
            for key in sorted(batch):
                hashed.update(f"{key}{batch[key].shape}".encode() + batch[key].tobytes())
        return hashed.hexdigest()
    assert digest(packed.batch(n) for n in (0, 1, 2, 17, 40, 1000, 123456)) == train
    assert digest(packed.validation_batch(i) for i in range(packed.num_validation_batches)) == validation


def test_the_order_of_a_mixture_never_changes():
    by_tokens = [[1004, 1005, 256, 1013, 1014, 256, 1010, 1011], [1005, 256, 1010, 1011, 2001, 256, 2020, 2021]]
    by_sequences = [[*range(1161, 1169)], [*range(1199, 1207)]]
    for lengths, golden in (([1, 2], by_tokens), ([40, 7], by_sequences)):
        batch = mixed([lengths * 6, [2] * 12], [3, 1], seq_len=8, global_batch=2, seed=3).batch(5)
        assert batch["tokens"].tolist() == golden


def test_one_long_document_does_not_fill_a_batch_with_neighbours():
    starts = np.sort(numbered([10_000], seq_len=10, global_batch=50).batch(0)["tokens"][:, 0])
    assert starts[-1] - starts[0] > 5_000


# Mixtures

drawn = st.lists(st.integers(0, 30), max_size=8).map(lambda lengths: [*lengths, 30]) | st.just([900]) | st.just([1] * 50)
mixtures = st.lists(st.tuples(drawn, st.floats(0.05, 1)), min_size=2, max_size=5)


def mix_drawn(mixture, shape, **settings):
    """Sources at least a batch long, however the numbers fall."""
    seq_len, global_batch, seed = shape
    corpora, weights = zip(*mixture)
    needed = seq_len * global_batch
    corpora = [lengths if sum(lengths) >= needed else [*lengths, needed] for lengths in corpora]
    return corpora, mixed(corpora, weights, seq_len=seq_len, global_batch=global_batch, seed=seed, **settings)


@settings(deadline=None, max_examples=100)
@given(mixtures, shapes)
@example([([3] * 100, 0.9), ([3] * 100, 0.033), ([3] * 100, 0.033), ([3] * 100, 0.033)], (17, 1, 0))
@example([([900], 0.9), ([900], 0.05), ([3] * 100, 0.05)], (17, 5, 0))
def test_every_prefix_of_a_mixture_is_within_a_documents_tokens_of_its_weights(mixture, shape):
    corpora, packed = mix_drawn(mixture, shape)
    weights = np.array([weight for _, weight in mixture])
    longest = 1 + max(map(max, corpora))
    counts = np.zeros(len(weights), int)
    for n in range(15):
        counts += np.bincount(source_of(packed.batch(n)).ravel(), minlength=len(weights))
        assert np.abs(counts - weights / weights.sum() * counts.sum()).max() <= longest


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 2**60), min_size=1, max_size=12), st.integers(1, 2**60), st.integers(1, 5000),
       st.integers(0, 3))
@example([1, 1], 7, 1, 1)
def test_shares_add_up_never_fall_and_keep_to_their_bound(weights, quanta, quantum, more):
    total = quanta * quantum
    counts, later = (packing.shares(weights, at, quantum) for at in (total, total + more * quantum))
    assert sum(counts) == total and all(count % quantum == 0 for count in counts)
    assert all(0 <= count <= then for count, then in zip(counts, later))
    bound = packing.deviation(weights)
    k, whole = len(weights), sum(weights)
    assert all(abs(count - Fraction(weight * total, whole)) <= bound * quantum for count, weight in zip(counts, weights))
    assert bound <= (1 + sum(1 / i for i in range(1, k - 1))) / 2 if k > 1 else bound == 0


@settings(deadline=None, max_examples=25)
@given(corpora, st.integers(2, 4), st.integers(1, 17), st.integers(0, 2**40), st.randoms())
def test_every_source_of_a_mixture_gives_each_token_once_per_epoch(lengths, k, seq_len, seed, random):
    while sum(lengths) < seq_len:
        lengths = lengths + lengths
    packed = mixed([random.sample(lengths, len(lengths)) for _ in range(k)], [0.1] * k, seq_len=seq_len, global_batch=k,
                   seed=seed)
    # T epochs of each are a whole number of batches: exact counts.
    batches = [packed.batch(n) for n in range(packed.train[0].tokens_per_epoch)]
    for key, separators in (("tokens", np.count_nonzero(lengths)), ("targets", 0)):
        ids = np.concatenate([batch[key].ravel() for batch in batches])
        counts = np.bincount(ids[ids >= 0], minlength=FIRST_ID * (k + 1))
        for i in range(1, k + 1):
            assert (counts[FIRST_ID * i:FIRST_ID * i + sum(lengths)] == seq_len).all(), key
        assert counts[BOS] == k * separators * seq_len
        assert counts.sum() == k * seq_len * (sum(lengths) + separators)


@settings(deadline=None, max_examples=50)
@given(mixtures, shapes)
def test_a_source_gives_a_mixture_the_order_that_it_has_alone(mixture, shape):
    corpora, packed = mix_drawn(mixture, shape)
    alone = numbered(corpora[0], seq_len=shape[0], seed=shape[2])
    pairs = [[], []]
    for n in range(6):
        batch = packed.batch(n)
        of_first = source_of(batch) == 0
        pairs[0] += zip(batch["tokens"][of_first], batch["targets"][of_first])
    for s in range(-(-len(pairs[0]) // shape[0])):
        row = alone.batch(s)
        pairs[1] += zip(row["tokens"][0], row["targets"][0])
    assert sorted(pairs[0]) == sorted(pairs[1][:len(pairs[0])])


@settings(deadline=None, max_examples=50)
@given(mixtures, shapes, st.integers(0, 50))
def test_labels_segments_and_positions_of_a_mixture_stay_within_a_document(mixture, shape, n):
    corpora, packed = mix_drawn(mixture, shape)
    ends = {FIRST_ID * (i + 1) + end - 1 for i, lengths in enumerate(corpora) for end in np.cumsum(lengths)}
    firsts = {FIRST_ID * (i + 1) + end - length for i, lengths in enumerate(corpora)
              for end, length in zip(np.cumsum(lengths), lengths) if length}
    rows = packed.batch(n)
    for tokens, targets, segments, positions in zip(*(rows[key].tolist() for key in
                                                      ("tokens", "targets", "segments", "positions"))):
        for t, (token, target) in enumerate(zip(tokens, targets)):
            assert target in firsts if token == BOS else target == (NO_LOSS if token in ends else token + 1)
            same = t > 0 and segments[t] == segments[t - 1]
            assert (segments[t], positions[t]) == ((segments[t - 1], positions[t - 1] + 1) if same else
                                                   (segments[t - 1] + 1 if t else 1, 0))
            if same:    # what a token may attend to is its own document
                assert targets[t - 1] == token


def test_whole_sequences_are_mixed_where_documents_are_long_and_tokens_where_they_are_short():
    long, short = ([[length] * (800 // length)] * 3 for length in (200, 10))
    weights = [0.6, 0.3, 0.1]
    for n in range(10):
        rows = source_of(mixed(long, weights, seq_len=32, global_batch=5).batch(n))
        assert (rows == rows[:, :1]).all()      # none is cut
        counts = np.bincount(source_of(mixed(short, weights, seq_len=32, global_batch=5).batch(n)).ravel(), minlength=3)
        assert np.abs(counts - np.array(weights) * 160).max() <= 2     # twice the bound: both ends of a batch are rounded


def test_a_book_in_a_mixture_does_not_fill_a_batch_with_neighbours():
    packed = mixed([[900], [10] * 80], [0.5, 0.5], seq_len=10, global_batch=40)
    batch = packed.batch(0)
    book = batch["tokens"][(source_of(batch) == 0) & (batch["tokens"] != BOS)]
    assert np.ptp(book) > 600 and len(book) < 250
    rows = source_of(batch)[:, 0]
    assert all(5 < (half == 0).sum() < 15 for half in np.split(rows, 2))   # evenly, for hosts and microbatches


def test_a_source_shorter_than_a_sequence_comes_again_and_again_in_its_row():
    packed = mixed([[900], [3]], [0.9, 0.1], seq_len=17, global_batch=2)
    rows = [row for n in range(40) for row, source in zip(packed.batch(n)["tokens"].tolist(), source_of(packed.batch(n))[:, 1])
            if source == 1]
    assert len(rows) == 8
    ids = np.array(rows).ravel()    # 34 epochs of one document: each sequence begins where the one before ended
    np.testing.assert_array_equal(ids, np.resize([BOS, 2000, 2001, 2002], len(ids)))


def test_sources_of_a_mixture_and_epochs_are_shuffled_differently():
    packed, other = (mixed([[5] * 40] * 3, [1, 1, 1], seq_len=6, global_batch=3, seed=seed) for seed in (0, 1))
    orders = [tuple(stream.lay_out(epoch)[0]) for p in (packed, other) for stream in p.train for epoch in (0, 1)]
    assert len(set(orders)) == 12 and all(sorted(order) == list(range(40)) for order in orders)


def test_weights_of_any_scale_mean_the_same():
    one, ten = (mixed([[50] * 4, [9] * 20], weights, seq_len=8, global_batch=4) for weights in ([0.25, 0.75], [1, 3]))
    assert_same(one.batch(3), ten.batch(3))


@settings(deadline=None, max_examples=50)
@given(mixtures, shapes, st.integers(0, 200), st.randoms(), st.booleans(), st.integers(1, 4))
def test_hosts_read_their_rows_of_a_mixture_and_no_others(mixture, shape, n, random, document_mask, num_hosts):
    corpora, packed = mix_drawn(mixture, shape, document_mask=document_mask)
    whole = packed.batch(n)
    rows = list(range(packed.global_batch))
    random.shuffle(rows)
    hosts = [sorted(rows[i::num_hosts]) for i in range(num_hosts)]
    parts = []
    for mine in hosts:
        for stream in packed.train:
            stream.source.given.clear()
        parts.append(packed.batch(n, mine))
        given = [token for stream in packed.train for token in stream.source.given]
        seen = set(parts[-1]["tokens"].ravel()) | set(parts[-1]["targets"].ravel())
        # The token behind the last of a run is read as its target; of nothing else more than once.
        assert set(given) <= seen and len(given) <= parts[-1]["tokens"].size + len(mine) * (1 + 2 * len(corpora))
    order = np.argsort(np.concatenate(hosts), kind="stable")
    assert_same({key: np.concatenate([part[key] for part in parts])[order] for key in whole}, whole)


def test_threads_that_cross_ends_of_epochs_get_the_batches_of_one():
    packed, alone = (mixed([[5] * 12, [50, 20]], [2, 1], seq_len=5, global_batch=4) for _ in range(2))
    with ThreadPoolExecutor(8) as threads:
        for n, batch in enumerate(threads.map(packed.batch, range(100))):
            assert_same(batch, alone.batch(n))


def test_batches_far_away_are_found_without_overflow():
    one, two = (mixed([[30, 9], [40]], [1, 1], seq_len=8, global_batch=b) for b in (4, 2))
    n = 2**50
    found = np.concatenate([two.batch(2 * n)["tokens"], two.batch(2 * n + 1)["tokens"]])
    assert sorted(map(tuple, one.batch(n)["tokens"])) == sorted(map(tuple, found))
    assert one.batch(n)["sequence"].tolist() == [0, 1, 2, 3]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.1, 1), min_size=2, max_size=4), st.integers(5, 30), st.integers(1, 6), st.booleans())
def test_validation_of_a_mixture_keeps_the_weights_until_a_source_runs_out(weights, seq_len, global_batch, document_mask):
    packed = mixed([[10] * 60 for _ in weights], weights, seq_len=seq_len, global_batch=global_batch, validation_fraction=0.2,
                   document_mask=document_mask)
    rows = [packed.validation_batch(i) for i in range(packed.num_validation_batches)]
    inputs, targets, segments = (np.concatenate([b[k].ravel() for b in rows]) for k in ("tokens", "targets", "segments"))
    assert (targets[segments == 0] == NO_LOSS).all() and (inputs[segments == 0] == 0).all()
    held = {int(t) for stream in packed.validation for d in stream.spans.document for t in stream.source.read(d, 0, 10)}
    shown = inputs[(segments > 0) & (inputs != BOS)]
    assert len(set(shown)) == len(shown) and set(shown) <= held
    wanted = targets[(targets != NO_LOSS) & (targets != BOS)]
    assert len(set(wanted)) == len(wanted) and set(wanted) <= held
    counts = packing.shares(packed.weights, packed.validation_tokens)
    assert (segments > 0).sum() >= packed.validation_tokens - 1
    assert np.abs(np.bincount(shown // FIRST_ID - 1, minlength=len(weights)) * 1.1 - counts).max() <= 2.5
    assert any(stream.tokens_per_epoch - count <= 2 / (weight / sum(packed.weights)) for stream, count, weight in
               zip(packed.validation, counts, packed.weights))


# Validation

@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60).filter(any), st.floats(0, 0.99))
def test_training_and_validation_share_no_token_and_lose_none(lengths, fraction):
    train, held_out = sources.split(np.array(lengths), fraction)
    seen = [np.zeros(length, int) for length in lengths]
    for spans in (train, held_out):
        assert (spans.length > 0).all()
        for document, start, length in zip(spans.document, spans.start, spans.length):
            assert start + length <= lengths[document]
            seen[document][start:start + length] += 1
    assert all((count == 1).all() for count in seen)
    # Half of the share at least; tails are rounded down once per document.
    wanted = fraction * sum(lengths)
    assert wanted / 2 - len(lengths) - 1 <= held_out.length.sum() <= wanted


def test_whole_documents_are_held_out_where_there_are_many():
    lengths = np.full(1000, 20)
    train, held_out = sources.split(lengths, 0.05)
    assert not set(train.document) & set(held_out.document)
    assert len(held_out.document) == 50 and (held_out.length == 20).all()
    assert np.ptp(held_out.document) > 500  # from all over the corpus
    for place in range(100):  # one that nearly fills the share on its own does not cost the others their wholeness
        lengths = np.full(100, 20)
        lengths[place] = 100
        train, held_out = sources.split(lengths, 0.055)
        assert not set(train.document) & set(held_out.document)


def test_of_a_single_file_the_tail_is_held_out(tmp_path):
    text = bytes(range(32, 127)) * 20
    (tmp_path / "plays.txt").write_bytes(text)
    packed = opened("text", [tmp_path / "plays.txt"], seq_len=16, validation_fraction=0.1)
    rows = [packed.validation_batch(i) for i in range(packed.num_validation_batches)]
    held = np.concatenate([batch["targets"].ravel() for batch in rows])
    assert bytes(held[held >= 0].astype(np.uint8)) == text[-190:]
    assert rows[0]["tokens"][0, 0] == BOS


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.integers(1, 6), st.booleans())
@example(1, 1, False)  # the last batch exactly full
def test_validation_batches_give_every_held_out_token_once_and_pad_the_rest(seq_len, global_batch, document_mask):
    packed = numbered([20] * 60, seq_len=seq_len, global_batch=global_batch, validation_fraction=0.2,
                      document_mask=document_mask)
    held = packed.validation[0].spans
    expected = np.concatenate([np.r_[BOS, packed.train[0].source.read(d, 0, 20)] for d in held.document])
    rows = [packed.validation_batch(i) for i in range(packed.num_validation_batches)]
    tokens, targets, segments = (np.concatenate([batch[key] for batch in rows]).ravel()
                                 for key in ("tokens", "targets", "segments"))
    shown = tokens[segments > 0]
    assert len(shown) >= len(expected) - 1  # the last token need not be an input
    np.testing.assert_array_equal(shown, expected[:len(shown)])
    assert (targets[segments == 0] == NO_LOSS).all()
    wanted = expected[1:] if not document_mask else expected[expected != BOS]
    np.testing.assert_array_equal(targets[targets != NO_LOSS], wanted)
    if not document_mask:  # no batch without a target
        assert all((batch["targets"] != NO_LOSS).any() for batch in rows)
    with pytest.raises(IndexError, match=f"{len(rows)} of {len(rows)}"):
        packed.validation_batch(len(rows))


def test_the_seed_does_not_change_what_is_held_out():
    one, two = (numbered([9] * 100, seq_len=4, seed=seed, validation_fraction=0.1) for seed in (1, 2))
    assert_same(one.validation_batch(0), two.validation_batch(0))
    assert numbered([9] * 100).num_validation_batches == 0


# Sources

def test_files_are_read_as_their_bytes_and_empty_ones_are_skipped(tmp_path):
    texts = {"a.txt": "alpha é ".encode() * 5, "b.txt": b"", "c.txt": bytes(range(256)), "sub/d.txt": b"x"}
    (tmp_path / "sub").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    # The second glob names a.txt again: counted once.
    packed = opened("text", [f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/../a*"], seq_len=11, global_batch=1)
    whole = b"".join(texts.values())
    assert packed.train[0].tokens_per_epoch == len(whole) + 3
    tokens = sequences(packed, packed.train[0].tokens_per_epoch)["tokens"]
    np.testing.assert_array_equal(np.bincount(tokens.ravel(), minlength=257)[:256],
                                  11 * np.bincount(np.frombuffer(whole, np.uint8), minlength=256))
    assert tokens.max() == BOS


def test_the_standard_library_is_a_source_in_a_fixed_order_without_tests_and_packages():
    files = sources.open_source("stdlib", [])
    assert len(files.paths) > 100 and list(files.paths) == sorted(files.paths)
    assert not [path for path in files.paths if "site-packages" in path or "/test/" in path or not path.endswith(".py")]
    packed = opened("stdlib", seq_len=512, global_batch=8, validation_fraction=0.01)
    text = b"".join(files.read(d, 0, length) for d, length in enumerate(files.lengths)).decode("utf-8", errors="replace")
    rows = packed.batch(0)
    for tokens, segments in zip(rows["tokens"], rows["segments"]):
        first = tokens[(segments == 1) & (tokens != BOS)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        assert first.strip("\N{REPLACEMENT CHARACTER}") in text  # cut within a character


# Mistakes

@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"0123456789" * 10)
    return path


@pytest.mark.parametrize("name, paths, message", [
    ("stlib", [], r"'stlib' is not a source; did you mean 'stdlib'\?"),
    ("stdlib", ["a.txt"], r"data.paths=.* is not read by data.source='stdlib'"),
    ("text", "a.txt", r"use a list: \['a.txt'\]"),
    ("text", [], "give at least one file or glob"),
])
def test_a_source_that_cannot_be_opened_is_refused_with_the_remedy(name, paths, message):
    with pytest.raises(ValueError, match=message):
        sources.open_source(name, paths)


@pytest.mark.parametrize("changes, message", [
    ({"seq_len": 0}, "data.seq_len=0 .* at least 1"),
    ({"global_batch": -3}, "data.global_batch=-3 .* at least 1"),
    ({"seed": -1}, "run.seed=-1 is negative"),
    ({"validation_fraction": 1.0}, "data.validation_fraction=1.0 .* below 1"),
    ({"global_batch": 13}, r"seq_len=8 × data.global_batch=13 is a batch of 104 tokens, .* hold 101: .*"
                           r"use data.global_batch ≤ 12 or data.seq_len ≤ 7 or more text"),
    ({"seq_len": 200}, r"seq_len=200 × data.global_batch=2 .* use data.seq_len ≤ 50 or more text"),
    ({"validation_fraction": 0.07}, r"validation_fraction=0.07 holds out 8 of 102 tokens, and one sequence of data.seq_len=8"),
])
def test_a_setting_that_cannot_work_is_refused_with_the_remedy(text_file, changes, message):
    with pytest.raises(ValueError, match=message):
        opened("text", [text_file], **changes)


def test_settings_just_large_enough_are_accepted(text_file):
    opened("text", [text_file], seq_len=101, global_batch=1).batch(0)
    assert opened("text", [text_file], validation_fraction=0.08).num_validation_batches == 1


@pytest.mark.parametrize("weights, changes, message", [
    ([1, 0], {}, r"data.mixture\[1\].weight=0 is not a positive number"),
    ([-1, float("nan")], {}, r"(?s)data.mixture\[0\].weight=-1 .*data.mixture\[1\].weight=nan "),
    ([1, float("inf")], {}, r"data.mixture\[1\].weight=inf is not a positive number"),
    ([1, 3], {"global_batch": 20}, r"data.mixture\[1\] is 0.75 of the mixture, 150 tokens in a batch of data.seq_len=10 × "
                                   r"data.global_batch=20, .* hold 110: .* use a weight ≤ 0.55 of the sum, a smaller batch"),
    ([1, 1], {"validation_fraction": 0.04}, r"validation_fraction=0.04 holds out 5 of the 102 tokens of data.mixture\[1\], "
                                            r"which end a mixture with 0.5 of them after 10 tokens, and one sequence of "
                                            r"data.seq_len=20 takes 21"),
    ([1, 1], {"validation_fraction": 0.009}, r"holds out 0 of the 101 tokens of data.mixture\[1\]"),
])
def test_a_mixture_that_cannot_work_is_refused_with_the_remedy(weights, changes, message):
    with pytest.raises(ValueError, match=message):
        mixed([[500], [100] if "validation_fraction" in changes else [10] * 10], weights,
              **{"seq_len": 10, "global_batch": 2, **({"seq_len": 20} if "validation_fraction" in changes else {}), **changes})


def test_all_mistaken_settings_are_told_together(text_file):
    with pytest.raises(ValueError, match="(?s)seq_len=0.*global_batch=0.*seed=-1"):
        opened("text", [text_file], seq_len=0, global_batch=0, seed=-1)


def test_paths_that_lead_nowhere_are_named(text_file, tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    for path, message in [(tmp_path / "*.md", r"'.*\*\.md' matches no file"), (tmp_path, "is a directory; name its files"),
                          (tmp_path / "dang*", "dangling.txt cannot be read: No such file")]:
        with pytest.raises(ValueError, match=message):
            opened("text", [text_file, path])


def test_an_unreadable_file_is_named(text_file, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read anything
    with pytest.raises(ValueError, match="text.txt cannot be read: no permission"):
        opened("text", [text_file])


def test_nothing_but_empty_files_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="all 1 files of data.paths are empty .*empty.txt"):
        opened("text", [tmp_path / "empty.txt"])


def test_a_python_without_library_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match="finds no .py file under"):
        sources.list_stdlib(str(tmp_path))


def test_a_file_that_shrinks_during_the_run_stops_it(text_file):
    packed = opened("text", [text_file])
    text_file.write_bytes(b"short")
    with pytest.raises(OSError, match="text.txt had 100 bytes .* must not change"):
        for n in range(6):
            packed.batch(n)


@pytest.mark.parametrize("wrong", [lambda d: d.batch(-1), lambda d: d.batch(0, [2]), lambda d: d.validation_batch(-1)])
def test_rows_and_batches_that_do_not_exist_are_refused(text_file, wrong):
    with pytest.raises(IndexError):
        wrong(opened("text", [text_file], validation_fraction=0.2))
