"""Finds and opens the sources of [data]. A Source (contracts.py) is a list of documents with known ends, for random
access.

A source is byte files, which are read unchanged, or memory-mapped token files: the user's own files, or files that the
token cache made from text, JSON lines, Parquet or Arrow. Memory holds only names and sizes. This module knows no
sequences, batches, steps or hosts.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain import custom
from meshtrain.data import globs
from meshtrain.data.cache import given_tokens, parts, token_cache
from meshtrain.data.documents import chat, compressed, contracts, faulty, formats, own, tokenizer
from meshtrain.data.documents.contracts import Source
from meshtrain.data.documents.conversations import Chats
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.data.files import binary_files, token_files
from meshtrain.storage import addresses, copies
from meshtrain.units import amount

CHATS = ("chat", "preferences")     # sources of conversations
DIVIDED = ("text", "jsonl", "parquet", "arrow")     # sources whose documents data.split_at divides
TRAIN, VALIDATION, CURVE = "train", "validation", "curve"
CACHE = ".meshtrain"    # directory of the token cache, beside the files


@dataclasses.dataclass(frozen=True, eq=False)
class ByteFiles:
    """A source in which a file is a document and a byte is a token."""
    paths: tuple[str, ...]
    lengths: np.ndarray     # int64 [documents], bytes

    @property
    def num_documents(self) -> int:
        return len(self.paths)

    @functools.cached_property
    def totals(self) -> np.ndarray:
        return contracts.totals(self.num_documents, self.ends)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    @property
    def byte_totals(self) -> np.ndarray:
        return self.totals

    def ends(self, documents: np.ndarray) -> np.ndarray:
        return self._ends[documents]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        # This relies on the page cache. Opening costs some 10 us, and no descriptors or maps accumulate.
        with open(self.paths[document], "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise OSError(f"{self.paths[document]} had {self.lengths[document]} bytes when the run began and now ends "
                          f"at byte {start + len(data)}; training files must not change while a run reads them")
        return np.frombuffer(data, np.uint8)


class ValidationSource(NamedTuple):
    """A validation source with its name and its weight in the combined loss (any positive scale)."""
    name: str
    weight: float
    source: Source


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The data of a run: sources with weights (any positive scale), and the tokenizer."""
    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    tokenizer: Tokenizer
    eos: int                                # target after a document's last token
    names: tuple[str, ...]                  # of the sources; "" if it is the only one
    validation: tuple[Source | None, ...]   # validation files per source; None: hold out a share
    # a hash of the sources' totals (Source.totals) and the tokenizer
    fingerprint: str
    curves: tuple[ValidationSource, ...] = ()      # validation sets that replace `validation`
    lines_left_out: int = 0                 # faulty lines, of validation files too, with data.faulty="leave out"


@dataclasses.dataclass(frozen=True, eq=False)
class NamedFiles:
    """One source of [data] and its files. where: the section of the source, for errors. use: TRAIN, VALIDATION (instead
    of a held-out share) or CURVE (a validation set of its own). paths: path -> searched directory, in document order;
    the directory is "" for an address that is not copied yet."""
    where: str
    use: str
    name: str           # "" if it is the only one
    weight: float
    source: str
    field: str
    paths: dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """The sources of a run file's [data]. Their files are found and listed, but not read."""
    components: tuple[NamedFiles, ...]
    eos: int
    tokenizer: Tokenizer
    vocab_size: int     # the model's
    cache: str          # data.cache
    split_at: str       # data.split_at
    chats: Chats | None     # how conversations become tokens, if any

    def open(self, cache_dir: Path, job: parts.Job) -> tuple[Source | None, ...]:
        """Open the sources. Missing parts of the token cache are built, which may take long the first time.

        A result is None for a source with missing parts of another share of the job (parts.Job). Raises: ValueError
        that lists every fault of the sources, a line each; parts.Stopped.
        """
        for note in notes(self.tokenizer, self.vocab_size):
            job.tell(f"note: {note}")
        opened, faults = [], []
        for component in self.components:
            try:
                opened.append(_open(self, component, cache_dir, job))
            except addresses.Refused:
                raise
            except ValueError as error:
                faults.append(_key_of_section(component.where, str(error)))
        if faults:
            raise ValueError("\n".join(faults))
        return tuple(opened)


def describe(data, *, vocab_size: int, folders: Sequence[Path] = ()) -> Description:
    """List the files that the run file's [data] names. This is fast, so that a run is compared with its directory
    before hours of tokenizing.

    vocab_size: the vocabulary size of the model. folders: model folders that may have a chat template, if the
    tokenizer's folder has none. Raises: ValueError that lists every fault of the tokenizer or the files, a line each.
    """
    if data.source == "prompts":
        raise ValueError('data.source="prompts" has no documents to tokenize: training.objective="rl" reads prompts as '
                         'they are. The metrics of a trained model have val_reward; to evaluate its loss on documents, '
                         'give --data.source and --data.paths')
    named = [(f"data.mixture[{i}]", one.name or str(i), one) for i, one in enumerate(data.mixture)] \
        if data.source == "mixture" else [("data", "", data)]
    reader = _open_tokenizer(data, vocab_size)
    given = [(where, TRAIN, name, one, one.paths) for where, name, one in named]
    given += [(f"{where}.{VALIDATION}", VALIDATION, name, one, one.validation_paths)
              for where, name, one in named if one.validation_paths]
    given += [(f"data.validation_sources[{i}]", CURVE, one.name or str(i), one, one.paths)
              for i, one in enumerate(data.validation_sources)]
    components, faults = [], []
    for where, use, name, one, patterns in given:
        try:
            paths = globs.list_paths(one.source, patterns, where)
            # broken links, no permission: reported together, before any work
            globs.file_sizes([path for path in paths if not addresses.is_remote(path)], where)
            weight = 1.0 if one is data else one.weight
            components.append(NamedFiles(where, use, name, weight, one.source, one.field, paths))
        except addresses.Refused:       # at a restart this is no mistake in the run file
            raise
        except ValueError as error:
            faults.append(_key_of_section(where, str(error)))
    if len(given) > len(named):     # there may be ten million names
        real = globs.resolver()

        def identify(component: NamedFiles) -> Iterator[tuple[str, tuple]]:
            """Yield each path with its identity: two functions may yield different documents of a file."""
            code = component.source if custom.is_path(component.source) else ""
            return ((path, (real(path), code)) for path in component.paths)

        trained = {known for component in components if component.use == TRAIN for _, known in identify(component)}
        faults += [f"{_key_of_section(component.where, f'{component.where}.paths')}: {path} is also training data; "
                   "remove the file from one of the two" for component in components if component.use != TRAIN
                   for path, known in identify(component) if known in trained]
    chats = None
    if any(one.source in CHATS for *_, one, _ in given):
        try:
            chats = Chats(chat.open_template(reader, data.chat_template, folders,
                                             arguments=dict(data.template_arguments)), data.loss_on == "all",
                          data.source == "preferences", data.faulty == "leave out")
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    eos = _find_end(data, reader, vocab_size)
    return Description(tuple(components), eos, reader, vocab_size, data.cache, data.split_at, chats)


def reader_of(data, *, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return (tokenizer, id of the document end) for the run file's [data], without looking for its data files. Raises:
    ValueError."""
    reader = _open_tokenizer(data, vocab_size)
    return reader, _find_end(data, reader, vocab_size)


def notes(reader: Tokenizer, vocab_size: int) -> list[str]:
    """Return lines for the user about a tokenizer: settings of its file that are ignored or changed, and ids beyond the
    vocabulary."""
    lines = list(getattr(reader, "notes", ()))
    if reader.vocab_size > vocab_size:
        lines.append(f"the tokenizer has ids up to {reader.vocab_size - 1}, but model.vocab_size={vocab_size} has 0 to "
                     f"{vocab_size - 1}; a text with a larger id is an error")
    return lines


def _find_end(data, reader: Tokenizer, vocab_size: int) -> int:
    """Return the id of the document end. Raises: ValueError if the id or the separator is beyond the vocabulary."""
    eos = _find_eos(data, reader, vocab_size)
    for what, id in (("separator", reader.bos), ("end of documents", eos)):
        if id >= vocab_size:
            raise ValueError(f"data.tokenizer={data.tokenizer!r} has ids up to {reader.vocab_size - 1} (the {what} is "
                             f"{id}), but model.vocab_size={vocab_size} has 0 to {vocab_size - 1}; "
                             f"use model.vocab_size={reader.vocab_size} or more, or the tokenizer of the model folder")
    return eos


def _key_of_section(where: str, text: str) -> str:
    """Return a message about `where`.paths with the key that the run file has."""
    source = where.removesuffix(f".{VALIDATION}")
    return text if source == where else text.replace(f"{where}.paths", f"{source}.validation_paths")


def _find_eos(data, reader: Tokenizer, vocab_size: int) -> int:
    if not data.eos:
        return reader.bos
    if isinstance(reader, tokenizer.Bytes):
        raise ValueError(f'data.eos={data.eos!r} is not read with data.tokenizer="bytes", whose documents end with '
                         '256; leave it out, or name a tokenizer.json')
    if isinstance(reader, tokenizer.Ids):
        number = int(data.eos) if data.eos.isascii() and data.eos.isdigit() else vocab_size
        if number >= vocab_size:
            raise ValueError(f"data.eos={data.eos!r} is not an id below model.vocab_size={vocab_size}, and token files "
                             'without a tokenizer.json do not name tokens; give the id, e.g. data.eos="2"')
        return number
    number = reader.library.token_to_id(data.eos)
    if number is None:
        raise ValueError(f"data.eos={data.eos!r} is not a token of data.tokenizer={data.tokenizer!r}; name one of its "
                         f"tokens, or leave data.eos out: documents then end with the separator")
    return number


def open_corpus(data, *, vocab_size: int, cache_dir: Path, tell: Callable[[str], None] = print,
                folders: Sequence[Path] = ()) -> Corpus:
    """Return the corpus of the run file's [data], by `describe` and `Description.open`.

    cache_dir: for caches that cannot be next to their files. tell: receives lines about long work and warnings.
    folders: as in `describe`. Raises: as `describe` and `Description.open`.
    """
    described = describe(data, vocab_size=vocab_size, folders=folders)
    return corpus_of(described, described.open(cache_dir, parts.Job(tell)))


def corpus_of(described: Description, opened: Sequence[Source]) -> Corpus:
    pairs = list(zip(described.components, opened))
    trained = {component: source for component, source in pairs if component.use == TRAIN}
    validation = {component.name: source for component, source in pairs if component.use == VALIDATION}
    sources, names = tuple(trained.values()), tuple(component.name for component in trained)
    return Corpus(sources, tuple(component.weight for component in trained), described.tokenizer, described.eos, names,
                  tuple(map(validation.get, names)), _fingerprint(sources, described),
                  tuple(ValidationSource(component.name, component.weight, source) for component, source in pairs
                        if component.use == CURVE),
                  sum(pair.left_out.count for source in opened for pair in getattr(source, "pairs", ())
                      if pair.left_out))


def _open_tokenizer(data, vocab_size: int) -> Tokenizer:
    if data.tokenizer != "bytes":
        return tokenizer.open_file(data.tokenizer, data.bos_token)
    kinds = {part.source for part in (data.mixture if data.source == "mixture" else [data])}
    if kinds == {"tokens"} or data.bos_token and all(kind == "tokens" or custom.is_path(kind) for kind in kinds):
        # Only the separator is known; any id of the model may occur.
        if not (data.bos_token.isascii() and data.bos_token.isdigit()):
            raise ValueError(f'data.bos_token={data.bos_token!r} is not a token id, and token files without a '
                             'tokenizer.json do not name their separator; give its id, e.g. data.bos_token="128000", '
                             'or data.tokenizer')
        bos = int(data.bos_token)
        if bos >= vocab_size:
            raise ValueError(f"data.bos_token={data.bos_token!r} is beyond model.vocab_size={vocab_size}; "
                             f"use model.vocab_size={bos + 1} or more")
        return tokenizer.Ids(vocab_size, bos)
    if data.bos_token:
        raise ValueError(f'data.bos_token={data.bos_token!r} is not read with data.tokenizer="bytes", whose separator '
                         'is 256; leave it out, or name a tokenizer.json')
    return tokenizer.Bytes()


def _open(described: Description, component: NamedFiles, cache_dir: Path, job: parts.Job) -> Source | None:
    where, source = component.where, component.source
    roots = on_this_host(component.paths, source, described.cache, job)
    paths, by_code = list(roots), custom.is_path(source)
    packed = any(path.endswith(compressed.SUFFIXES) for path in paths)
    split_at = described.split_at if source in DIVIDED else ""
    if isinstance(described.tokenizer, tokenizer.Bytes) and source in ("stdlib", "text") and not (packed or split_at):
        return open_files(paths, where)
    groups = []
    for root, together in itertools.groupby(paths, roots.__getitem__):
        # Do not write into the Python installation.
        beside = [Path(root) / CACHE] if root and source != "stdlib" else []
        caches = [Path(os.path.expanduser(described.cache))] if described.cache else [*beside, cache_dir]
        kind = own.OWN if by_code else "text" if source == "stdlib" else source
        groups += [(group, caches) for group in token_cache.group(kind, list(together), root)]
    if source == "tokens":
        built = given_tokens.open_given([(path, caches) for (path,), caches in groups], described.tokenizer.bos, job)
    else:
        chats = described.chats if source in CHATS else None
        field = source if by_code else component.field
        built = token_cache.open_tokenized(kind, groups, field, described.tokenizer, job, chats, split_at)
    if source == "tokens" or by_code or described.tokenizer.vocab_size > described.vocab_size:
        _check_ids(list(zip(built, (paths for paths, _ in groups))), described)
    pairs = tuple(pair for pair in built if pair is not None)
    if len(pairs) < len(built):
        return None
    opened = token_files.TokenFiles(pairs, complete=source in CHATS)
    for line in faulty.describe(where, [pair.left_out for pair in pairs if pair.left_out]):
        job.tell(_key_of_section(where, line))
    _check_not_empty(where, paths, opened, job.tell)
    return opened


def on_this_host(paths: dict[str, str], source: str, cache: str, job: parts.Job = parts.Job()) -> dict[str, str]:
    """Return `paths` with local files instead of addresses. Files at addresses are copied to data.cache, or to the
    default directory of copies. Raises: as `copies.copy_files`."""
    remote = [path for path in paths if addresses.is_remote(path)]
    if not remote:
        return paths
    directory = Path(os.path.expanduser(cache)) if cache else copies.home()
    beside = binary_files.companions if source == "tokens" else lambda path: ()
    copied = copies.copy_files(remote, beside, copies.Copying(directory, job.tell, job.check_stop))
    local = {path: (str(copy), str(directory)) for path, copy in zip(remote, copied, strict=True)}
    return dict(local.get(path, (path, root)) for path, root in paths.items())


def _check_ids(parts: Sequence[tuple[token_files.IndexedTokens | None, Sequence[str]]], described: Description) -> None:
    """Check the ids of parts. Raises: ValueError that lists every part with an id beyond the vocabulary. parts: (pair,
    its files)."""
    faults, size = [], described.vocab_size
    for pair, (path, *more) in parts:
        if pair and (largest := token_files.largest(pair)) >= size:
            document, beyond = token_files.first_beyond(pair, size)
            named = isinstance(described.tokenizer, tokenizer.TokenizerFile) and \
                described.tokenizer.library.id_to_token(beyond)
            behind = f" and {amount(len(more), 'file')} after it" if more else ""
            faults.append(f"{path}{behind}: document {document} (from 0) "
                          f"holds the id {beyond}{f' ({named})' if named else ''}, but model.vocab_size={size} has 0 "
                          f"to {size - 1}; use model.vocab_size={largest + 1} or more, or the files of another "
                          f"tokenizer; if a model folder fixes the vocabulary, leave that text out")
    if faults:
        raise ValueError("\n".join(faults))


def _check_not_empty(where: str, paths: Sequence[str], files: token_files.TokenFiles,
                     tell: Callable[[str], None]) -> None:
    if not any(pair.num_tokens for pair in files.pairs):
        raise ValueError(f"{where}.paths: no text in {amount(len(paths), 'file')} ({_few(paths)}); name "
                         f"files with text")
    empty = [pair.path for pair in files.pairs if not pair.num_documents]
    if empty:
        tell(f"{where}.paths: no document in {len(empty)} of {amount(len(files.pairs), 'file')} ({_few(empty)})")


SAMPLED, SAMPLED_TEXTS = 1 << 20, 64        # sample of a source: ids of a token file; texts, or parts of a long one


def sample(described: Description, component: NamedFiles) -> np.ndarray:
    """Return ids from the beginning of a source: the ids of its first texts or conversations, or the first SAMPLED ids
    of a token file.

    Reads little and builds no cache. For files at addresses, reads nothing and returns no ids. Raises: ValueError, also
    for an id beyond the vocabulary.
    """
    paths, reader, kind = list(component.paths), described.tokenizer, component.source
    if any(map(addresses.is_remote, paths)):
        return np.zeros(0, np.int64)
    path = paths[int(np.argmax(open_files(paths, component.where).lengths > 0))]
    if kind == "tokens":
        file = binary_files.open_ids(path)
        ids = np.asarray(token_files.map_file(file.files[0], file.dtype, file.offset, min(file.size, SAMPLED)))
    elif kind in CHATS:
        assert described.chats is not None
        batch, _ = next(described.chats.read(path, lambda line: None), ([], 0))
        ids = np.concatenate([encoded.ids for encoded in batch]) if batch else np.zeros(0, np.int64)
    else:
        pieces = own.read(kind, path, reader) if custom.is_path(kind) else formats.read(
            "text" if kind == "stdlib" else kind, path, component.field)
        ids = np.concatenate([np.zeros(0, np.int64), *(
            reader.encode([piece.text])[0] if isinstance(piece, formats.TextPiece) else piece
            for piece in itertools.islice(pieces, SAMPLED_TEXTS))])
    if len(ids) and (largest := int(ids.max())) >= described.vocab_size:
        raise ValueError(f"{path} begins with ids up to {largest}, but model.vocab_size={described.vocab_size} has 0 "
                         f"to {described.vocab_size - 1}; use model.vocab_size={largest + 1} or more, or another "
                         "tokenizer")
    return ids


def _few(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")


def _fingerprint(opened: Sequence[Source], described: Description) -> str:
    reader, chats = described.tokenizer, described.chats
    digest = hashlib.blake2b(json.dumps([reader.key, reader.bos, *([chats.template.key] if chats else [])]).encode(),
                             digest_size=8)
    for source in opened:
        digest.update(np.asarray([source.num_documents], "<i8").tobytes())    # separates sources
        digest.update(np.asarray(source.totals, "<i8").tobytes())
        # Code of the run's own may yield other tokens at another call or on another host, for example of a set.
        digest.update(np.asarray([pair.crc32[:2] for pair in getattr(source, "pairs", ()) if pair.crc32], "<i8"
                                 ).tobytes())
    return digest.hexdigest()


def open_files(paths: Sequence[str], where: str = "data") -> ByteFiles:
    """Return byte files with their lengths, which come from stat alone: no file is read before a batch needs it."""
    lengths = globs.file_sizes(paths, where)
    if not lengths.any():
        raise ValueError(f"{where}.paths: no text in {amount(len(paths), 'file')} ({_few(paths)}); name "
                         f"files with text")
    return ByteFiles(tuple(paths), lengths)
