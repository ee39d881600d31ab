"""Reads prompts from JSON lines or rows of a table. The model answers them during training (training.objective = "rl").

A line has a "prompt", a text that is used unchanged, or "messages" (a "prompt" may also be a list of messages). The
chat template renders messages up to the assistant's answer. All other keys of the line are for the reward. Batch n is a
function of (seed, n): epochs of all prompts, each freshly shuffled. All prompts are held in memory.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data import globs, sources
from meshtrain.data.batches import order
from meshtrain.data.documents import chat, conversations, formats
from meshtrain.data.documents.tokenizer import Ids, Tokenizer
from meshtrain.units import amount

ORDER, HELD = 7, 8      # seed tags: epoch, hold-out
EXAMPLE = '{"prompt": "…", "answer": "…"}'
MOST_FAULTS = 5         # faults in a message


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt. ids: int32 [T], with the token that begins a document. text: what the reward function receives. line:
    the whole line. place: file and line, for messages."""
    ids: np.ndarray
    text: str
    line: dict
    place: str


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a run. prompts: to train on, at least one. held: to validate on, in file order."""
    prompts: Sequence[Prompt]
    held: Sequence[Prompt]
    seed: int

    def draw(self, first: int, count: int) -> list[Prompt]:
        """Return the prompts `first` to first + count - 1 of the endless sequence of epochs."""
        epochs, places = np.divmod(np.arange(first, first + count), len(self.prompts))
        return [self.prompts[self._order(epoch)[place]] for epoch, place in zip(epochs.tolist(), places.tolist())]

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the prompts to train on, with everything that their rewards read."""
        digest = hashlib.blake2b(digest_size=10)
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.ids.tolist(), prompt.line], sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        return max(len(prompt.ids) for prompt in (*self.prompts, *self.held))

    def longest_with_answer(self, max_tokens: int) -> int:
        """Return the positions of the longest prompt with an answer. The answer's last token is only a target."""
        return self.longest + max_tokens - 1

    @functools.lru_cache(maxsize=4)
    def _order(self, epoch: int) -> np.ndarray:
        return order.permutation(len(self.prompts), self.seed, ORDER, epoch)


def open_prompts(data, *, vocab_size: int, seed: int, longest: int,
                 folders: Sequence[Path] = ()) -> tuple[sources.Corpus, Prompts]:
    """Return (a corpus with the tokenizer but without documents, the prompts of data.source = "prompts").

    longest: maximum tokens of a prompt. folders: as in `sources.describe`. Raises: ValueError with every fault of the
    tokenizer or the files, a line each.
    """
    reader, eos = sources.reader_of(data, vocab_size=vocab_size)
    if isinstance(reader, Ids):
        raise ValueError('data.source="prompts" needs a tokenizer of text; set data.tokenizer')
    template = functools.cache(lambda: chat.open_template(reader, data.chat_template, folders,
                                                          arguments=dict(data.template_arguments)))
    def read(patterns, key: str) -> list[Prompt]:
        paths = sources.on_this_host(globs.match_globs(patterns, "prompts", key=key), "prompts", data.cache)
        return [prompt for path in paths for prompt in _read(path, reader, template)]
    prompts = read(data.paths, "paths")
    held = read(data.validation_paths, "validation_paths") if data.validation_paths else []
    if both := sorted({one.place for one in prompts} & {one.place for one in held}):
        raise ValueError(f"data.validation_paths: {both[0]} is also training data; remove the file from one of the two")
    if beyond := [(one.place, int(one.ids.max())) for one in (*prompts, *held) if one.ids.max(initial=0) >= vocab_size]:
        told = ", ".join(f"{place} has {id}" for place, id in beyond[:MOST_FAULTS])
        raise ValueError(f"{amount(len(beyond), 'prompt')} with ids that the model lacks: "
                         f"model.vocab_size={vocab_size} has 0 to {vocab_size - 1} ({told}); use "
                         f"model.vocab_size={reader.vocab_size} or more, or, if a model folder fixes it, remove the "
                         "prompts")
    if data.template_arguments.model_extra and not template.cache_info().currsize:
        raise ValueError("data.template_arguments is not read, since all prompts are texts, which no chat template "
                         "renders; give messages, or leave it out")
    digest = hashlib.blake2b(json.dumps([reader.key, reader.bos]).encode(), digest_size=8)
    for one in prompts:
        digest.update(json.dumps([one.ids.tolist(), one.line], sort_keys=True).encode())
    if not prompts:
        raise ValueError(f"the files of data.paths={list(data.paths)} are empty; give prompts, one a line, e.g. "
                         f"{EXAMPLE}")
    if long := [one for one in (*prompts, *held) if len(one.ids) > longest]:
        told = ", ".join(f"{one.place} has {len(one.ids)}" for one in long[:MOST_FAULTS])
        raise ValueError(f"{amount(len(long), 'prompt')} longer than the {longest} tokens that "
                         f"data.seq_len={data.seq_len} leaves after an answer of "
                         f"rl.max_tokens={data.seq_len - longest + 1} ({told}); use a larger data.seq_len, or remove "
                         "them")
    if not held and data.validation_fraction and len(prompts) > 1:
        count = max(1, int(len(prompts) * data.validation_fraction))
        drawn = order.permutation(len(prompts), HELD)
        held, prompts = ([prompts[i] for i in np.sort(part)] for part in (drawn[:count], drawn[count:]))
    corpus = sources.Corpus((), (), reader, eos, (), (), digest.hexdigest())
    return corpus, Prompts(tuple(prompts), tuple(held), seed)


def _read(path: str, reader: Tokenizer, template: Callable[[], chat.Template]) -> list[Prompt]:
    found = []
    with formats.reading(path):
        for place, line, _ in formats.read_rows(path, EXAMPLE):
            try:
                found.append(Prompt(*_prompt(line, reader, template), line, f"{path}, {place}"))
            except ValueError as error:
                raise formats.fault(path, place, str(error)) from None
    return found


def _prompt(line: dict, reader: Tokenizer, template: Callable[[], chat.Template]) -> tuple[np.ndarray, str]:
    """Return (ids, text) of a line's prompt. Raises: ValueError."""
    key = "messages" if line.get("messages") is not None else "prompt"
    text = line.get(key)
    if key == "messages" or isinstance(text, list):
        messages = conversations.read_messages(text, key)
        if messages[-1]["role"] == conversations.ASSISTANT:
            raise ValueError("ends with an answer of the assistant, but the model must generate the answer; leave it "
                             "out")
        ids = chat.prompt(template(), messages, conversations.read_tools(line), conversations.read_arguments(line))
        return ids, reader.decode(ids.tolist())
    if conversations.read_arguments(line):
        raise ValueError(f"has {chat.ARGUMENTS}, but its prompt is a text, which no chat template renders; give the "
                         f"prompt as messages, or remove the key")
    if not isinstance(text, str):
        keys = ", ".join(map(repr, list(line)[:8])) or "none"
        raise ValueError(f'has no text in "prompt" and no "messages" (its keys: {keys}); write e.g. {EXAMPLE}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half a character (a lone surrogate); fix or remove the line") from None
    (ids,) = reader.encode([text])
    return np.concatenate([[reader.bos], ids]).astype(np.int32), text
