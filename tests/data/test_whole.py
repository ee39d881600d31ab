"""Sequences of whole documents: none cut, each once an epoch, and any batch found from (seed, n) alone."""
import dataclasses
import functools
import json

import numpy as np
import pytest
from documents import BOS, FIRST_ID, assert_same, numbered, pack, shapes, validation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import Endless

from meshtrain.data.batches import order, whole
from meshtrain.names import NO_TARGET

EOS = 7
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any)


def packed_whole(lengths, shape, **more):
    """As many documents as make a batch, whose tokens are all different."""
    seq_len, global_batch, seed = shape
    lengths = (lengths * (global_batch * seq_len + 1))[:max(len(lengths), global_batch * seq_len)]
    return lengths, numbered(lengths, seq_len=seq_len, global_batch=global_batch, seed=seed,
                             packing="whole", eos=EOS, **more)


def rows_of(packed, count, first=0):
    """`count` sequences of training from sequence `first` on, by batches."""
    B = packed.shape.global_batch
    batches = [packed.batch(n) for n in range(first // B, -(-(first + count) // B))]
    return {key: np.concatenate([batch[key] for batch in batches])[first % B:][:count] for key in batches[0]}


def documents(rows):
    """The tokens of each segment."""
    return [tokens[segments == k].tolist() for tokens, segments in zip(rows["tokens"], rows["segments"])
            for k in range(1, segments.max() + 1)]


@settings(deadline=None, max_examples=40)
@given(sizes, shapes)
def test_an_epoch_has_every_document_once_and_whole_where_a_sequence_has_room(lengths, shape):
    T = shape[0]
    lengths, packed = packed_whole(lengths, shape)
    stream, = packed.train
    texts = [[BOS, *range(FIRST_ID + end - n, FIRST_ID + end)] for end, n in zip(np.cumsum(lengths), lengths)]
    wanted = sorted(text[k:k + T] for text in texts for k in range(0, len(text), T))
    for epoch in (0, 2):
        rows = rows_of(packed, stream.num_sequences, epoch * stream.num_sequences)
        assert sorted(documents(rows)) == wanted
        assert ((rows["segments"] == 0) <= (rows["targets"] == NO_TARGET)).all()


@settings(deadline=None, max_examples=30)
@given(sizes, shapes)
def test_targets_are_those_of_each_document_by_itself(lengths, shape):
    T = shape[0]
    lengths, packed = packed_whole(lengths, shape)
    ends = set((FIRST_ID + np.cumsum(lengths) - 1).tolist())
    rows = rows_of(packed, min(60, packed.train[0].num_sequences))
    for tokens, targets, segments, positions in zip(
            *(rows[key] for key in ("tokens", "targets", "segments", "positions"))):
        assert (targets[segments == 0] == NO_TARGET).all()
        for k in range(1, segments.max() + 1):
            here = segments == k
            assert (positions[here] == np.arange(here.sum())).all() and BOS not in tokens[here][1:]
            assert targets[here][:-1].tolist() == tokens[here][1:].tolist()
            last, target = tokens[here][-1], targets[here][-1]
            assert target == EOS if last in ends else target == NO_TARGET if last == BOS and T > 1 else \
                target == last + 1 or last == BOS


@settings(deadline=None, max_examples=30)
@given(sizes, shapes, st.integers(0, 300), st.randoms())
def test_a_batch_is_the_same_for_a_process_that_saw_none_before_and_however_its_rows_are_split(
        lengths, shape, n, random):
    _, packed = packed_whole(lengths, shape)
    packed.batch(0)
    batch = packed.batch(n)
    assert_same(packed_whole(lengths, shape)[1].batch(n), batch)
    rows = list(range(shape[1]))
    random.shuffle(rows)
    assert_same(packed_whole(lengths, shape)[1].batch(n, rows), {key: array[rows] for key, array in batch.items()})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(60, 90))
def test_best_fit_fills_bins_without_overlap_and_opens_one_only_where_none_has_room(lengths, capacity):
    lengths = np.array(lengths)
    bins, places, count = whole.best_fit(lengths, capacity)
    used = np.zeros((count, capacity), int)
    for length, bin, place in zip(lengths, bins, places):
        used[bin, place:place + length] += 1
    assert used.max() == 1 and used.sum() == lengths.sum() and (used.sum(1) > 0).all()
    # Best fit decreasing never leaves two bins that would go into one.
    full = np.sort(used.sum(1))
    assert count == 1 or full[0] + full[1] > capacity
    assert count <= 11 / 9 * -(-lengths.sum() // capacity) * 1.3 + 1


def test_epochs_differ_in_the_order_of_sequences_and_seeds_in_who_shares_one(monkeypatch):
    monkeypatch.setattr(order, "WINDOW", 16)
    lengths = (np.random.default_rng(0).integers(3, 15, 400)).tolist()
    seen = {}
    for seed in (0, 1):
        packed = numbered(lengths, seq_len=32, global_batch=4, seed=seed, packing="whole")
        R = packed.train[0].num_sequences
        seen[seed] = [[tuple(row) for row in rows_of(packed, R, epoch * R)["tokens"]] for epoch in (0, 1, 2)]
        first, second, third = seen[seed]
        assert sorted(first) == sorted(second) == sorted(third) and first != second != third != first
    assert len(set(seen[0][0]) & set(seen[1][0])) < 40


def test_mixtures_hold_their_shares_in_sequences_and_keep_every_document_whole():
    def source(sizes, first):
        return dataclasses.replace(numbered(sizes).train[0].part.source, first_id=first)
    rng = np.random.default_rng(1)
    packed = pack([source(rng.integers(1, 20, 300), 1000), source(rng.integers(1, 9, 500), 100000)],
                  [3, 1], bos=BOS, seed=0,
                  seq_len=24, global_batch=8, packing="whole")
    for n in range(12):
        tokens = packed.batch(n)["tokens"]
        second = (tokens >= 100000).any(1)
        assert second.sum() == 2 and not ((tokens >= 1000) & (tokens < 100000))[second].any()


def test_a_run_goes_on_with_another_batch_and_mixture_and_not_with_another_length_or_packing():
    lengths = np.random.default_rng(2).integers(1, 30, 300).tolist()
    make = lambda **more: numbered(lengths, **{"seq_len": 32, "global_batch": 4, "packing": "whole", **more})
    before, position = make(), None
    position = json.loads(json.dumps(make().position(10)))
    assert_same(make(position=position).batch(11), before.batch(11))
    twice = make(global_batch=8, position=position)
    assert_same(twice.batch(10), {key: array if key != "sequence" else np.arange(80, 88)
                                  for key, array in rows_of(before, 8, 40).items()})
    for more, part in (({"seq_len": 64}, "data.seq_len=64, but the checkpoint was trained with 32"),
                       ({"packing": "stream"}, 'data.packing="stream", but the checkpoint was trained with "whole"')):
        with pytest.raises(ValueError, match=part):
            make(position=position, **more)
    with pytest.raises(ValueError, match='data.packing="whole", but the checkpoint was trained with "stream"'):
        make(position={key: value for key, value in make(packing="stream").position(3).items() if key != "packing"})


def test_validation_gives_every_held_out_document_once_and_whole():
    lengths = np.random.default_rng(3).integers(1, 30, 200).tolist()
    packed = numbered(lengths, seq_len=32, global_batch=4, packing="whole", validation_fraction=0.1, eos=EOS)
    held, = packed.validation
    ids = np.concatenate([validation(held, "tokens"), rows_of(packed, packed.train[0].num_sequences)["tokens"].ravel()])
    assert (np.bincount(ids[ids >= FIRST_ID] - FIRST_ID) == 1).all() and (ids >= FIRST_ID).sum() == sum(lengths)
    one, = numbered([9, 5, 30], seq_len=32, global_batch=1, packing="whole", validation_fraction=0.1,
                    eos=EOS).validation
    # the shortest document, whole
    assert (validation(one, "targets") != NO_TARGET).sum() == 6 and one.num_batches == 1


def test_too_few_documents_for_a_batch_or_a_validation_are_told():
    with pytest.raises(ValueError,
                       match='makes 2 sequences of data.seq_len=16 from the data, .* data.global_batch=4 is 4; use a '
                             'smaller batch'):
        numbered([9, 9], seq_len=16, global_batch=4, packing="whole")
    with pytest.raises(ValueError,
                       match="data.validation_fraction=0.5 holds out no document; use a larger fraction, more "
                             "documents"):
        numbered([9], seq_len=16, global_batch=1, packing="whole", validation_fraction=0.5)


def test_documents_that_are_too_long_are_counted_with_what_they_lose(monkeypatch):
    monkeypatch.setattr(whole, "PASS_DOCUMENTS", 3)
    source = numbered([3, 15, 16, 40, 0, 9]).train[0].part.source
    assert whole.too_long(source, 16) == (0, 0)     # they are divided
    object.__setattr__(source, "complete", True)
    assert whole.too_long(source, 16) == (2, 1 + 25)
    assert whole.too_long(source, 64) == (0, 0)


def test_padding_is_told_where_it_is_much():
    told = lambda lengths: whole.measure_filling(numbered(lengths).train[0].part.source, 16)
    assert told([15] * 20) == (1.0, 20) and told([31, 47]) == (1.0, 2)
    assert told([9] * 20) == (10 / 16, 20) and told([16 + 9] * 20) == (26 / 32, 20)


def test_a_hundred_million_documents_are_begun_without_a_pass_over_them():
    source = Endless()
    packed = pack([source], [1.0], bos=0, seed=0, seq_len=4096, global_batch=16, packing="whole")
    packed.batch(0)
    stream, = packed.train
    assert stream._counted <= 2


@functools.cache
def fill(seq_len):
    lengths = np.minimum(1 + np.random.default_rng(0).exponential(500, 8192).astype(int), seq_len)
    return lengths.sum() / (whole.best_fit(lengths, seq_len)[2] * seq_len)


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_sequences_of_many_documents_are_nearly_full(seq_len):
    assert fill(seq_len) > 0.99
