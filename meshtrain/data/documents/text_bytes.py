"""Counts the bytes of text that tokens stand for.

The tokens alone determine this if a tokenizer keeps every byte: no normalizer changes a length, and nothing is dropped.
For all other tokenizers the token cache counts the UTF-8 bytes of each document before it is tokenized.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshtrain.data.documents.tokenizer import Bytes, Tokenizer, TokenizerFile, import_extra

SPACE = "▁"     # SentencePiece's
UNKNOWN = -1    # bytes of a token that stands for texts of several lengths
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
CUTS = ("Digits", "UnicodeScripts", "FixedLength")      # pre-tokenizers that only cut a text


class Lengths(NamedTuple):
    """Bytes of text per token. bytes_V: the number of bytes of each id, or UNKNOWN. prefix: bytes (a space) that the
    tokenizer puts before a document; None: it depends on the text. exact: for every text, the bytes of its tokens add
    up to its own bytes."""
    bytes_V: np.ndarray
    prefix: int | None
    exact: bool


def lengths(reader: Tokenizer) -> Lengths | None:
    """Return the bytes per token; None if tokens do not determine the bytes: there is no tokenizer, or the tokenizer
    changes or drops text."""
    if isinstance(reader, Bytes):
        return Lengths(np.where(np.arange(reader.vocab_size) < reader.bos, 1, 0), 0, True)
    if not isinstance(reader, TokenizerFile):
        return None
    file, added = json.loads(reader.library.to_str()), reader.library.get_added_tokens_decoder()
    model, vocab = file["model"], reader.library.get_vocab(with_added_tokens=True)
    written = _find_writing([*_steps(file["normalizer"]), *_steps(file["pre_tokenizer"])])
    if written is None or model["type"] not in ("BPE", "Unigram") or model.get("continuing_subword_prefix") or \
            model.get("end_of_word_suffix"):
        return None
    unknown = model.get("unk_id") if model["type"] == "Unigram" else vocab.get(model.get("unk_token"))
    alphabet = import_extra("tokenizers", reader.path).pre_tokenizers.ByteLevel.alphabet()
    whole = (written.as_bytes or model.get("byte_fallback")) and \
        vocab.keys() >= (set(alphabet) if written.as_bytes else BYTE_TOKENS)
    if not whole and unknown is None:
        return None     # the library drops characters without a token
    lengths_of_ids = np.zeros(reader.vocab_size, np.int64)
    for piece, number in vocab.items():
        if not written.as_bytes and piece in BYTE_TOKENS and model.get("byte_fallback"):
            lengths_of_ids[number] = 1
        elif number in added:       # special tokens never come from text
            strips = added[number].lstrip or added[number].rstrip       # the white space next to it
            lengths_of_ids[number] = 0 if added[number].special else UNKNOWN if strips else len(piece.encode())
        else:       # with as_bytes each character is one byte
            lengths_of_ids[number] = len(piece) if written.as_bytes else len(piece.replace(SPACE, " ").encode())
    if not whole:
        lengths_of_ids[unknown] = UNKNOWN
    # The library puts a space before each text between added tokens.
    parted = written.prefix != 0 and any(not token.special for token in added.values())
    exact = written.prefix == 0 and not written.spaces and not (lengths_of_ids == UNKNOWN).any()
    return Lengths(lengths_of_ids, None if parted else written.prefix, exact)


def are_counted(reader: Tokenizer) -> bool:
    """Return whether the token cache counts the bytes of documents."""
    return isinstance(reader, TokenizerFile) and not ((known := lengths(reader)) and known.exact)


class _Written(NamedTuple):
    """How the steps before the model write a text. as_bytes: whether bytes become characters. spaces: whether spaces
    become SPACE. prefix: as in Lengths."""
    as_bytes: bool
    spaces: bool
    prefix: int | None


def _find_writing(steps: list[dict]) -> _Written | None:
    """Return how these steps write a text; None if a step changes or drops text in another way."""
    as_bytes = spaces = False
    prefix: int | None = 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                as_bytes, prefix = True, None if step.get("add_prefix_space") else prefix
            case {"type": "Metaspace", "replacement": "▁"}:
                spaces, prefix = True, prefix if step.get("prepend_scheme") == "never" else None
            case {"type": "Prepend", "prepend": "▁"}:
                spaces, prefix = True, 1
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                spaces = True
            case {"type": "Split" | "Punctuation", "behavior": behavior} if behavior != "Removed":
                pass
            case {"type": kind} if kind in CUTS:
                pass
            case _:
                return None
    return _Written(as_bytes, spaces, prefix)


def _steps(step: dict | None) -> Iterator[dict]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if step and step["type"] == "Sequence":
        for inner in step.get("normalizers") or step.get("pretokenizers") or ():
            yield from _steps(inner)
    elif step:
        yield step
