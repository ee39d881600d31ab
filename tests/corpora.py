"""Small corpora of every format, and what is read of them: for the tests of sources, formats, tokenizers and caches."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from meshtrain import config
from meshtrain.data import globs, sources
from meshtrain.data.batches import order
from meshtrain.data.cache import parts
from meshtrain.data.files import token_files

TEXTS = ["the cat sat on the mat", "", "zwei\nZeilen\r\n", "naïve — 猫 🐈\x00", "<|endoftext|> is text here", "the mat\n"]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
KINDS = {"jsonl": ".jsonl", "parquet": ".parquet", "arrow": ".arrow", "tokens": ".tokens.npy", "text": ".txt"}
WRITERS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "txt", "txt.gz", "txt.zst"]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def write_tokenizer(path: Path, special=("<|endoftext|>",), corpus=TEXTS) -> str:
    """A tiny BPE over bytes, which asks for all that documents must not get: truncation, padding, separators of its
    own."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False))
    if special:
        made.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(path))
    return str(path)


def write(path: Path, texts, field: str = "text") -> Path:
    """One file of any format, told by its name; a .txt file is one document."""
    rows = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    lines = "".join(row + "\n" for row in rows).encode()
    if path.name.endswith(".jsonl"):
        path.write_bytes(lines)
    elif path.name.endswith(".arrow"):
        table = pa.table({"id": range(len(texts)), field: pa.array(texts, pa.string())})
        with pa.OSFile(str(path), "wb") as raw, pa.ipc.new_stream(raw, table.schema) as stream:
            for batch in table.to_batches(max_chunksize=2):
                stream.write_batch(batch)
    elif path.name.endswith((".txt.gz", ".txt.zst")):
        (text,) = texts
        path.write_bytes((gzip if path.suffix == ".gz" else zstandard).compress(text.encode()))
    elif path.name.endswith(".gz"):
        half = lines.find(b"\n") + 1  # two members, as concatenated files have
        path.write_bytes(gzip.compress(lines[:half], 1) + gzip.compress(lines[half:], 1))
    elif path.name.endswith(".zst"):
        half = lines.find(b"\n") + 1
        packer = zstandard.ZstdCompressor(level=1)
        path.write_bytes(packer.compress(lines[:half]) + packer.compress(lines[half:]))
    elif path.name.endswith(".parquet"):
        pq.write_table(pa.table({"id": range(len(texts)), field: pa.array(texts, pa.string())}), path, row_group_size=2)
    else:
        (text,) = texts
        path.write_bytes(text.encode())
    return path


def write_tokens(path: Path, documents, dtype=np.uint16) -> Path:
    np.save(path, np.concatenate([np.array(ids, dtype) for ids in documents] or [np.zeros(0, dtype)]))
    np.save(token_files.ends_path(str(path)), np.cumsum([len(ids) for ids in documents], dtype=np.int64))
    return path


def open_source(name: str, paths) -> sources.ByteFiles:
    """stdlib or text as bytes; `paths` are the globs of text."""
    return sources.open_files(list(globs.list_paths(name, paths, "data")), "data")


def section(paths=(), source="", **keys) -> config.Data:
    if not source:
        name = str(paths[0])
        source = next((kind for kind, part in KINDS.items() if part in name), "tokens")
    return config.Data(source=source, paths=[str(path) for path in paths], **keys)


class Opened:
    """A corpus, what was told while it was opened (`built`: that files are tokenized), and its documents as text."""

    def __init__(self, data: config.Data, fallback: Path, vocab_size: int = 512, verify: bool = False):
        self.data, lines = data, []
        described = sources.describe(data, vocab_size=vocab_size)
        self.corpus = sources.corpus_of(described, described.open(fallback, parts.Job(lines.append, verify=verify)))
        self.built = [line for line in lines if line.startswith(("token cache: tokenizing", "token cache: scanning"))]
        self.told = [line for line in lines if line not in self.built]

    def ids(self, k: int = 0):
        source = self.corpus.sources[k]
        return [np.asarray(source.read(d, 0, int(n))).tolist() for d, n in enumerate(order.lengths(source))]

    def texts(self, k: int = 0):
        return [self.corpus.tokenizer.decode(ids) for ids in self.ids(k)]


def fault(data: config.Data, fallback: Path, vocab_size: int = 512) -> str:
    with pytest.raises(ValueError) as caught:
        sources.open_corpus(data, vocab_size=vocab_size, cache_dir=fallback, tell=lambda line: None)
    message = str(caught.value)
    assert "\n" not in message and re.search(r"; ", message), message
    return message
