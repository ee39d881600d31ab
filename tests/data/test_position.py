"""A run that goes on with other weights, lengths or batches: every source goes on behind its last token, none comes
twice."""
import json

import numpy as np
import pytest
from documents import BOS, FIRST_ID, assert_same, full, mix_drawn, mixed, mixtures, numbered, shapes
from hypothesis import given, settings, strategies as st
from test_order import sizes, small


def go_on(make, packed, batches):
    """What `make` packs behind the first batches of another run, whose position went through a checkpoint."""
    return make(position=json.loads(json.dumps(packed.position(batches))))


def ids(batches):
    return np.concatenate([np.ravel(batch["tokens"]) for batch in batches] or [np.zeros(0, int)])


@settings(deadline=None, max_examples=30)
@given(mixtures, shapes, sizes, st.integers(0, 30), st.integers(0, 30))
def test_with_the_same_settings_every_batch_is_the_same_bit_for_bit(mixture, shape, sizes, n, more):
    with small(sizes):
        _, packed = mix_drawn(mixture, shape)
        position = json.loads(json.dumps(packed.position(n)))
        _, again = mix_drawn(mixture, shape, position=position)
        for batch in (0, n, n + more):
            assert_same(again.batch(batch), packed.batch(batch))
        assert again.position(n + more) == packed.position(n + more)


@pytest.mark.parametrize("chunk, ends", [(1000, 36), (12, 24)])
def test_the_old_length_holds_to_the_end_of_the_chunk_and_never_beyond_the_epoch(chunk, ends):
    with small((2**20, 8, chunk)):
        stream, = numbered([7, 9, 8, 8], seq_len=4).train       # an epoch of 36 tokens, with its separators
        (old, new) = stream.regrid(17, 6)[0], stream.regrid(17, 6)[-1]
    assert (old.seq_len, old.until, new.seq_len, new.until) == (4, ends, 6, None)


settings_of_a_run = st.tuples(st.integers(1, 17), st.integers(1, 5))


@settings(deadline=None, max_examples=60)
@given(full, settings_of_a_run, st.lists(st.tuples(settings_of_a_run, st.integers(0, 6)),
                                         min_size=1, max_size=4), sizes)
def test_after_any_changes_of_length_and_batch_every_token_comes_once_per_epoch(lengths, last, phases, sizes):
    while sum(lengths) < 17 * 5:
        lengths = lengths + lengths
    per_epoch = sum(lengths) + len(lengths)
    with small(sizes):
        plain = numbered(lengths, seq_len=per_epoch)    # one sequence an epoch: nothing is shuffled
        flat = ids([plain.batch(epoch) for epoch in range(30)])
        position, done, places = None, 0, []
        for (seq_len, global_batch), batches in [*phases, (last, 0)]:
            packed = numbered(lengths, seq_len=seq_len, global_batch=global_batch, position=position)
            begin, end = packed.tokens(done), packed.tokens(done + batches)
            stream, = packed.train
            assert (stream.grids[-1].base - packed.phase.tokens[0]) % seq_len == 0      # whole sequences are whole rows
            places.append(stream.stream_positions(np.arange(begin, end)))
            given = ids([packed.batch(done + i) for i in range(batches)])
            np.testing.assert_array_equal(np.sort(given), np.sort(flat[places[-1]]))
            position, done = packed.position(done + batches), done + batches
        grid = stream.grids[-1]
        epoch = max(packed.tokens(done), grid.base) // per_epoch + 1
        _, after = stream._sequences(grid, epoch)      # where the sequences of an epoch end, nothing is begun
        end = grid.base + after * grid.seq_len
        places.append(stream.stream_positions(np.arange(packed.tokens(done), end)))
        np.testing.assert_array_equal(np.sort(np.concatenate(places)), np.arange(end))


def test_weights_may_change_and_the_mixture_keeps_to_the_new_ones_from_there_on():
    lengths = [[5] * 40, [7] * 60]

    def make(weights, **settings):
        return mixed(lengths, weights, seq_len=6, global_batch=5, **settings)

    old = make([1, 1])
    new = go_on(lambda **settings: make([1, 4], **settings), old, 11)
    assert new.position(11)["sources"][0]["tokens"] == old.position(11)["sources"][0]["tokens"]
    for n in range(11, 30):
        given = [source["tokens"] for source in new.position(n)["sources"]]
        before = [source["tokens"] for source in new.position(11)["sources"]]
        assert abs(given[0] - before[0] - (n - 11) * 30 / 5) <= 1
    # Each source gives, over both, what it gives alone.
    every = ids([old.batch(n) for n in range(11)] + [new.batch(n) for n in range(11, 31)])
    for i, source in enumerate(new.position(31)["sources"]):
        counts = np.bincount(every, minlength=4000)[FIRST_ID * (i + 1):][:sum(lengths[i])]
        epochs = source["tokens"] / new.train[i].tokens_per_epoch
        assert set(counts) <= {int(epochs), int(epochs) + 1}


def test_a_second_change_before_the_first_has_taken_hold_loses_nothing():
    with small((2**20, 8192, 200)):
        lengths = [9] * 60
        packed = numbered(lengths, seq_len=10, global_batch=2)
        seen = [packed.batch(n) for n in range(3)]
        for n, (seq_len, global_batch) in ((3, (7, 3)), (4, (16, 1)), (6, (10, 2))):
            packed = numbered(lengths, seq_len=seq_len, global_batch=global_batch, position=packed.position(n))
            seen += [packed.batch(k) for k in range(n, {3: 4, 4: 6, 6: 40}[n])]
    given = ids(seen)[:600]
    assert (np.bincount(given[given != BOS], minlength=FIRST_ID + 540)[FIRST_ID:] <= 2).all()
    assert len(set(given)) > 530


def test_batches_before_a_change_are_not_of_this_run():
    old = numbered([50] * 4, seq_len=5, global_batch=2)
    new = numbered([50] * 4, seq_len=6, global_batch=2, position=old.position(4))
    with pytest.raises(IndexError, match="from batch 4 on"):
        new.batch(3)
    assert new.tokens(4) == 40 and new.tokens(6) == 64


def test_a_position_of_other_data_is_refused_with_the_remedy():
    position = numbered([50] * 4).position(3)
    for lengths, changes in (([50] * 5, {}), ([50] * 4, {"validation_fraction": 0.25})):
        with pytest.raises(ValueError, match=r"\[204\] tokens per epoch, but these have .* checkpoint.init_from"):
            numbered(lengths, position=position, **changes)
