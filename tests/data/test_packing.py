"""Batches: every token an input once an epoch, the same on every layout, nothing learnt across documents but their
end."""
import hashlib
import threading
import time

import numpy as np
import pytest
from documents import BOS, FIRST_ID, assert_same, corpora, mixed, numbered, pack_drawn, sequences, shapes
from hypothesis import given, settings, strategies as st

from meshtrain import names
from meshtrain.data.documents import contracts

NO_LOSS = names.NO_TARGET
EOS = 7


@settings(deadline=None, max_examples=30)
@given(corpora, shapes, st.booleans())
def test_every_token_is_an_input_once_and_a_target_once_per_epoch(lengths, shape, document_mask):
    lengths, packed = pack_drawn(lengths, shape, document_mask=document_mask, eos=EOS)
    per_epoch, written = sum(lengths) + len(lengths), np.count_nonzero(lengths)
    # T epochs are a whole number of sequences: exact counts.
    T = shape[0]
    rows = sequences(packed, per_epoch)
    for key, bos, eos in (("tokens", len(lengths), 0), ("targets", 0, written)):
        counts = np.bincount(rows[key][rows[key] >= 0], minlength=FIRST_ID + sum(lengths))
        assert (counts[FIRST_ID:] == T).all(), key
        assert (counts[BOS], counts[EOS]) == (bos * T, eos * T)     # an empty document ends nothing
        assert counts.sum() == counts[FIRST_ID:].sum() + counts[BOS] + counts[EOS]
    # One epoch, its last sequence filled up from the next.
    first = sequences(packed, -(-per_epoch // T))["tokens"]
    counts = np.bincount(first.ravel(), minlength=FIRST_ID + sum(lengths))[FIRST_ID:]
    assert counts.min() == 1 and (counts > 1).sum() < T


@settings(deadline=None, max_examples=30)
@given(corpora, shapes, st.sampled_from([BOS, EOS]))
def test_targets_segments_and_positions_stay_within_a_document_and_its_end_is_the_last_target(lengths, shape, eos):
    lengths, packed = pack_drawn(lengths, shape, eos=eos)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    firsts = FIRST_ID + np.flatnonzero(np.diff(document_of, prepend=-1))
    rows = sequences(packed, 20)
    for tokens, targets, segments, positions in zip(*(rows[k] for k in ("tokens", "targets", "segments", "positions"))):
        segment, position = 1, 0
        for t, token in enumerate(tokens):
            if token == BOS and t > 0:
                segment, position = segment + 1, 0
            assert (segments[t], positions[t]) == (segment, position)
            position += 1
            follows = document_of[1:] == document_of[:-1]
            if token == BOS:    # of a text, or of an empty document
                assert targets[t] in firsts or targets[t] == NO_LOSS and 0 in lengths
            elif token - FIRST_ID < len(follows) and follows[token - FIRST_ID]:
                assert targets[t] == token + 1
            else:
                assert targets[t] == eos
            if t + 1 < len(tokens) and targets[t] >= FIRST_ID:
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


@settings(deadline=None, max_examples=30)
@given(corpora, shapes, st.integers(0, 200), st.randoms())
def test_a_batch_is_the_same_after_a_restart_and_however_its_rows_are_split(lengths, shape, n, random):
    lengths, packed = pack_drawn(lengths, shape)
    whole = packed.batch(n)
    _, restarted = pack_drawn(lengths, shape)
    assert_same(restarted.batch(n), whole)
    rows = list(range(shape[1]))
    random.shuffle(rows)
    assert_same(packed.batch(n, rows), {key: value[rows] for key, value in whole.items()})
    cut = random.randint(0, shape[1])
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
    batches = contracts.iterate(packed, 7, slice(1, 3), prefetch)
    for n in range(7, 40):
        assert_same(next(batches), packed.batch(n, slice(1, 3)))
    batches.close()
    for _ in range(500):  # they end on their own time
        if threading.active_count() <= before:
            return
        time.sleep(0.01)
    pytest.fail(f"threads left behind: {threading.enumerate()}")


@pytest.mark.parametrize("seq_len, global_batch, seed, document_mask, train, validation", [
    (16, 4, 0, True, "be314aae70b0f902", "7f10ac61fe050155"),
    (16, 4, 0, False, "3d636c5922f47978", "138da310eb351bd3"),
    (7, 9, 5, True, "d4afb2f917a8e4ac", "07fadf04caca117c"),
    (128, 3, 2**40 + 7, True, "afd0d70118f7f86e", "7ff31589f530e007"),
])
def test_every_array_of_a_seed_never_changes(seq_len, global_batch, seed, document_mask, train, validation):
    """Golden hashes: whatever changes them sends every run that goes on to other data."""
    packed = numbered((np.random.PCG64(1).random_raw(60) % np.uint64(90)).astype(np.int64), seq_len=seq_len,
                      global_batch=global_batch, seed=seed, document_mask=document_mask, validation_fraction=0.2)

    def digest(batches):
        hashed = hashlib.blake2b(digest_size=8)
        for batch in batches:
            for key in sorted(batch):
                hashed.update(f"{key}{batch[key].shape}".encode() + batch[key].tobytes())
        return hashed.hexdigest()
    assert digest(packed.batch(n) for n in (0, 1, 2, 17, 40, 1000, 123456)) == train
    held, = packed.validation
    assert digest(held.batch(i) for i in range(held.num_batches)) == validation


def test_one_long_document_does_not_fill_a_batch_with_neighbours():
    starts = np.sort(numbered([10_000], seq_len=10, global_batch=50).batch(0)["tokens"][:, 0])
    assert starts[-1] - starts[0] > 5_000
