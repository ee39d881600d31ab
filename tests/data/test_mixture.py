"""Mixtures: exact shares in every batch, each source in the order that it has alone, and hosts that read only their
rows."""
from fractions import Fraction

import numpy as np
import pytest
import documents
from documents import (
    BOS, FIRST_ID, Numbered, assert_same, full, mix_drawn, mixed, mixtures, numbered, shapes, source_of, validation,
)
from hypothesis import example, given, settings, strategies as st

from meshtrain.data.batches import mixture


@settings(deadline=None, max_examples=40)
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


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 2**60), min_size=1, max_size=12), st.integers(1, 2**60), st.integers(1, 5000),
       st.integers(0, 3))
@example([1, 1], 7, 1, 1)
def test_shares_add_up_never_fall_and_keep_to_their_bound(weights, quanta, quantum, more):
    total = quanta * quantum
    counts, later = (mixture.shares(weights, at, quantum) for at in (total, total + more * quantum))
    assert sum(counts) == total and all(count % quantum == 0 for count in counts)
    assert all(0 <= count <= then for count, then in zip(counts, later))
    bound = mixture.deviation(weights)
    k, whole = len(weights), sum(weights)
    assert all(abs(count - Fraction(weight * total, whole)) <= bound * quantum
               for count, weight in zip(counts, weights))
    assert bound <= (1 + sum(1 / i for i in range(1, k - 1))) / 2 if k > 1 else bound == 0


@settings(deadline=None, max_examples=25)
@given(full, st.integers(2, 4), st.integers(1, 17), st.integers(0, 2**40), st.randoms())
def test_every_source_of_a_mixture_gives_each_token_once_per_epoch(lengths, k, seq_len, seed, random):
    while sum(lengths) < seq_len:
        lengths = lengths + lengths
    packed = mixed([random.sample(lengths, len(lengths)) for _ in range(k)], [0.1] * k, seq_len=seq_len, global_batch=k,
                   seed=seed)
    # T epochs of each are a whole number of batches: exact counts.
    batches = [packed.batch(n) for n in range(packed.train[0].tokens_per_epoch)]
    for key in ("tokens", "targets"):
        ids = np.concatenate([batch[key].ravel() for batch in batches])
        counts = np.bincount(ids[ids >= 0], minlength=FIRST_ID * (k + 1))
        for i in range(1, k + 1):
            assert (counts[FIRST_ID * i:FIRST_ID * i + sum(lengths)] == seq_len).all(), key
        assert counts[BOS] == k * len(lengths) * seq_len
        assert counts.sum() == k * seq_len * (sum(lengths) + len(lengths))


@settings(deadline=None, max_examples=25)
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


@settings(deadline=None, max_examples=25)
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
            assert target in firsts if token == BOS else target == (BOS if token in ends else token + 1)
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
        # twice the bound: both ends of a batch are rounded
        assert np.abs(counts - np.array(weights) * 160).max() <= 2


def test_a_book_in_a_mixture_does_not_fill_a_batch_with_neighbours():
    packed = mixed([[900], [10] * 80], [0.5, 0.5], seq_len=10, global_batch=40)
    batch = packed.batch(0)
    book = batch["tokens"][(source_of(batch) == 0) & (batch["tokens"] != BOS)]
    assert np.ptp(book) > 600 and len(book) < 250
    rows = source_of(batch)[:, 0]
    assert all(5 < (half == 0).sum() < 15 for half in np.split(rows, 2))   # evenly, for hosts and microbatches


def test_a_source_shorter_than_a_sequence_comes_again_and_again_in_its_row():
    packed = mixed([[900], [3]], [0.9, 0.1], seq_len=17, global_batch=2)
    rows = [row for n in range(40) for row, source in zip(packed.batch(n)["tokens"].tolist(),
                                                          source_of(packed.batch(n))[:, 1])
            if source == 1]
    assert len(rows) == 8
    ids = np.array(rows).ravel()    # 34 epochs of one document: each sequence begins where the one before ended
    np.testing.assert_array_equal(ids, np.resize([BOS, 2000, 2001, 2002], len(ids)))


def test_weights_of_any_scale_mean_the_same():
    one, ten = (mixed([[50] * 4, [9] * 20], weights, seq_len=8, global_batch=4) for weights in ([0.25, 0.75], [1, 3]))
    assert_same(one.batch(3), ten.batch(3))


@settings(deadline=None, max_examples=25)
@given(mixtures, shapes, st.integers(0, 200), st.randoms(), st.booleans(), st.integers(1, 4))
def test_hosts_read_their_rows_of_a_mixture_and_no_others(mixture, shape, n, random, document_mask, num_hosts):
    corpora, packed = mix_drawn(mixture, shape, document_mask=document_mask)
    whole = packed.batch(n)
    rows = list(range(packed.shape.global_batch))
    random.shuffle(rows)
    hosts = [sorted(rows[i::num_hosts]) for i in range(num_hosts)]
    parts = []
    for mine in hosts:
        for stream in packed.train:
            stream.part.source.given.clear()
        parts.append(packed.batch(n, mine))
        given = [token for stream in packed.train for token in stream.part.source.given]
        seen = set(parts[-1]["tokens"].ravel()) | set(parts[-1]["targets"].ravel())
        # The token behind the last of a run is read as its target; of nothing else more than once.
        assert set(given) <= seen and len(given) <= parts[-1]["tokens"].size + len(mine) * (1 + 2 * len(corpora))
    order = np.argsort(np.concatenate(hosts), kind="stable")
    assert_same({key: np.concatenate([part[key] for part in parts])[order] for key in whole}, whole)


def test_every_source_of_a_mixture_is_validated_on_its_own():
    packed = mixed([[10] * 60, [20] * 30], [1, 3], seq_len=8, global_batch=3, validation_fraction=0.2,
                   names=["web", "books"])
    assert [(held.name, held.weight) for held in packed.validation] == [("web", 0.25), ("books", 0.75)]
    for i, held in enumerate(packed.validation):
        ids = validation(held, "tokens")
        assert set(ids[ids > BOS] // FIRST_ID - 1) == {i} and (ids > BOS).sum() == 120


def test_files_of_their_own_are_validated_on_and_nothing_else_is_held_out():
    train, other = Numbered(np.full(20, 5)), Numbered(np.full(4, 5), 5 * FIRST_ID)
    packed = documents.pack([train], [1.0], bos=BOS, seed=0, seq_len=4, global_batch=2, validation_fraction=0.3,
                          validation=[other])
    assert packed.train[0].tokens_per_epoch == 120
    ids = validation(packed.validation[0], "tokens")
    assert sorted(ids[ids > BOS]) == [*range(5 * FIRST_ID, 5 * FIRST_ID + 20)]
    with pytest.raises(ValueError,
                       match="the validation files hold 24 tokens, but one sequence of data.seq_len=25 takes 25"):
        documents.pack([train], [1.0], bos=BOS, seed=0, seq_len=25, global_batch=2, validation=[other])
