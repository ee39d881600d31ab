"""The stop tokens that end an answer, of a run or a folder, for sampling, generating, evaluating and exports alike.

First come those that the training writes: behind an answer the chat template's end of turn, behind a document data.eos
or the separator. Then come those of the weights that the run starts from: eos_token_id of a model folder, or the ends
of another run. A run's ends are saved with its checkpoints.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.checkpoint.shared import Saved
from meshtrain.cluster import agree
from meshtrain.config import Data, Run
from meshtrain.data import sources
from meshtrain.data.documents import chat, tokenizer
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.huggingface import folder, settings

CHATS = (*sources.CHATS, "prompts")     # sources with answers that a chat template writes, of prompts perhaps
ANSWER = "zebra"        # of the probe: a word that templates leave as it is, but for its case
PROBE = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": ANSWER}]


@dataclasses.dataclass(frozen=True)
class Ends:
    """ids: stop tokens, those that were taught first. stops: stop strings, where a template writes no special token.
    turn: the template's end of turn, the first of ids; None: there is none. bos: the token before a document; None:
    unknown. note: what the user should know."""
    ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    turn: int | None = None
    bos: int | None = None
    note: str = ""

    def shown(self, reader: Tokenizer) -> str:
        """For messages: <|im_end|> (279), <|endoftext|> (277)."""
        found = [shown(reader, one) for one in self.ids] + [f"the text {one!r}" for one in self.stops]
        return ", ".join(found) or "nothing but their length"

    def as_saved(self) -> dict:
        """For a checkpoint's metadata."""
        return {"ids": list(self.ids), "stops": list(self.stops), "turn": self.turn}

    def as_json(self) -> int | list[int] | None:
        """eos_token_id of a folder."""
        return list(self.ids) if len(self.ids) > 1 else next(iter(self.ids), None)


def together(found: Callable[[], Ends]) -> Ends:
    """found() in process 0, for all. Raises: as it does."""
    one = agree.on_first(lambda: dataclasses.asdict(found()))
    return Ends(**(one | {"ids": tuple(one["ids"]), "stops": tuple(one["stops"])}))


def shown(reader: Tokenizer, id: int) -> str:
    name = reader.library.id_to_token(id) if isinstance(reader, tokenizer.TokenizerFile) else None
    return f"{name} ({id})" if name else str(id)


def of_template(template: chat.Template) -> Ends:
    """What a chat template writes behind an answer: its first special token, then the tokenizer's eos_token. Where it
    writes none, the text itself, unless a tokenizer.json leaves only white space of it. Raises: ValueError where the
    template refuses a question with an answer."""
    (whole,) = chat.encode(template, [chat.Conversation(PROBE, [True, True])], learn_all=True)
    ids, library = [int(one) for one in whole.ids], template.library
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
    turn = next((one for one in ids[end:] if one in special), None)
    eos = library.token_to_id(template.tokens.get("eos_token") or "")
    found = tuple(dict.fromkeys(one for one in (turn, eos) if one is not None))
    return Ends(found, (text,) if text and turn is None else (), turn)


def of_folder(directory: Path | None) -> Ends:
    """Those that a model folder's files name; none without a folder. Raises: ValueError."""
    return Ends(settings.stop_ids(directory) if directory and folder.is_one(directory) else ())


def of_data(data: Data, vocab_size: int, before: Ends, folders: Sequence[Path]) -> Ends:
    """The stop tokens of a run with this section [data]. before: those of the weights that it starts from. folders: as
    `sources.describe`. Raises: ValueError where the tokenizer cannot be opened."""
    reader, eos = sources.reader_of(data, vocab_size=vocab_size)
    kinds = _kinds(data)
    turn = _of_chats(data, reader, folders, kinds) if kinds & set(CHATS) else Ends()
    own = (*turn.ids, *([eos] if data.eos or kinds - set(sources.CHATS) else ()))
    ids = tuple(dict.fromkeys(one for one in (*own, *before.ids) if one < vocab_size))
    stops = tuple(dict.fromkeys((*turn.stops, *before.stops)))
    return Ends(ids if ids or stops else (eos,), stops, turn.turn if turn.turn in ids else None, reader.bos, turn.note)


def _kinds(data: Data) -> set[str]:
    return {one.source for one in data.mixture} if data.source == "mixture" else {data.source}


def _of_chats(data: Data, reader: Tokenizer, folders: Sequence[Path], kinds: set[str]) -> Ends:
    try:
        template = chat.open_template(reader, data.chat_template, folders)
    except ValueError as error:
        if kinds == {"prompts"} and not data.chat_template:     # they may all be texts
            return Ends()
        return Ends(note=f"what the chat template writes behind an answer is unknown: {error}")
    try:
        found = of_template(template)
    except ValueError as error:
        return Ends(note=f"what the chat template writes behind an answer is unknown, since it refuses a question with "
                         f"an answer: {error}")
    if found.turn is None and not found.stops:
        return dataclasses.replace(found, note=(
            f"the chat template {template.path} writes nothing behind an answer that could end it, so the model does "
            f"not learn to stop; data.chat_template may name one that writes an end of turn"))
    if found.turn is not None and data.loss_on == "assistant" and kinds & set(sources.CHATS) and _is_not_learned(
            template, found.turn):
        return dataclasses.replace(found, note=(
            f"the chat template {template.path} closes {{% generation %}} before {shown(reader, found.turn)}, which is "
            f"not learned, so the model does not learn to stop; data.chat_template may name one that closes it behind"))
    return found


def _is_not_learned(template: chat.Template, turn: int) -> bool:
    try:
        (one,) = chat.encode(template, [chat.Conversation(PROBE, [True, True])])
    except ValueError:      # of conversations it is told with their line
        return False
    return turn not in one.ids[one.mask]


def of_saved(saved: Saved, companions: Path | None) -> Ends:
    """The stop tokens of a run, from one of its checkpoints. companions: run.dir/hf; None: there is none. Raises:
    ValueError."""
    recorded = saved.metadata["data"]
    bos = recorded["tokenizer"][1]
    if found := recorded.get("ends"):
        return Ends(tuple(found["ids"]), tuple(found["stops"]), found["turn"], bos)
    before = of_folder(companions)      # saved by an earlier version
    try:
        return of_data(Data(**saved.run["data"]), saved.run["model"]["vocab_size"], before,
                       [companions] if companions else [])
    except ValueError as error:
        return dataclasses.replace(before, bos=bos, 
                                   note=f"the token that ended documents in this run is unknown: {error}")


def of_run(run: Run, saved: Saved | None) -> Ends:
    """The stop tokens of a run that begins or resumes. saved: its checkpoint, or that of the run that
    checkpoint.init_from names; None: neither. Raises: ValueError."""
    folders = folder.companions_of(run.run.dir, run.checkpoint.init_from)
    there = next(filter(folder.is_one, folders), None)
    return of_data(run.data, run.model.vocab_size, of_saved(saved, there) if saved else of_folder(there), folders)


# ---- the end of documents --------------------------------------------------------------------------------------------


def of_documents(directory: Path, separator: int | None) -> int | None:
    """The end of documents that a model folder's files name: the first eos_token_id of config.json, else of
    generation_config.json. None where there is none, or where the separator ends them."""
    ids = (*settings.eos_ids(directory, settings.CONFIG), *settings.eos_ids(directory, settings.GENERATION))
    return None if separator in ids else next(iter(ids), None)


def default(run: Run, origin: Saved | None) -> tuple[str, str]:
    """(data.eos of a run that begins, a line to tell or "", where it has documents): that of the run file, else the end
    of documents of the weights that it starts from. origin: the checkpoint of checkpoint.init_from, where that is a
    run. Raises: ValueError."""
    eos, line = _default(run, origin)
    return eos, line if _kinds(run.data) - set(CHATS) else ""


def _default(run: Run, origin: Saved | None) -> tuple[str, str]:
    source, vocab_size = run.checkpoint.init_from, run.model.vocab_size
    if run.data.eos or not source:
        return run.data.eos, ""
    try:
        reader, separator = sources.reader_of(run.data, vocab_size=vocab_size)
    except ValueError:      # told where the data are opened
        return "", ""
    if isinstance(reader, tokenizer.Bytes):
        return "", ""
    if origin and (name := origin.run["data"]["eos"]):
        try:
            _, id = sources.reader_of(run.data.model_copy(update={"eos": name}), vocab_size=vocab_size)
        except ValueError:      # of another tokenizer
            return "", ""
        return name, f"documents end with {shown(reader, id)}, data.eos of {source}; data.eos names another"
    directory = next(filter(folder.is_one, folder.companions_of("", source)), None)
    id = of_documents(directory, separator) if directory else None
    if id is None:
        return "", ""
    if isinstance(reader, tokenizer.Ids):
        name = str(id)
    else:
        token = reader.library.get_added_tokens_decoder().get(id)
        name = token.content if token and token.special else ""
    if not name or id >= vocab_size:
        return "", (f"note: documents end with the separator {shown(reader, separator)}, since the eos_token_id {id} "
                    f"of {source} is no special token of data.tokenizer; data.eos names another")
    return name, f"documents end with {shown(reader, id)}, the eos_token_id of {source}; data.eos names another"


# ---- written to folders ----------------------------------------------------------------------------------------------


def generation_of(source: Path, ends: Ends) -> dict | None:
    """Build the content of an export's generation_config.json: the ids of `ends`, then those of `source`. None if
    `source` already has these ids. Raises: ValueError."""
    before = settings.stop_ids(source)
    ids = tuple(dict.fromkeys((*ends.ids, *before)))
    if ids == before:
        return None
    if files.is_file(source / settings.GENERATION):
        found = settings.read(source, settings.GENERATION)
    else:       # what others take from config.json where there is no such file
        of_config = settings.text_of(settings.read(source))
        found = {key: of_config[key] for key in ("bos_token_id", "pad_token_id") if of_config.get(key) is not None}
    return {**found, "eos_token_id": Ends(ids).as_json()}


def write_ends(place: Path, source: Path | None, ends: Ends) -> None:
    """Make an export name the ends: in generation_config.json where it has the companions of `source`, and where a chat
    template ended the answers, as eos_token of the tokenizer's files. Raises: ValueError."""
    if source and (generation := generation_of(source, ends)):
        files.write(place / settings.GENERATION, json.dumps(generation, indent=1))
    path = place / tokenizer.FILE
    if ends.turn is None or not files.is_file(path):
        return
    (name,) = tokenizer.names_of(path, ends.turn)
    found = {one: settings.read(place, one) for one in chat.CONFIG_FILES if files.is_file(place / one)}
    template = place / chat.TEMPLATE_FILE
    texts = [json.dumps(one.get("chat_template")) for one in found.values()] + [
        template.read_text(encoding="utf-8") if files.is_file(template) else ""]
    if not name or any("eos_token" in text for text in texts):      # another would change what the template writes
        return
    for file, content in found.items():
        token = content.get("eos_token")
        written = token.get("content") if isinstance(token, dict) else token
        if written != name and ("eos_token" in content or file == chat.CONFIG_FILES[0]):
            changed = {**token, "content": name} if isinstance(token, dict) else name
            files.write(place / file, json.dumps(content | {"eos_token": changed}, indent=1, ensure_ascii=False))
