"""Files as data, and settings that cannot work: refused before anything is read, in one message with the remedy."""
import errno
import os

import numpy as np
import pytest
from corpora import Opened, bpe, fault, open_source, section, write, write_tokens  # noqa: F401 (bpe is a fixture)
import documents
from documents import BOS, mixed, sequences, validation

from meshtrain import config
from meshtrain.data import globs
from meshtrain.data.batches import packing


def opened(name, paths=(), **settings):
    return documents.pack([open_source(name, [str(path) for path in paths])], [1.0],
                          **{"bos": BOS, "seed": 0, "seq_len": 8, "global_batch": 2, **settings})


def test_files_are_read_as_their_bytes_and_of_empty_ones_only_the_separator_is_left(tmp_path):
    texts = {"a.txt": "alpha é ".encode() * 5, "b.txt": b"", "c.txt": bytes(range(256)), "sub/d.txt": b"x"}
    (tmp_path / "sub").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    # The second glob names a.txt again: counted once.
    packed = opened("text", [f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/../a*"], seq_len=11, global_batch=1)
    whole = b"".join(texts.values())
    assert packed.train[0].tokens_per_epoch == len(whole) + 4
    tokens = sequences(packed, packed.train[0].tokens_per_epoch)["tokens"]
    np.testing.assert_array_equal(np.bincount(tokens.ravel(), minlength=257)[:256],
                                  11 * np.bincount(np.frombuffer(whole, np.uint8), minlength=256))
    assert tokens.max() == BOS


def test_the_standard_library_is_a_source_in_a_fixed_order_without_tests_and_packages():
    files = open_source("stdlib", [])
    assert len(files.paths) > 100 and list(files.paths) == sorted(files.paths)
    assert not [path for path in files.paths if "site-packages" in path or "/test/" in path or not path.endswith(".py")]
    packed = opened("stdlib", seq_len=512, global_batch=8, validation_fraction=0.01)
    text = b"".join(files.read(d, 0, length) for d, length in enumerate(files.lengths)).decode(
        "utf-8", errors="replace")
    rows = packed.batch(0)
    for tokens, segments in zip(rows["tokens"], rows["segments"]):
        first = tokens[(segments == 1) & (tokens != BOS)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        assert first.strip("\N{REPLACEMENT CHARACTER}") in text  # cut within a character


def test_validation_files_and_names_of_a_mixture_come_from_the_run_file(tmp_path):
    for name, ids in (("a", [[1, 2, 3]] * 9), ("b", [[4, 5]] * 30), ("held", [[6, 6], [7]])):
        write_tokens(tmp_path / f"{name}.tokens.npy", ids)
    a, b, held = (str(tmp_path / f"{name}.tokens.npy") for name in ("a", "b", "held"))
    data = config.Data(source="mixture", bos_token="0", eos="9", seq_len=5, global_batch=1,
                       validation_fraction=0.2, mixture=[
        {"source": "tokens", "paths": [a], "validation_paths": [held], "name": "web"},
        {"source": "tokens", "paths": [b]}])
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    web, other = packed.validation
    assert (web.name, other.name) == ("web", "1")
    assert validation(web, "tokens").tolist() == [0, 6, 6, 0, 7]
    assert validation(web, "targets").tolist() == [6, 6, 9, 7, 9]
    assert packed.train[0].tokens_per_epoch == 36 and packed.train[1].tokens_per_epoch == 72


def test_several_sources_are_validated_on_in_place_of_a_share(tmp_path):
    for name, ids in (("a", [[1, 2, 3]] * 9), ("held", [[6, 6], [7]]), ("more", [[8] * 9])):
        write_tokens(tmp_path / f"{name}.tokens.npy", ids)
    tables = [{"source": "tokens", "paths": [str(tmp_path / "held.tokens.npy")], "name": "web", "weight": 3.0},
              {"source": "tokens", "paths": [str(tmp_path / "more.tokens.npy")]}]
    data = config.Data(source="tokens", paths=[str(tmp_path / "a.tokens.npy")], bos_token="0",
                       eos="9", seq_len=5, global_batch=1,
                       validation_fraction=0.2, validation_sources=tables)
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    assert [(held.name, held.weight) for held in packed.validation] == [("web", 0.75), ("1", 0.25)]
    assert validation(packed.validation[0], "targets").tolist() == [6, 6, 9, 7, 9]
    assert packed.train[0].tokens_per_epoch == 36, "nothing is held out"
    short = data.model_copy(update={"seq_len": 7})
    with pytest.raises(ValueError, match=r"data.validation_sources\[0\] holds 5 tokens"):
        packing.open_batches(short, Opened(short, tmp_path).corpus, seed=0)
    itself = data.model_copy(update={"validation_sources": (
        data.validation_sources[0].model_copy(update={"paths": data.paths}),)})
    assert "data.validation_sources[0].paths: " in fault(itself, tmp_path) and "is also training data" in fault(itself, tmp_path)
    run = config.Run(data=data.model_copy(update={"validation_paths": ("x",),
                                                  "validation_sources": data.validation_sources[:1] * 2}))
    told = "\n".join(config.problems(run))
    assert 'validation_sources has two sources named "web"' in told and "both say what to validate on" in told


def test_validation_files_that_are_missing_or_trained_on_are_refused_by_their_key(tmp_path):
    write(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(ValueError, match="data.validation_paths: 'none.jsonl' matches no file"):
        Opened(section([tmp_path / "a.jsonl"], validation_paths=["none.jsonl"]), tmp_path)
    assert "data.validation_paths: " in fault(
        section([tmp_path / "a.jsonl"], validation_paths=[str(tmp_path / "*")]), tmp_path)


def test_the_end_of_documents_is_a_token_of_the_tokenizer_or_an_id(tmp_path, bpe):
    a, ids = write(tmp_path / "a.jsonl", ["one"]), write_tokens(tmp_path / "a.tokens.npy", [[1]])
    assert Opened(section([a], tokenizer=bpe, eos="a"), tmp_path).corpus.eos == Opened(
        section([a], tokenizer=bpe), tmp_path) \
        .corpus.tokenizer.library.token_to_id("a")
    assert Opened(section([a]), tmp_path).corpus.eos == BOS
    assert Opened(section([ids], bos_token="0", eos="3"), tmp_path).corpus.eos == 3
    assert "data.eos='x' is not read with data.tokenizer=\"bytes\"" in fault(section([a], eos="x"), tmp_path)
    assert "data.eos='<no>' is not a token" in fault(section([a], tokenizer=bpe, eos="<no>"), tmp_path)
    assert "data.eos='600' is not an id below model.vocab_size=512" in fault(
        section([ids], bos_token="0", eos="600"), tmp_path)


# Mistakes

@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"0123456789" * 10)
    return path


def test_a_source_without_files_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="give at least one file or glob"):
        open_source("text", [])


@pytest.mark.parametrize("changes, message", [
    ({"global_batch": 13}, r"seq_len=8 × data.global_batch=13 is a batch of 104 tokens, .* hold 101, .*"
                           r"use data.global_batch ≤ 12 or data.seq_len ≤ 7 or more text"),
    ({"seq_len": 200}, r"seq_len=200 × data.global_batch=2 .* use data.seq_len ≤ 50 or more text"),
    ({"validation_fraction": 0.06},
     r"validation_fraction=0.06 holds out 7 of 102 tokens, but one sequence of data.seq_len=8"),
])
def test_a_setting_that_cannot_work_is_refused_with_the_remedy(text_file, changes, message):
    with pytest.raises(ValueError, match=message):
        opened("text", [text_file], **changes)


def test_settings_just_large_enough_are_accepted(text_file):
    opened("text", [text_file], seq_len=101, global_batch=1).batch(0)
    assert opened("text", [text_file], validation_fraction=0.07).validation[0].num_batches == 1


@pytest.mark.parametrize("weights, changes, message", [
    ([1, 3], {"global_batch": 20},
     r"data.mixture\[1\] is 0.75 of the mixture, 150 tokens in a batch of data.seq_len=10 × "
                                   r"data.global_batch=20, .* hold 110, .* use a weight ≤ 0.55 of the sum, a "
                                   r"smaller batch"),
    ([1, 1], {"validation_fraction": 0.04},
     r"validation_fraction=0.04 holds out 5 of 102 tokens of data.mixture\[1\], but one "
                                            r"sequence of data.seq_len=20 takes 20"),
    ([1, 1], {"validation_fraction": 0.009}, r"holds out 0 of 101 tokens of data.mixture\[1\]"),
])
def test_a_mixture_that_cannot_work_is_refused_with_the_remedy(weights, changes, message):
    with pytest.raises(ValueError, match=message):
        mixed([[500], [100] if "validation_fraction" in changes else [10] * 10], weights,
              **{"seq_len": 10, "global_batch": 2,
                 **({"seq_len": 20} if "validation_fraction" in changes else {}), **changes})


def test_paths_that_lead_nowhere_are_named(text_file, tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    for path, message in [(tmp_path / "*.md", r"'.*\*\.md' matches no file"),
                          (tmp_path, "is a directory; name its files"),
                          (tmp_path / "dang*", "dangling.txt cannot be read: No such file")]:
        with pytest.raises(ValueError, match=message):
            opened("text", [text_file, path])


def test_an_unreadable_file_is_named(text_file, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read anything
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ValueError, match="text.txt cannot be read: Permission denied"):
        opened("text", [text_file])


def test_nothing_but_empty_files_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="data.paths: no text in 1 file .*empty.txt"):
        opened("text", [tmp_path / "empty.txt"])


def test_a_python_without_library_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match="finds no .py file under"):
        globs.list_stdlib(str(tmp_path))


def test_a_file_that_shrinks_during_the_run_stops_it(text_file):
    packed = opened("text", [text_file])
    text_file.write_bytes(b"short")
    with pytest.raises(OSError, match="text.txt had 100 bytes .* must not change"):
        for n in range(6):
            packed.batch(n)


@pytest.mark.parametrize("wrong", [lambda d: d.batch(-1), lambda d: d.batch(0, [2]),
                                   lambda d: d.validation[0].batch(-1)])
def test_rows_and_batches_that_do_not_exist_are_refused(text_file, wrong):
    with pytest.raises(IndexError):
        wrong(opened("text", [text_file], validation_fraction=0.2))
