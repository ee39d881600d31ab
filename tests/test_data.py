"""The data order: every token once an epoch, the same batch on every layout, and nothing learnt across documents."""
import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from meshtrain.training import data, sources

FIRST_ID = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered:
    """Documents whose tokens are all different: FIRST_ID, FIRST_ID + 1, … through them all."""
    lengths: np.ndarray

    def read(self, document, start, stop):
        before = FIRST_ID + int(self.lengths[:document].sum())
        return np.arange(before + start, before + stop)


def numbered(lengths, **settings):
    return data.pack([Numbered(np.array(lengths, np.int64))], [1.0],
                     **{"bos": data.BOS, "seed": 0, "seq_len": 1, "global_batch": 1, **settings})


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
        assert counts[data.BOS] == separators * packed.seq_len
        assert counts.sum() == counts[FIRST_ID:].sum() + counts[data.BOS]
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
            if token == data.BOS and t > 0:
                segment, position = segment + 1, 0
            assert (segments[t], positions[t]) == (segment, position)
            position += 1
            follows = document_of[1:] == document_of[:-1]
            if token == data.BOS:
                assert targets[t] in FIRST_ID + np.flatnonzero(np.diff(document_of, prepend=-1))
            elif token - FIRST_ID < len(follows) and follows[token - FIRST_ID]:
                assert targets[t] == token + 1
            else:
                assert targets[t] == data.NO_LOSS
            if t + 1 < len(tokens) and targets[t] != data.NO_LOSS:
                assert targets[t] == tokens[t + 1]


def test_without_document_mask_a_row_is_one_segment_and_targets_cross_documents():
    rows = numbered([3, 4, 5], seq_len=10, document_mask=False).batch(0)
    assert (rows["segments"] == 1).all()
    np.testing.assert_array_equal(rows["positions"], [range(10)])
    np.testing.assert_array_equal(rows["targets"][:, :-1], rows["tokens"][:, 1:])
    assert data.BOS in rows["targets"]


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
    packed = numbered([100, 30, 55], seq_len=5, global_batch=4)
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


def test_one_long_document_does_not_fill_a_batch_with_neighbours():
    starts = np.sort(numbered([10_000], seq_len=10, global_batch=50).batch(0)["tokens"][:, 0])
    assert starts[-1] - starts[0] > 5_000


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
    packed = data.build(source="text", paths=[str(tmp_path / "plays.txt")], seq_len=16, global_batch=2, seed=0,
                        validation_fraction=0.1)
    rows = [packed.validation_batch(i) for i in range(packed.num_validation_batches)]
    held = np.concatenate([batch["targets"].ravel() for batch in rows])
    assert bytes(held[held >= 0].astype(np.uint8)) == text[-190:]
    assert rows[0]["tokens"][0, 0] == data.BOS


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.integers(1, 6), st.booleans())
@example(1, 1, False)  # the last batch exactly full
def test_validation_batches_give_every_held_out_token_once_and_pad_the_rest(seq_len, global_batch, document_mask):
    packed = numbered([20] * 60, seq_len=seq_len, global_batch=global_batch, validation_fraction=0.2,
                      document_mask=document_mask)
    held = packed.validation[0].spans
    expected = np.concatenate([np.r_[data.BOS, packed.train[0].source.read(d, 0, 20)] for d in held.document])
    rows = [packed.validation_batch(i) for i in range(packed.num_validation_batches)]
    tokens, targets, segments = (np.concatenate([batch[key] for batch in rows]).ravel()
                                 for key in ("tokens", "targets", "segments"))
    shown = tokens[segments > 0]
    assert len(shown) >= len(expected) - 1  # the last token need not be an input
    np.testing.assert_array_equal(shown, expected[:len(shown)])
    assert (targets[segments == 0] == data.NO_LOSS).all()
    wanted = expected[1:] if not document_mask else expected[expected != data.BOS]
    np.testing.assert_array_equal(targets[targets != data.NO_LOSS], wanted)
    if not document_mask:  # no batch without a target
        assert all((batch["targets"] != data.NO_LOSS).any() for batch in rows)
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
    packed = data.build(source="text", paths=[f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/../a*"], seq_len=11, global_batch=1, seed=0)
    whole = b"".join(texts.values())
    assert packed.train[0].tokens_per_epoch == len(whole) + 3
    tokens = sequences(packed, packed.train[0].tokens_per_epoch)["tokens"]
    np.testing.assert_array_equal(np.bincount(tokens.ravel(), minlength=257)[:256],
                                  11 * np.bincount(np.frombuffer(whole, np.uint8), minlength=256))
    assert tokens.max() == data.BOS == data.VOCAB - 1


def test_the_standard_library_is_a_source_in_a_fixed_order_without_tests_and_packages():
    files = sources.open_source("stdlib", [])
    assert len(files.paths) > 100 and list(files.paths) == sorted(files.paths)
    assert not [path for path in files.paths if "site-packages" in path or "/test/" in path or not path.endswith(".py")]
    packed = data.build(source="stdlib", seq_len=512, global_batch=8, seed=0, validation_fraction=0.01)
    text = b"".join(files.read(d, 0, length) for d, length in enumerate(files.lengths)).decode("utf-8", errors="replace")
    rows = packed.batch(0)
    for tokens, segments in zip(rows["tokens"], rows["segments"]):
        assert data.decode(tokens[segments == 1]).strip("\N{REPLACEMENT CHARACTER}") in text  # cut within a character


def test_the_fingerprint_tells_other_documents_apart_and_no_other_setting():
    assert numbered([4, 5]).fingerprint == numbered([4, 5], seed=7, seq_len=2).fingerprint != numbered([5, 4]).fingerprint


def test_decode_drops_what_is_not_a_byte():
    assert data.decode([data.BOS, 104, 105, -1, 300, 0xC3, 0xA9, 0xFF]) == "hié\N{REPLACEMENT CHARACTER}"


# Mistakes

def build_text(*paths, **changes):
    return data.build(**{"source": "text", "paths": [str(p) for p in paths], "seq_len": 8, "global_batch": 2, "seed": 0, **changes})


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"0123456789" * 10)
    return path


@pytest.mark.parametrize("changes, message", [
    ({"source": "stlib"}, r"'stlib' is not a source; did you mean 'stdlib'\?"),
    ({"source": "stdlib"}, r"data.paths=.* is not read by data.source='stdlib'"),
    ({"paths": "a.txt"}, r"use a list: \['a.txt'\]"),
    ({"paths": []}, "give at least one file or glob"),
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
        build_text(text_file, **changes)


def test_settings_just_large_enough_are_accepted(text_file):
    build_text(text_file, seq_len=101, global_batch=1).batch(0)
    assert build_text(text_file, validation_fraction=0.08).num_validation_batches == 1


def test_all_mistaken_settings_are_told_together(text_file):
    with pytest.raises(ValueError, match="(?s)seq_len=0.*global_batch=0.*seed=-1"):
        build_text(text_file, seq_len=0, global_batch=0, seed=-1)


def test_paths_that_lead_nowhere_are_named(text_file, tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    for path, message in [(tmp_path / "*.md", r"'.*\*\.md' matches no file"), (tmp_path, "is a directory; name its files"),
                          (tmp_path / "dang*", "dangling.txt cannot be read: No such file")]:
        with pytest.raises(ValueError, match=message):
            build_text(text_file, path)


def test_an_unreadable_file_is_named(text_file, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read anything
    with pytest.raises(ValueError, match="text.txt cannot be read: no permission"):
        build_text(text_file)


def test_nothing_but_empty_files_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="all 1 files of data.paths are empty .*empty.txt"):
        build_text(tmp_path / "empty.txt")


def test_a_python_without_library_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match="finds no .py file under"):
        sources.list_stdlib(str(tmp_path))


def test_a_file_that_shrinks_during_the_run_stops_it(text_file):
    packed = build_text(text_file)
    text_file.write_bytes(b"short")
    with pytest.raises(OSError, match="text.txt had 100 bytes .* must not change"):
        for n in range(6):
            packed.batch(n)


@pytest.mark.parametrize("wrong", [lambda d: d.batch(-1), lambda d: d.batch(0, [2]), lambda d: d.validation_batch(-1)])
def test_rows_and_batches_that_do_not_exist_are_refused(text_file, wrong):
    with pytest.raises(IndexError):
        wrong(build_text(text_file, validation_fraction=0.2))
