"""Tokenizers: bytes, a local tokenizer.json, or plain ids without text.

Only the text itself becomes tokens. No separators are added, and the file's settings of truncation and padding are not
used. Names of special tokens are ordinary characters, so that no text can forge a document's beginning. This module
knows no text files, no cache and no batches.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshtrain import files, panics
from meshtrain.data.documents import beside
from meshtrain.storage import addresses, copies

# Usual names of the token before a document or between two. If no file names the token, the first special one is used.
BOS_NAMES = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>", "[BOS]", "<|bos|>", "<|startoftext|>",
             "<|endoftext|>")
FILE = "tokenizer.json"
# Files read next to it, for special tokens, chat templates, and the model's bos_token_id.
BESIDE = (beside.CONFIG, beside.MAP, beside.ADDED, beside.MODEL, beside.TEMPLATE)


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """The largest id + 1, with the separator."""

    @property
    def bos(self) -> int:
        """The separator before every document."""

    @property
    def key(self) -> str:
        """A text that is equal for two tokenizers if and only if both give the same ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, integers [tokens], without separators. Raises: ValueError for an unsupported
        text."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids of any shape. The separator, negative ids and ids beyond the vocabulary are dropped.
        """


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids, with 256 as the separator between documents."""
    vocab_size: int = 257
    bos: int = 256
    key: str = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[(ids >= 0) & (ids < self.bos)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class Ids:
    """Ids of files that were tokenized elsewhere, without their tokenizer. The text of ids is the ids themselves."""
    vocab_size: int
    bos: int
    key: str = "ids"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise ValueError("this run reads token files and has no tokenizer to encode text; set data.tokenizer to the "
                         "tokenizer.json of their ids")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids)
        return " ".join(map(str, ids[(ids >= 0) & (ids < self.vocab_size) & (ids != self.bos)]))


@contextlib.contextmanager
def using(name: str, what: str = "encode the text") -> Iterator[None]:
    """Convert exceptions of the tokenizers library in the block. The library has no exceptions of its own, and panics
    if a pattern backtracks for too long. name, what: the tokenizer and the action, for the message. Raises: ValueError.
    """
    try:
        with panics.caught():
            yield
    except Exception as error:
        raise ValueError(f"{name} cannot {what}: {error}; use a tokenizer with an unknown token, or a byte-level one"
                         ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizerFile:
    """A tokenizer.json of the `tokenizers` library. notes: lines for the user about settings of the file
    that are ignored or changed."""
    path: str
    library: Any    # tokenizers.Tokenizer
    vocab_size: int
    bos: int
    key: str
    notes: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with using(f"data.tokenizer={self.path!r}"):
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids)
        kept = ids[(ids >= 0) & (ids < self.vocab_size) & (ids != self.bos)]
        with using(f"data.tokenizer={self.path!r}", "decode the tokens"):
            return self.library.decode(kept.tolist(), skip_special_tokens=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
    """A model folder's tokenizer.json, used as in transformers: names of special tokens become these tokens, and its
    post-processor adds others, e.g. one before every prompt. notes: as in TokenizerFile. beginning: a note on the token
    that begins prompts, or empty."""
    path: str
    library: Any    # tokenizers.Tokenizer
    notes: tuple[str, ...] = ()
    beginning: str = ""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text. special: apply the post-processor."""
        with using(self.path):
            return self.library.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens and ids beyond the vocabulary."""
        with using(self.path, "decode the tokens"):
            return self.library.decode([int(i) for i in ids], skip_special_tokens=True)


def local(named: str) -> Path:
    """Return the path of data.tokenizer: the file itself, or this host's copy for an address, with the files next to it
    that belong to a tokenizer. An address that does not end in .json names a folder. Raises: StorageError (a
    ValueError); FileSystemError."""
    if not addresses.is_remote(named):
        return Path(os.path.expanduser(named))
    place = addresses.parse(named)
    if not place.path.endswith(".json"):
        place = place.below(FILE)
    folder = place.at(place.path.rpartition("/")[0])
    beside = [str(folder.below(name)) for name in BESIDE]
    return copies.copy_files([str(place)], lambda name: beside, copies.Copying(copies.home()))[0]


def open_published(path: str | os.PathLike) -> Published:
    """Open a model folder's tokenizer. Raises: ValueError if the file is missing or malformed."""
    opened = _library(path, str(path))
    with using(str(path)):
        beginning = beside.beginning(opened.library, opened.said)
    return Published(str(path), opened.library, opened.notes, beginning)


def names_of(path: str | os.PathLike, *ids: int | None) -> list[str]:
    """Return the tokens of a tokenizer.json with these ids; "" for unknown ids. Raises: ValueError."""
    library = _library(path, str(path)).library
    return [(library.id_to_token(number) or "") if number is not None else "" for number in ids]


def find_separator(path: str | os.PathLike) -> int | None:
    """Return the id of the separator that the files next to a tokenizer.json name; None if they name none. Raises:
    ValueError."""
    opened = _library(path, str(path))
    return _find_named(opened.library, opened.said)[0]


def files_of(path: Path) -> list[Path]:
    """Return a tokenizer.json and the files next to it that change how it is read. Raises: ValueError."""
    beside_it = [path.with_name(name) for name in (beside.CONFIG, beside.MAP, beside.ADDED)]
    return [path, *filter(Path.is_file, beside_it if _library(path, str(path)).completed else [])]


def open_file(path: str, bos_token: str = "") -> TokenizerFile:
    """Open the tokenizer of a run. path: data.tokenizer. bos_token: the separator; "": the one that the files name.
    Raises: ValueError if the file is missing or malformed, or has no separator."""
    file = local(path)
    library, key, said, notes, _ = _library(file, f"data.tokenizer={path!r}")
    library.encode_special_tokens = True
    vocab = library.get_vocab(with_added_tokens=True)
    if not vocab:
        raise ValueError(f"data.tokenizer={path!r} has an empty vocabulary; train it first")
    added = library.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    bos, more = (vocab.get(bos_token), ()) if bos_token else _find_named(library, said)
    if bos is None and not bos_token:
        bos = next((vocab[name] for name in BOS_NAMES if name in special), None)
    others = [name for name in special if bos is None or name != library.id_to_token(bos)][:8]
    examples = f", e.g. one of its special tokens: {', '.join(others)}" if others else ""
    if bos is None:
        what = (f"data.bos_token={bos_token!r} is not a token" if bos_token else
                "no file names the separator, and none of the usual separators is a special token")
        raise ValueError(f"{what} of data.tokenizer={path!r}; set data.bos_token to the token that begins every "
                         f"document{examples}")
    if text := _text_with(library, bos):
        raise ValueError(f"text can contain the separator {library.id_to_token(bos)!r} of data.tokenizer={path!r}: "
                         f"{text!r} is encoded to its id, which would begin a new document; name another token as "
                         f"data.bos_token{examples}")
    return TokenizerFile(str(file), library, max(vocab.values()) + 1, bos, key, (*notes, *more))


def _find_named(library: Any, said: beside.Said) -> tuple[int | None, tuple[str, ...]]:
    """Return (the separator that the files next to a tokenizer name, notes)."""
    name, number = said.names.get("bos_token"), said.bos_id
    of_config = number if number is not None and library.id_to_token(number) else None
    bos = library.token_to_id(name) if name else None
    if None in (bos, of_config) or bos == of_config:
        return of_config if bos is None else bos, ()
    return bos, (f"documents begin with {name} ({bos}), the bos_token of {beside.CONFIG}, although {beside.MODEL} has "
                 f"the bos_token_id {of_config} ({library.id_to_token(of_config)})",)


def _text_with(library: Any, bos: int) -> str:
    """Return a plain text that has the separator's id; empty if none is found."""
    name, written = library.id_to_token(bos), library.decode([bos], skip_special_tokens=False)
    texts = [name, f"the {name}cat", f"a {name} b", written, f"the {written}cat"]
    try:
        with using(""):
            encoded = library.encode_batch_fast(texts, add_special_tokens=False)
    except ValueError:      # a text that cannot be encoded has no ids
        return ""
    return next((text for text, encoding in zip(texts, encoded) if bos in encoding.ids), "")


class _Opened(NamedTuple):
    """An opened tokenizer.json. key: equal for two tokenizers if and only if both give the same ids. completed: whether
    files next to tokenizer.json change its tokens."""
    library: Any
    key: str
    said: beside.Said
    notes: tuple[str, ...]
    completed: bool


def _library(path: str | os.PathLike, name: str) -> _Opened:
    """Open a tokenizer.json with the tokens that the files next to it add: without truncation and padding, and with ids
    that are a function of the text alone. name: the tokenizer's name in errors."""
    tokenizers = import_extra("tokenizers", name)
    content = files.attempt(Path(path).read_bytes, f"{name} cannot be read",
                            'name a tokenizer.json of the tokenizers library, or "bytes"')
    try:
        with panics.caught():
            library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:    # the library has no exceptions of its own
        raise ValueError(f"{name} is not a tokenizer.json of the tokenizers library: {error}; "
                         "save it again, or update the library") from None
    library.no_truncation()
    library.no_padding()
    notes, changes = [], []
    if dropout := getattr(library.model, "dropout", None):
        library.model.dropout = None
        notes.append(f"{name}: its dropout of {dropout:g} is off, because it gives a text different ids each time")
        changes.append("dropout off")
    said = beside.read(Path(path).parent)
    more, added = beside.complete(library, said, name)
    digest = hashlib.blake2b("\n".join([*changes, *added]).encode() + b"\n" * bool(changes + added) + content,
                             digest_size=16)
    return _Opened(library, digest.hexdigest(), said, (*notes, *more), bool(added))


def import_extra(module: str, wanted_by: str, extra: str = "data") -> Any:
    """Import a module of an optional dependency. wanted_by: the feature that needs the module, for the message. extra:
    the name of the dependency's extra in pyproject. Raises: ValueError with the command that installs it."""
    import importlib
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{wanted_by} needs the package {module.partition('.')[0]}, which is not installed; "
                         f"run pip install -e '.[{extra}]'") from None
