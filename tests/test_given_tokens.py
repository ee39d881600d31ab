"""Token files that are given, in every layout: their documents, their faults, and separators of their own."""

import os
import struct

import numpy as np
import pytest
from corpora import Opened, fault, section, write_tokens

from meshtrain.data import given_tokens, token_files

# (tokens, ends, what the one message must contain)
WRONG_TOKENS = [
    (np.zeros(4, np.int64), [4], "int64 [4], and token ids are one dimension of uint16, uint32 or int32"),
    (np.zeros(4, ">u2"), [4], ">u2 [4]"),
    (np.zeros((2, 2), np.uint16), [4], "uint16 [2, 2]"),
    (np.zeros(4, np.uint16), np.array([4], np.int32), "int32 [1], and the ends of documents are one dimension of int64"),
    (np.zeros(4, np.uint16), [3, 2, 4], "document 1 (from 0) ends at 2, before it begins at 3"),
    (np.zeros(4, np.uint16), [-1, 4], "document 0 (from 0) ends at -1"),
    (np.zeros(4, np.uint16), [2, 5], "the last document ends at 5, and a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), [2, 3], "the last document ends at 3, and a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), None, "a.ends.npy is missing"),
    (np.array([{}], object), [1], "cannot be read as an .npy file"),
]


@pytest.mark.parametrize("tokens, ends, part", WRONG_TOKENS, ids=[case[2][:40] for case in WRONG_TOKENS])
def test_a_wrong_token_file_is_told(tokens, ends, part, tmp_path):
    np.save(tmp_path / "a.tokens.npy", tokens, allow_pickle=True)
    if ends is not None:
        np.save(tmp_path / "a.ends.npy", ends)
    assert part in fault(section([tmp_path / "a.tokens.npy"], bos_token="1"), tmp_path)


def test_an_id_beyond_the_vocabulary_is_told_with_file_document_and_id_and_the_scan_remembered(tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [], [3, 600, 700]], np.uint32)
    data = section([path], bos_token="0")
    for _ in range(2):
        message = fault(data, tmp_path)
        assert "a.tokens.npy: document 2 (from 0) holds the id 600, and model.vocab_size=512" in message
        assert "model.vocab_size=701 or more" in message
        Opened(data, tmp_path, vocab_size=701)
    with monkeypatch.context() as unread:
        unread.setattr(given_tokens.Given, "build", None)
        Opened(data, tmp_path, vocab_size=701)
    write_tokens(path, [[1, 2], [800]], np.uint32)
    assert "document 1 (from 0) holds the id 800" in fault(data, tmp_path, vocab_size=701)
    assert "data.bos_token='900' is beyond model.vocab_size=701" in fault(section([path], bos_token="900"), tmp_path, 701)
    for bos_token in ("", "<s>", "-1"):
        assert "give its id" in fault(section([path], bos_token=bos_token), tmp_path)


def test_token_files_that_change_under_a_run_are_noticed_and_descriptors_stay_few(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "MAPS_HELD", 2)
    for i in range(40):
        write_tokens(tmp_path / f"{i:02}.tokens.npy", [[i, i], [i + 1]])
    before = len(os.listdir("/proc/self/fd"))
    source = Opened(section([tmp_path / "*.tokens.npy"], bos_token="99"), tmp_path).corpus.sources[0]
    assert [source.read(2 * i + 1, 0, 1)[0] for i in range(40)] == list(range(1, 41))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    write_tokens(tmp_path / "00.tokens.npy", [[9, 9], [9]])
    with pytest.raises(OSError, match="00.tokens.npy is not the file it was"):
        source.read(0, 0, 1)
