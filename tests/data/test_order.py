"""The order of a source's tokens: permutations that nobody holds, the same for ever, and what is held out of them."""
import contextlib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import documents
from documents import BOS, FIRST_ID, Numbered, assert_same, corpora, mixed, numbered, pack_drawn, sequences, shapes, validation
from hypothesis import example, given, settings, strategies as st

from meshtrain.data.batches import holdout, order
from meshtrain.data.documents import contracts

sizes = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 60))    # RUNS, WINDOW, CHUNK_TOKENS


@contextlib.contextmanager
def small(sizes):
    """Runs, windows and chunks so small that a few documents fill several."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in zip((contracts, order, order), ("RUNS", "WINDOW", "CHUNK_TOKENS"), sizes):
            patch.setattr(module, name, value)
        yield


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**64))
@example(1, 0)
@example(2, 0)
def test_permutations_and_bijections_give_every_number_once(count, seed):
    np.testing.assert_array_equal(np.sort(order.permutation(count, seed)), np.arange(count))
    places = order.bijection(np.arange(count), count, seed)
    np.testing.assert_array_equal(np.sort(places), np.arange(count))
    some = np.arange(0, count, 7)
    np.testing.assert_array_equal(order.bijection(some, count, seed), places[some])


@pytest.mark.parametrize("make", [order.permutation, lambda n, *key: order.bijection(np.arange(n), n, *key)])
def test_every_number_comes_to_every_place_about_equally_often(make):
    for count in (2, 3, 5, 12):
        at = np.zeros((count, count))
        for seed in range(1000):
            at[np.arange(count), make(count, seed)] += 1
        # Binomial counts: six standard deviations.
        assert np.abs(at - 1000 / count).max() < 6 * (1000 / count) ** 0.5


def test_orders_never_change():
    """Golden numbers: whatever changes them sends every run that goes on to other data."""
    assert order.permutation(12, 3, 0).tolist() == [0, 4, 9, 7, 1, 10, 5, 6, 11, 3, 8, 2]
    assert order.bijection(np.arange(12), 12, 3, 0).tolist() == [7, 11, 8, 2, 10, 9, 1, 5, 4, 0, 6, 3]
    assert order.bijection(np.array([10**12]), 10**13, 5).tolist() == [8729574056437]
    held = holdout.split(Numbered(np.full(40, 5)), 0.1)[1]
    assert held.runs.tolist() == [3, 11, 13, 20]


@pytest.mark.parametrize("runs", [1, 2, 3, 7, 8, 100])
def test_runs_are_few_and_their_totals_are_those_of_their_documents(runs, monkeypatch):
    monkeypatch.setattr(contracts, "RUNS", runs)
    lengths = np.array([3, 0, 5, 1, 2, 0, 9, 4])
    run = contracts.run_length(len(lengths))
    found = contracts.totals(len(lengths), lambda documents: np.cumsum(lengths)[documents])
    assert found.tolist() == [lengths[i:i + run].sum() for i in range(0, len(lengths), run)] and len(found) <= runs


@settings(deadline=None, max_examples=30)
@given(corpora, shapes, sizes)
@example([0, 0, 1], (17, 5, 0), (1, 1, 1))
def test_every_token_of_an_epoch_comes_once_however_runs_windows_and_chunks_fall(lengths, shape, sizes):
    with small(sizes):
        lengths, packed = pack_drawn(lengths, (shape[0], 1, shape[2]))
        per_epoch = sum(lengths) + len(lengths)
        rows = sequences(packed, 2 * per_epoch)["tokens"]      # 2 T epochs
        for ids in np.split(rows, 2):
            counts = np.bincount(ids.ravel(), minlength=FIRST_ID + sum(lengths))
            assert (counts[FIRST_ID:] == shape[0]).all() and counts[BOS] == len(lengths) * shape[0]
        first = rows[:-(-per_epoch // shape[0])].ravel()    # an epoch is over before the next repeats anything
        counts = np.bincount(first, minlength=FIRST_ID + sum(lengths))[FIRST_ID:]
        assert counts.min() == 1 and (counts > 1).sum() < shape[0]


@settings(deadline=None, max_examples=30)
@given(corpora, shapes, sizes, st.integers(0, 300))
def test_a_sequence_anywhere_is_found_by_a_process_that_saw_none_before(lengths, shape, sizes, n):
    with small(sizes):
        lengths, packed = pack_drawn(lengths, shape)
        sequences(packed, 3)
        assert_same(pack_drawn(lengths, shape)[1].batch(n), packed.batch(n))


def documents_of(stream, epoch):
    return tuple(np.concatenate([stream.window(epoch, k).documents for k in range(stream.num_windows)]))


@pytest.mark.parametrize("sizes", [(2**20, 8192, 2**26), (20, 8, 60)])
def test_seeds_epochs_and_sources_shuffle_documents_and_sequences_differently(sizes):
    with small(sizes):
        packs = [mixed([[5] * 40] * 3, [1, 1, 1], seq_len=6, global_batch=3, seed=seed) for seed in (0, 1)]
        streams = [(stream, epoch) for packed in packs for stream in packed.train for epoch in (0, 1)]
        documents = [documents_of(stream, epoch) for stream, epoch in streams]
        assert len(set(documents)) == 12 and all(sorted(order) == list(range(40)) for order in documents)
        dealt = [tuple(stream.stream_positions((np.arange(40) + 40 * epoch) * 6) // 6 - 40 * epoch)
                 for stream, epoch in streams]
        assert len(set(dealt)) == 12 and all(sorted(places) == list(range(40)) for places in dealt)


def test_neighbours_in_the_order_come_from_all_over_the_corpus():
    with small((500, 400, 2**26)):
        stream, = numbered([3] * 5000).train
        documents = np.array(documents_of(stream, 0))
    assert 0.2 < np.median(np.abs(np.diff(documents))) / 5000 < 0.4      # 0.29 of independent ones
    assert (np.diff(documents) == 1).mean() < 0.02


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


class Endless:
    """10**8 documents of 400,000 tokens each, 10**10 sequences of 4,096, whose ends are computed."""
    num_documents = 10**8

    def ends(self, documents):
        return (documents + 1) * 400_000

    @property
    def totals(self):
        return contracts.totals(self.num_documents, self.ends)

    def read(self, document, start, stop):
        return np.zeros(stop - start, np.int32)


def test_a_hundred_million_documents_are_opened_and_read_in_50_megabytes():
    tracemalloc.start()
    packed = documents.pack([Endless()], [1.0], bos=BOS, seq_len=4096, global_batch=4,
                            seed=0, validation_fraction=0.001)
    for n in (0, 10**9):
        packed.batch(n)
    opened, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed.train[0].tokens_per_epoch // 4096 > 9.7e9
    assert opened < 50e6


# What is held out

class View:
    """The tokens of every document that a part has."""

    def __init__(self, part):
        run = contracts.run_length(part.source.num_documents)
        documents = np.concatenate([np.arange(r * run, min((r + 1) * run, part.source.num_documents))
                                    for r in part.runs]
                                   or [[]]).astype(np.int64)
        self.spans = [(d, s, n) for d, s, n in zip(documents, *part.spans(documents))] if len(documents) else []
        assert part.num_tokens == sum(n + 1 for _, _, n in self.spans)
        self.documents, self.tokens = set(documents.tolist()), sum(n for _, _, n in self.spans)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60).filter(any), st.floats(0, 0.99),
       st.sampled_from([2**20, 7]))
def test_training_and_validation_share_no_token_and_lose_none(lengths, fraction, num_runs):
    with small((num_runs, 8, 60)):
        whole = contracts.run_length(len(lengths)) > 1
        train, held_out = map(View, holdout.split(Numbered(np.array(lengths)), fraction))
        seen = [np.zeros(length, int) for length in lengths]
        for view in (train, held_out):
            for document, start, length in view.spans:
                assert start + length <= lengths[document]
                seen[document][start:start + length] += 1
        assert all((count == 1).all() for count in seen)
        wanted = int(fraction * sum(lengths))
        if whole:
            assert not train.documents & held_out.documents
        else:   # half of the share at least; tails are rounded down once per document
            assert wanted / 2 - len(lengths) - 1 <= held_out.tokens <= wanted


def test_whole_documents_are_held_out_where_there_are_many():
    train, held_out = map(View, holdout.split(Numbered(np.full(1000, 20)), 0.05))
    assert not train.documents & held_out.documents
    assert len(held_out.documents) == 50 and held_out.tokens == 1000
    assert np.ptp(list(held_out.documents)) > 500  # from all over the corpus
    # one that nearly fills the share on its own does not cost the others their wholeness
    for place in range(0, 100, 7):
        lengths = np.full(100, 20)
        lengths[place] = 100
        train, held_out = map(View, holdout.split(Numbered(lengths), 0.055))
        assert not train.documents & held_out.documents


def test_one_whole_document_of_half_the_share_is_enough():
    train, held_out = map(View, holdout.split(Numbered(np.array([40, 2, 58])), 0.04))      # 4 of 100 tokens
    assert (train.documents, held_out.documents, held_out.tokens) == ({0, 2}, {1}, 2)
    train, held_out = map(View, holdout.split(Numbered(np.array([40, 2, 58])), 0.05))      # 5: 2 are less than half
    assert train.documents == {0, 1, 2} and 2 < held_out.tokens <= 5


def test_of_millions_of_documents_one_run_at_least_is_held_out():
    with small((20, 8, 60)):
        train, held_out = map(View, holdout.split(Numbered(np.full(200, 5)), 0.01))
    assert len(held_out.documents) == 10 and train.tokens == 950


def test_the_end_of_what_is_kept_of_a_document_is_not_learned_as_its_end():
    packed = numbered([100], seq_len=7, validation_fraction=0.2)
    targets = sequences(packed, 7 * 81)["targets"]
    assert (targets == -1).sum() == 49 and BOS not in targets      # once in each of the 49 epochs
    held, = packed.validation
    targets = validation(held, "targets")
    np.testing.assert_array_equal(targets[targets >= 0], [*range(FIRST_ID + 80, FIRST_ID + 100), BOS])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(1, 6), st.booleans())
@example(1, 1, False)
def test_validation_batches_give_every_held_out_token_once_and_pad_the_rest(seq_len, global_batch, document_mask):
    packed = numbered([20] * 60, seq_len=seq_len, global_batch=global_batch, validation_fraction=0.2,
                      document_mask=document_mask, eos=7)
    held, = packed.validation
    expected = np.concatenate([np.r_[BOS, packed.train[0].part.source.read(d, 0, 20)] for d in held.stream.part.runs])
    tokens, targets, segments = (validation(held, key) for key in ("tokens", "targets", "segments"))
    np.testing.assert_array_equal(tokens[segments > 0], expected)
    assert (targets[segments == 0] == -1).all() and (tokens[segments == 0] == 0).all()
    wanted = np.append(expected[1:], BOS)
    np.testing.assert_array_equal(targets[segments > 0], np.where(wanted == BOS, 7, wanted))
    assert all((held.batch(i)["targets"] != -1).any() for i in range(held.num_batches))     # no batch without a target
    with pytest.raises(IndexError, match=f"{held.num_batches} of {held.num_batches}"):
        held.batch(held.num_batches)
