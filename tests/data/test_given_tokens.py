"""Token files that are given, in every layout: their documents, their faults, and separators of their own."""

import ctypes
import errno
import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from corpora import Opened, fault, section, write, write_tokens

from meshtrain import config
from meshtrain.data.cache import given_tokens
from meshtrain.data.files import token_files

# (tokens, ends, what the one message must contain)
WRONG_TOKENS = [
    (np.zeros(4, np.int64), [4], "int64 [4], but token ids are one dimension of uint16, uint32 or int32"),
    (np.zeros(4, ">u2"), [4], ">u2 [4]"),
    (np.zeros((2, 2), np.uint16), [4], "uint16 [2, 2]"),
    (np.zeros(4, np.uint16), np.array([4], np.int32),
     "int32 [1], but the ends of documents are one dimension of int64"),
    (np.zeros(4, np.uint16), [3, 2, 4], "document 1 (from 0) ends at 2, before it begins at 3"),
    (np.zeros(4, np.uint16), [-1, 4], "document 0 (from 0) ends at -1"),
    (np.zeros(4, np.uint16), [2, 5], "the last document ends at 5, but a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), [2, 3], "the last document ends at 3, but a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), None, "a.ends.npy is missing"),
    (np.array([{}], object), [1], "cannot be read as an .npy file"),
]


@pytest.mark.parametrize("tokens, ends, part", WRONG_TOKENS, ids=[case[2][:40] for case in WRONG_TOKENS])
def test_a_wrong_token_file_is_told(tokens, ends, part, tmp_path):
    np.save(tmp_path / "a.tokens.npy", tokens, allow_pickle=True)
    if ends is not None:
        np.save(tmp_path / "a.ends.npy", ends)
    assert part in fault(section([tmp_path / "a.tokens.npy"], bos_token="1"), tmp_path)


@pytest.mark.parametrize("largest", [510, 511, 512])
def test_the_first_id_beyond_the_vocabulary_is_its_size(largest, tmp_path):
    data = section([write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [largest]], np.uint32)], bos_token="0")
    if largest < 512:
        assert Opened(data, tmp_path, vocab_size=512).ids() == [[1, 2], [largest]]
    else:
        assert "document 1 (from 0) holds the id 512" in fault(data, tmp_path, 512)


def test_an_id_beyond_the_vocabulary_is_told_with_file_document_and_id_and_the_scan_remembered(tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [], [3, 600, 700]], np.uint32)
    data = section([path], bos_token="0")
    for _ in range(2):
        message = fault(data, tmp_path)
        assert "a.tokens.npy: document 2 (from 0) holds the id 600, but model.vocab_size=512" in message
        assert "model.vocab_size=701 or more" in message
        Opened(data, tmp_path, vocab_size=701)
    with monkeypatch.context() as unread:
        unread.setattr(given_tokens.Given, "build", None)
        Opened(data, tmp_path, vocab_size=701)
    write_tokens(path, [[1, 2], [800]], np.uint32)
    assert "document 1 (from 0) holds the id 800" in fault(data, tmp_path, vocab_size=701)
    assert "data.bos_token='900' is beyond model.vocab_size=701" in fault(
        section([path], bos_token="900"), tmp_path, 701)
    for bos_token in ("", "<s>", "-1"):
        assert "give its id" in fault(section([path], bos_token=bos_token), tmp_path)


@pytest.fixture
def few_maps(monkeypatch):
    """A system that allows a process 12 maps, of which files may have half."""
    monkeypatch.setattr(token_files, "max_maps", lambda: 12)
    token_files._maps.cache_clear()
    yield
    token_files._maps.cache_clear()


def test_token_files_that_change_under_a_run_are_noticed_and_descriptors_stay_few(tmp_path, few_maps):
    for i in range(40):
        write_tokens(tmp_path / f"{i:02}.tokens.npy", [[i, i], [i + 1]])
    before = len(os.listdir("/proc/self/fd"))
    source = Opened(section([tmp_path / "*.tokens.npy"], bos_token="99"), tmp_path).corpus.sources[0]
    assert [source.read(2 * i + 1, 0, 1)[0] for i in range(40)] == list(range(1, 41))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    write_tokens(tmp_path / "00.tokens.npy", [[9, 9], [9]])
    with pytest.raises(OSError, match="00.tokens.npy has changed since the run began"):
        source.read(0, 0, 1)


def test_all_sources_of_a_process_share_its_maps(tmp_path, few_maps):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    for k in range(3):
        for i in range(10):
            write_tokens(tmp_path / f"{k}-{i}.tokens.npy", [[i, i], [i + 1]])
            np.save(tmp_path / f"{k}-{i}.mask.npy", np.array([0, 1, 1], bool))
    mixture = [{"source": "tokens", "paths": [str(tmp_path / f"{k}-*.tokens.npy")]} for k in range(3)]
    opened = Opened(config.Data(source="mixture", mixture=mixture, bos_token="99"), tmp_path).corpus.sources
    assert mapped() <= 6        # of the ends alone
    for source in opened:
        assert source.ends(np.arange(20)).tolist() == [3 * (d // 2) + 2 + d % 2 for d in range(20)]
        assert [source.read(2 * i + 1, 0, 1)[0] for i in range(10)] == list(range(1, 11))
        assert [source.mask(2 * i, 0, 2).tolist() for i in range(10)] == [[0, 1]] * 10
        assert mapped() <= 6


def test_the_system_s_limit_of_maps_is_told_with_its_remedy(tmp_path, few_maps, monkeypatch):
    def refuse(*_):
        refused.append(1)
        ctypes.set_errno(errno.ENOMEM)

    refused, path = [], write_tokens(tmp_path / "a.tokens.npy", [[1, 2]])
    source = Opened(section([path], bos_token="99"), tmp_path).corpus.sources[0]
    real = token_files._mmap
    monkeypatch.setattr(token_files, "_mmap", lambda *args: real(*args) if refused else refuse())
    # maps were given back, and it was tried again
    assert source.read(0, 0, 2).tolist() == [1, 2] and refused == [1]
    token_files._maps().cache_clear()
    monkeypatch.setattr(token_files, "_mmap", refuse)
    with pytest.raises(OSError,
                       match="vm.max_map_count allows 12; allow more, e.g. sysctl -w vm.max_map_count=") as caught:
        source.read(0, 0, 2)
    assert caught.value.errno == errno.ENOMEM and caught.value.filename == str(path)
    monkeypatch.setattr(token_files, "max_maps", lambda: 1 << 20)
    with pytest.raises(OSError, match=r"of 1,048,576; is the process's address space limited, by ulimit -v\?"):
        source.read(0, 0, 2)


def test_ends_that_fall_are_found_in_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 16)
    for wrong in range(1, 7):
        ends = np.arange(1, 9)
        ends[wrong] = ends[wrong - 1] - 1
        np.save(tmp_path / f"{wrong}.tokens.npy", np.zeros(8, np.uint16))
        np.save(tmp_path / f"{wrong}.ends.npy", ends)
        message = fault(section([tmp_path / f"{wrong}.tokens.npy"], bos_token="9"), tmp_path)
        assert f"document {wrong} (from 0) ends at {wrong - 1}, before it begins at {wrong}" in message


# ---- other trainers' layouts -----------------------------------------------------------------------------------------

MEGATRON_CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write_megatron(path, documents, dtype=np.uint16, sequences=1):
    """X.bin and X.idx as Megatron's IndexedDatasetBuilder writes them; every document in so many sequences."""
    parts = [part for ids in documents for part in np.array_split(np.array(ids, dtype), sequences)]
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    lengths = np.array([len(part) for part in parts], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    marks = np.arange(len(documents) + 1, dtype=np.int64) * sequences
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(parts), len(marks))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + marks.tobytes())
    return path


def write_llm_c(path, ids, dtype=np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, len(ids)) if dtype == np.uint16 else (20240801, 7, len(ids))
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dtype", MEGATRON_CODES, ids=lambda dtype: np.dtype(dtype).name)
def test_megatron_datasets_give_their_documents(dtype, sequences, tmp_path):
    documents = [[1, 2, 3], [], [4] * 100, [5]]
    path = write_megatron(tmp_path / "a_text_document.bin", documents, dtype, sequences)
    data = section([path], bos_token="99")
    for verify in (False, False, True):
        opened = Opened(data, tmp_path, verify=verify)
        assert opened.ids() == documents
    assert opened.built == []


def test_a_megatron_document_may_have_no_sequence(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3]])
    index = path.with_suffix(".idx")
    for marks, expected in (([0, 0, 2], [[], [1, 2, 3]]), ([0, 1, 1, 2], [[1, 2], [], [3]])):
        head = index.read_bytes()[:34 + 2 * 12]
        head = head[:26] + struct.pack("<Q", len(marks)) + head[34:]
        index.write_bytes(head + np.array(marks, np.int64).tobytes())
        assert Opened(section([path], bos_token="99"), tmp_path).ids() == expected


def test_nanogpt_and_llm_c_files_are_divided_by_the_separator(tmp_path):
    for name, ids in {"behind": [1, 2, 50, 3, 50, 50, 4, 50], "before": [50, 1, 2, 50, 3, 50, 50, 4],
                      "cut": [1, 2, 50, 3, 50, 50, 4]}.items():
        np.array(ids, np.uint16).tofile(tmp_path / f"{name}.bin")
        assert Opened(section([tmp_path / f"{name}.bin"], bos_token="50"),
                      tmp_path).ids() == [[1, 2], [3], [], [4]], name
        for dtype in (np.uint16, np.uint32):
            path = write_llm_c(tmp_path / "c.bin", ids, dtype)
            assert Opened(section([path], bos_token="50"), tmp_path).ids() == [[1, 2], [3], [], [4]], name
    one = section([tmp_path / "cut.bin"], bos_token="60")
    opened = Opened(one, tmp_path)
    assert opened.ids() == [[1, 2, 50, 3, 50, 50, 4]]
    assert any("the separator 60 does not occur" in line for line in opened.told)


def test_the_separators_of_a_file_are_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 6)
    rng = np.random.default_rng(0)
    for k in range(60):
        ids = rng.integers(0, 3, rng.integers(0, 14)).astype(np.uint16)
        ids.tofile(tmp_path / f"{k}.bin")
        text = "".join(map(str, ids.tolist()))
        expected = text.removeprefix("2").removesuffix("2").split("2") if text not in ("", "2") else []
        if any(expected):
            opened = Opened(section([tmp_path / f"{k}.bin"], bos_token="2"), tmp_path)
            assert opened.ids() == [[int(c) for c in part] for part in expected], text
        else:
            assert "no text in" in fault(section([tmp_path / f"{k}.bin"], bos_token="2"), tmp_path)


def test_int32_ids_are_ids_and_negative_ones_are_told(tmp_path):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [3]], np.int32)
    assert Opened(section([path], bos_token="99"), tmp_path).ids() == [[1, 2], [3]]
    write_tokens(path, [[1, 2], [-3]], np.int32)
    assert "id 2 (from 0) is -3, but ids are not negative" in fault(section([path], bos_token="99"), tmp_path)
    write_megatron(tmp_path / "b.bin", [[1], [-1]], np.int16)
    assert "b.bin: id 1 (from 0) is -1" in fault(section([tmp_path / "b.bin"], bos_token="99"), tmp_path)


@pytest.mark.parametrize("documents, expected, said", [
    ([[9, 1, 2], [9, 3], [], [9]], [[1, 2], [3], []], "all documents begin with the separator 9, which is removed"),
    ([[9, 1], [9, 3], [9, 4, 5], [9, 6]], [[1], [3], [4, 5], [6]], "all documents begin with the separator 9"),
    ([[1, 2, 9], [3, 9]], [[1, 2], [3]], "all documents end with the separator 9, which is removed"),
    ([[9, 1, 2, 9], [9, 3, 9], [9, 9]], [[1, 2], [3], []],
     "all documents end with the separator 9, which is removed"),
    ([[9, 1, 2], [3]], [[9, 1, 2], [3]], "1 of 2 documents begin with the separator 9, and get a second"),
    ([[1, 2], [3, 9]], [[1, 2], [3, 9]], "1 of 2 documents end with the separator 9, and get a second"),
    ([[1, 9, 2], [3]], [[1, 9, 2], [3]], ""),
])
@pytest.mark.parametrize("chunk_bytes", [8, 1 << 20])
def test_separators_of_a_files_own_are_taken_out_or_told(documents, expected, said, chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", chunk_bytes)
    for path in (write_tokens(tmp_path / "a.tokens.npy", documents), write_megatron(tmp_path / "b.bin", documents)):
        opened = Opened(section([path], bos_token="9"), tmp_path)
        assert opened.ids() == expected
        assert any(said in line for line in opened.told) if said else opened.told == []
        assert Opened(section([path], bos_token="9"), tmp_path).ids() == expected


GOOD_INDEX = dict(magic=b"MMIDIDX\x00\x00", version=1, code=8, lengths=[2, 3], pointers=[0, 4], marks=[0, 1, 2])
WRONG_INDEX = [
    (dict(magic=b"MMIDIDX\x01\x00"), "a.idx is not an index of Megatron"),
    (dict(version=2), "has version 2 of Megatron's index"),
    (dict(code=6), "holds float64, but ids are integers"),
    (dict(code=9), "dtype code 9"),
    (dict(code=4), "a.bin has 10 bytes, but in a.idx the last sequence ends at byte 16"),
    (dict(lengths=[2, 4]), "the last sequence ends at byte 12"),
    (dict(pointers=[2, 4]), "sequence 0 (from 0) has 2 ids at byte 2, but the one before it ends at byte 0"),
    (dict(pointers=[0, 10**12]), "the two must agree"),
    (dict(lengths=[-2, 3]), "sequence 0 (from 0) has -2 ids"),
    (dict(marks=[0, 1]), "must begin at sequence 0 and end with the last, 2"),
    (dict(marks=[1, 2]), "must begin at sequence 0"),
    (dict(marks=[0, 7, 2]), "document 0 (from 0) ends at sequence 7"),
    (dict(marks=[0, 2, 1, 2]), "document 1 (from 0) ends at sequence 1, before it begins"),
    (dict(marks=[]), "must begin at sequence 0"),
]


@pytest.mark.parametrize("change, part", WRONG_INDEX, ids=[part[:40] for _, part in WRONG_INDEX])
def test_a_wrong_megatron_index_is_told(change, part, tmp_path, monkeypatch):
    index = GOOD_INDEX | change
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(
        index["magic"] + struct.pack("<QBQQ", index["version"], index["code"], len(index["lengths"]),
                                     len(index["marks"]))
        + b"".join(np.array(index[name], dtype).tobytes() for name, dtype in
                   [("lengths", np.int32), ("pointers", np.int64), ("marks", np.int64)]))
    data = section([tmp_path / "a.bin"], bos_token="99")
    if not change:
        assert Opened(data, tmp_path).ids() == [[0, 1], [2, 3, 4]]
    assert part in fault(data, tmp_path)
    with monkeypatch.context() as chunked:
        chunked.setattr(token_files, "CHUNK_BYTES", 8)
        assert part in fault(data, tmp_path)
    cut = (tmp_path / "a.idx").read_bytes()[:-1]
    (tmp_path / "a.idx").write_bytes(cut)
    fault(data, tmp_path)


def test_every_truncation_of_every_layout_is_told(tmp_path):
    documents = [[1, 2, 3], [4, 5]]
    files = {"m.bin": write_megatron(tmp_path / "m.bin", documents), "m.idx": tmp_path / "m.idx",
             "c.bin": write_llm_c(tmp_path / "c.bin", [9, 1, 2, 9, 3])}
    for name, path in files.items():
        whole = path.read_bytes()
        for size in {0, 1, 9, 33, 34, len(whole) // 2, len(whole) - 1}:
            if size >= len(whole) or name == "c.bin" and size < 12:
                continue  # in so few bytes of a bare file nothing tells whose it was
            path.write_bytes(whole[:size])
            fault(section([path.with_suffix(".bin")], bos_token="9"), tmp_path)
        path.write_bytes(whole)
    (tmp_path / "n.bin").write_bytes(b"12345")
    assert "has 5 bytes" in fault(section([tmp_path / "n.bin"], bos_token="9"), tmp_path)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 2, 0
    header.tofile(tmp_path / "v.bin")
    assert "has version 2" in fault(section([tmp_path / "v.bin"], bos_token="9"), tmp_path)


def test_a_truncated_array_of_ids_is_told(tmp_path):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2, 3], [4, 5]])
    whole = path.read_bytes()
    for missing in (1, 2, 9):
        path.write_bytes(whole[:-missing])
        assert "it was truncated" in fault(section([path], bos_token="9"), tmp_path)


@pytest.mark.parametrize("chunk_bytes", [4, 1 << 20])
def test_an_id_beyond_the_vocabulary_is_told_of_every_layout_in_its_document(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", chunk_bytes)
    paths = [write_megatron(tmp_path / "m.bin", [[1, 2, 9], [3, 700, 9]]),
             write_llm_c(tmp_path / "c.bin", [9, 1, 2, 9, 3, 700])]
    early = write_megatron(tmp_path / "early.bin", [[1, 700, 9], [3, 4, 9]])
    for path, document in (*((path, 1) for path in paths), (early, 0)):
        message = fault(section([path], bos_token="9"), tmp_path)
        assert f"{path}: document {document} (from 0) holds the id 700" in message


@pytest.mark.parametrize("chunk_bytes", [4, 1 << 20])
def test_a_bit_that_flips_in_a_given_file_is_noticed_by_verify(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", chunk_bytes)
    path = write_tokens(tmp_path / "a.tokens.npy", [[9, 1, 2], [9, 3]])
    data = section([path], bos_token="9")
    Opened(data, tmp_path)
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert Opened(data, tmp_path).ids() == [[1, 2], [2]]
    with pytest.raises(ValueError, match="is damaged: its .* restore it"):
        Opened(data, tmp_path, verify=True)


def test_more_files_than_a_process_may_open_are_read_without_opening_one_twice(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(150):
        write_tokens(tmp_path / f"{i:03}.tokens.npy", [[i]])
    used = len(os.listdir("/proc/self/fd"))
    source = Opened(section([tmp_path / "*.tokens.npy"], bos_token="500"), tmp_path).corpus.sources[0]
    assert len(os.listdir("/proc/self/fd")) <= used + 5
    monkeypatch.setattr(token_files, "map_file", lambda *args, real=token_files.map_file: opened.append(args)
                        or real(*args))
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        for _ in range(3):
            assert [source.read(d, 0, 1)[0] for d in range(150)] == list(range(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(opened) == 150


def test_hosts_that_number_inodes_differently_read_a_note_s_files_once_each(tmp_path, monkeypatch):
    """As FUSE file systems may. One host after another starts, then all again."""
    stamp, checksum, read = token_files.stamp, token_files.checksum, []
    monkeypatch.setattr(token_files, "checksum", lambda *args: read.append(1) or checksum(*args))
    given = section([write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [3]], np.uint16)], bos_token="0")
    of_cache = section([write(tmp_path / "a.jsonl", ["one", "two"])])
    for data in (given, of_cache):
        began = []
        for host in (0, 7, 8, 0, 7, 8):
            read.clear()
            with monkeypatch.context() as there:
                there.setattr(token_files, "stamp", lambda path: (stamp(path)[0] + host, *stamp(path)[1:]))
                Opened(data, tmp_path)
            began.append(bool(read))
        assert began[1:] == [True, True, False, False, False], data.source
