"""Finds the stop tokens of a run or a model folder. Sampling, generation, evaluation and exports use the same stop
tokens.

The first stop tokens are those that training writes: the chat template's end of turn after an answer, and data.eos or
the separator after a document. The stop tokens of the initial weights follow: eos_token_id of a model folder, or the
stop tokens of another run. A run's stop tokens are saved with its checkpoints.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.checkpoint.saved import Saved
from meshtrain.cluster import agree
from meshtrain.config import Data, Run
from meshtrain.data import sources
from meshtrain.data.documents import beside, chat, tokenizer
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.huggingface import settings
from meshtrain.storage import model_folder

CHATS = (*sources.CHATS, "prompts")     # sources that use a chat template; prompts may be plain texts instead
ANSWER = chat.PROBE[1]["content"]       # a template may change its case, but no more


@dataclasses.dataclass(frozen=True)
class Ends:
    """The stop tokens and stop strings of a model.

    ids: stop tokens; the stop tokens of the training data come first. stops: stop strings, if a template writes no
    special token. turn: the template's end of turn, the first of ids; None: the template has no such token. bos: the
    token before a document; None: unknown. note: a warning for the user.
    """
    ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    turn: int | None = None
    bos: int | None = None
    note: str = ""

    def describe(self, reader: Tokenizer) -> str:
        """Return the stop tokens and strings for messages: <|im_end|> (279), <|endoftext|> (277)."""
        words = [format_token(reader, one) for one in self.ids] + [f"the text {one!r}" for one in self.stops]
        return ", ".join(words) or "nothing but their length"

    def as_saved(self) -> dict:
        """Return the entry for a checkpoint's metadata."""
        return {"ids": list(self.ids), "stops": list(self.stops), "turn": self.turn}

    def as_json(self) -> int | list[int] | None:
        """Return eos_token_id for the config files of a model folder."""
        return list(self.ids) if len(self.ids) > 1 else next(iter(self.ids), None)


def agree_on(find: Callable[[], Ends]) -> Ends:
    """Call find() in process 0; return its value in every process. Raises: as find()."""
    ends = agree.on_first(lambda: dataclasses.asdict(find()))
    return Ends(**(ends | {"ids": tuple(ends["ids"]), "stops": tuple(ends["stops"])}))


def format_token(reader: Tokenizer, id: int) -> str:
    name = reader.library.id_to_token(id) if isinstance(reader, tokenizer.TokenizerFile) else None
    return f"{name} ({id})" if name else str(id)


def of_template(template: chat.Template) -> Ends:
    """Return the tokens that a chat template writes after an answer: its first special token, then the tokenizer's
    eos_token. If the template writes no special token, the text that the template writes is a stop string; with a
    tokenizer.json, a text of only white space is no stop string. Raises: ValueError if the template refuses a question
    with an answer."""
    (whole,) = chat.encode(template, [chat.Conversation(chat.PROBE, [True, True])], learn_all=True)
    ids, library = [int(id) for id in whole.ids], template.library
    decode = template.tokenizer.decode if library is None else lambda some: library.decode(
        list(some), skip_special_tokens=False)
    rendered = decode(ids)
    count = rendered.lower().count(ANSWER)      # a system prompt of the template may have the word, too
    end = next(n for n in range(len(ids) + 1) if decode(ids[:n]).lower().count(ANSWER) == count) if count else len(ids)
    written = rendered[rendered.lower().rindex(ANSWER) + len(ANSWER):] if count else ""
    text = written.strip() or (written if library is None and "\n" in written else "")
    if library is None:
        return Ends(stops=(text,) if text else ())
    special = {number for number, token in library.get_added_tokens_decoder().items() if token.special}
    turn = next((id for id in ids[end:] if id in special), None)
    eos = library.token_to_id(template.tokens.get("eos_token") or "")
    stop_ids = tuple(dict.fromkeys(id for id in (turn, eos) if id is not None))
    return Ends(stop_ids, (text,) if text and turn is None else (), turn)


def of_folder(directory: Path | None) -> Ends:
    """Return the stop tokens in a model folder's files; no stop tokens if `directory` is None. Raises: ValueError."""
    return Ends(settings.stop_ids(directory) if directory and model_folder.is_at(directory) else ())


def of_data(data: Data, vocab_size: int, before: Ends, folders: Sequence[Path]) -> Ends:
    """Return the stop tokens of a run with this section [data]. before: the stop tokens of the initial weights.
    folders: as in `sources.describe`. Raises: ValueError if the tokenizer cannot be opened."""
    reader, eos = sources.reader_of(data, vocab_size=vocab_size)
    kinds = _kinds(data)
    turn = _of_chats(data, reader, folders, kinds) if kinds & set(CHATS) else Ends()
    own = (*turn.ids, *([eos] if data.eos or kinds - set(sources.CHATS) else ()))
    ids = tuple(dict.fromkeys(id for id in (*own, *before.ids) if id < vocab_size))
    stops = tuple(dict.fromkeys((*turn.stops, *before.stops)))
    return Ends(ids if ids or stops else (eos,), stops, turn.turn if turn.turn in ids else None, reader.bos, turn.note)


def _kinds(data: Data) -> set[str]:
    return {source.source for source in data.mixture} if data.source == "mixture" else {data.source}


def _of_chats(data: Data, reader: Tokenizer, folders: Sequence[Path], kinds: set[str]) -> Ends:
    try:
        template = chat.open_template(reader, data.chat_template, folders, arguments=dict(data.template_arguments))
    except ValueError as error:
        if kinds == {"prompts"} and not data.chat_template:     # the prompts may all be plain texts
            return Ends()
        return Ends(note=f"it is unknown what the chat template writes after an answer: {error}")
    try:
        ends = of_template(template)
    except ValueError as error:
        return Ends(note=f"it is unknown what the chat template writes after an answer, since it refuses a question "
                         f"with an answer: {error}")
    if ends.turn is None and not ends.stops:
        return dataclasses.replace(ends, note=(
            f"the chat template {template.path} writes no token after an answer that could end it, so the model does "
            f"not learn to stop; set data.chat_template to a template that writes an end of turn"))
    if ends.turn is not None and data.loss_on == "assistant" and kinds & set(sources.CHATS) and _is_not_learned(
            template, ends.turn):
        return dataclasses.replace(ends, note=(
            f"the chat template {template.path} closes {{% generation %}} before {format_token(reader, ends.turn)}, "
            f"so the model does not learn to stop; set data.chat_template to a template that closes it after this "
            f"token"))
    return ends


def _is_not_learned(template: chat.Template, turn: int) -> bool:
    try:
        (encoded,) = chat.encode(template, [chat.Conversation(chat.PROBE, [True, True])])
    except ValueError:      # reported when the conversations are read, with their line
        return False
    return turn not in encoded.ids[encoded.mask]


def of_saved(saved: Saved, companions: Path | None) -> Ends:
    """Return the stop tokens of a run, from one of its checkpoints. companions: run.dir/hf; None if it does not exist.
    Raises: ValueError."""
    recorded = saved.metadata["data"]
    bos = recorded["tokenizer"][1]
    if saved_ends := recorded.get("ends"):
        return Ends(tuple(saved_ends["ids"]), tuple(saved_ends["stops"]), saved_ends["turn"], bos)
    before = of_folder(companions)      # saved by an earlier version
    try:
        return of_data(Data(**saved.run["data"]), saved.run["model"]["vocab_size"], before,
                       [companions] if companions else [])
    except ValueError as error:
        return dataclasses.replace(before, bos=bos, 
                                   note=f"the token that ended documents in this run is unknown: {error}")


def of_run(run: Run, saved: Saved | None) -> Ends:
    """Return the stop tokens of a run that begins or resumes. saved: the checkpoint that the run resumes from, or the
    checkpoint that checkpoint.init_from names; None: neither. Raises: ValueError."""
    folders = model_folder.companion_folders(run.run.dir, run.checkpoint.init_from)
    there = next(filter(model_folder.is_at, folders), None)
    return of_data(run.data, run.model.vocab_size, of_saved(saved, there) if saved else of_folder(there), folders)


# ---- the end of documents --------------------------------------------------------------------------------------------


def of_documents(directory: Path, separator: int | None) -> int | None:
    """Return the token that ends documents according to a model folder's files: the first eos_token_id of config.json,
    else of generation_config.json. None if the files name no such token, or if the separator is among the tokens of
    eos_token_id."""
    ids = (*settings.eos_ids(directory, settings.CONFIG), *settings.eos_ids(directory, settings.GENERATION))
    return None if separator in ids else next(iter(ids), None)


def default(run: Run, origin: Saved | None) -> tuple[str, str]:
    """Return (data.eos of a new run, a line to print). The value is data.eos of the run file, else the token that ends
    documents in the initial weights. The line is empty if nothing is to report or if the data have no documents.

    origin: the checkpoint that checkpoint.init_from names, if it names a run. Raises: ValueError.
    """
    eos, line = _default(run, origin)
    return eos, line if _kinds(run.data) - set(CHATS) else ""


def _default(run: Run, origin: Saved | None) -> tuple[str, str]:
    source, vocab_size = run.checkpoint.init_from, run.model.vocab_size
    if run.data.eos or not source:
        return run.data.eos, ""
    try:
        reader, separator = sources.reader_of(run.data, vocab_size=vocab_size)
    except ValueError:      # reported when the data are opened
        return "", ""
    if isinstance(reader, tokenizer.Bytes):
        return "", ""
    if origin and (name := origin.run["data"]["eos"]):
        try:
            _, id = sources.reader_of(run.data.model_copy(update={"eos": name}), vocab_size=vocab_size)
        except ValueError:      # this run has another tokenizer
            return "", ""
        return name, f"documents end with {format_token(reader, id)}, data.eos of {source}; set data.eos to use another"
    directory = next(filter(model_folder.is_at, model_folder.companion_folders("", source)), None)
    id = of_documents(directory, separator) if directory else None
    if id is None:
        return "", ""
    if isinstance(reader, tokenizer.Ids):
        name = str(id)
    else:
        token = reader.library.get_added_tokens_decoder().get(id)
        name = token.content if token and token.special else ""
    if not name or id >= vocab_size:
        return "", (f"note: documents end with the separator {format_token(reader, separator)}, since the eos_token_id "
                    f"{id} of {source} is not a special token of data.tokenizer; set data.eos to use another")
    token_text = format_token(reader, id)
    return name, f"documents end with {token_text}, the eos_token_id of {source}; set data.eos to use another"


# ---- written to folders ----------------------------------------------------------------------------------------------


def generation_of(source: Path, ends: Ends) -> dict | None:
    """Return the content of an export's generation_config.json: the ids of `ends`, then the ids of `source`. None if
    `source` already has exactly these ids, in this order. Raises: ValueError."""
    before = settings.stop_ids(source)
    ids = tuple(dict.fromkeys((*ends.ids, *before)))
    if ids == before:
        return None
    if files.is_file(source / settings.GENERATION):
        content = settings.read(source, settings.GENERATION)
    else:       # without the file, other programs take these from config.json
        of_config = settings.text_of(settings.read(source))
        content = {key: of_config[key] for key in ("bos_token_id", "pad_token_id") if of_config.get(key) is not None}
    return {**content, "eos_token_id": Ends(ids).as_json()}


def write_ends(place: Path, source: Path | None, ends: Ends) -> None:
    """Write the stop tokens into an export's files. Raises: ValueError.

    generation_config.json is written if the export has the companion files of `source`. If a chat template ended the
    answers, eos_token in the tokenizer's files becomes the template's end of turn, unless a template uses eos_token.
    """
    if source and (generation := generation_of(source, ends)):
        files.write(place / settings.GENERATION, json.dumps(generation, indent=1))
    path = place / tokenizer.FILE
    if ends.turn is None or not files.is_file(path):
        return
    (name,) = tokenizer.names_of(path, ends.turn)
    names = [config for config in (beside.CONFIG, beside.MAP) if files.is_file(place / config)]
    configs = {config: settings.read(place, config) for config in names}
    template = place / beside.TEMPLATE
    texts = [json.dumps(config.get("chat_template")) for config in configs.values()] + [
        template.read_text(encoding="utf-8") if files.is_file(template) else ""]
    if not name or any("eos_token" in text for text in texts):      # a new one would change what the template writes
        return
    for file, content in configs.items():
        token = content.get("eos_token")
        written = token.get("content") if isinstance(token, dict) else token
        if written != name and ("eos_token" in content or file == beside.CONFIG):
            changed = {**token, "content": name} if isinstance(token, dict) else name
            files.write(place / file, json.dumps(content | {"eos_token": changed}, indent=1, ensure_ascii=False))
