"""Compares a tokenizer.json with what the files next to it say about its tokens.

Tokens that are only in tokenizer_config.json, added_tokens.json or special_tokens_map.json are added, in the order of
transformers 5.24, with the properties in tokenizer_config.json. A contradiction that cannot be resolved is an error;
one that is resolved gives a note. A named token (bos_token, …) is special, so that no text contains it. This module
also finds the chat templates of such folders. This module knows only the library's tokenizer, and no texts.
"""
from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain import files, shipped
from meshtrain.storage import addresses, copies

CONFIG, MAP, ADDED, MODEL = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
TEMPLATE = "chat_template.jinja"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FURTHER = ("extra_special_tokens", "additional_special_tokens")
PROPERTIES = ("special", "lstrip", "rstrip", "normalized", "single_word")


@dataclasses.dataclass(frozen=True)
class NamedToken:
    """A token that a file next to the tokenizer names. id: None if the file has none. properties: some of PROPERTIES ->
    value."""
    content: str
    file: str
    id: int | None = None
    properties: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Said:
    """The content of the files next to a tokenizer. tokens: in the order in which missing ones are added. names:
    bos_token, … -> its token. begins: the value of add_bos_token; None: not set. bos_id: bos_token_id of config.json.
    notes: lines about files that contradict each other."""
    tokens: tuple[NamedToken, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    begins: bool | None = None
    bos_id: int | None = None
    notes: tuple[str, ...] = ()


def read(folder: Path) -> Said:
    """Read the files of a tokenizer's folder. Raises: ValueError for a malformed file."""
    config, legacy, added = (read_object(folder / name) for name in (CONFIG, MAP, ADDED))
    tokens, decoder = [], config.get("added_tokens_decoder")
    if decoder is not None:
        legacy, added = {}, {}      # as transformers, which reads them only without an added_tokens_decoder
        tokens = [_decode(folder, number, token) for number, token in _object(folder / CONFIG, decoder).items()]
    both = ((legacy, MAP), (config, CONFIG))        # the first wins, as in transformers
    named = [(key, where[key], file) for key in NAMES for where, file in both if _content(where.get(key))]
    names: dict[str, str] = {}
    notes = []
    for key, given, _ in named:
        first = names.setdefault(key, _content(given))
        if first != _content(given):
            notes.append(f"{MAP} has the {key} {first}, but {CONFIG} has {_content(given)}; the first is used, as in "
                         f"transformers")
    special = [(given, file) for key, given, file in named if names[key] == _content(given)]
    special += [(given, file) for key in FURTHER for where, file in both for given in _list_tokens(where.get(key))
                if _content(given)]
    plain = added.keys() - {_content(given) for given, _ in special}
    for content, number in added.items():
        if type(number) is not int:
            raise ValueError(f"{folder / ADDED}: {content!r} has the id {json.dumps(number)[:40]}, which is not a "
                             f"whole number; fix it, or remove the file")
        tokens.append(NamedToken(content, ADDED, number, {"special": content not in plain,
                                                          "normalized": content in plain}))
    tokens.sort(key=lambda token: token.id)
    tokens += [NamedToken(_content(given), file, None, {key: value for key, value in _properties(given).items()
                                                        if key != "special"}) for given, file in special]
    once: dict[str, NamedToken] = {}
    for token in tokens:
        always = {"special": True} if token.content in names.values() else {}
        once.setdefault(token.content, dataclasses.replace(token, properties={**token.properties, **always}))
    begins = config.get("add_bos_token")
    return Said(tuple(once.values()), names, begins if type(begins) is bool else None, _bos_id(folder / MODEL),
                (*notes, *_of_templates(folder, config)))


def complete(library: Any, said: Said, named: str) -> tuple[list[str], list[str]]:
    """Add the tokens of the files next to the tokenizer. library: the tokenizers.Tokenizer to change. named: the
    tokenizer's name in messages.

    Return (notes, changes). The changes tell apart two tokenizers that have the same tokenizer.json. Raises: ValueError
    if a token does not get its id.
    """
    from tokenizers import AddedToken       # imported here, because it belongs to an extra
    wanted, elsewhere = [], []
    new: list[NamedToken] = []
    otherwise: list[NamedToken] = []
    added = library.get_added_tokens_decoder()      # called once: some tokenizers have thousands of tokens
    for token in said.tokens:
        number = library.token_to_id(token.content)
        here = added.get(number)
        if here is not None and token.id not in (None, number):
            elsewhere.append(f"{token.content} ({token.file}: {token.id}; tokenizer.json: {number})")
            token = dataclasses.replace(token, id=number)       # as in transformers
        properties = {"special": token.id is None, **token.properties}
        if here is not None and token.id is None:       # without an id a file only names it
            properties = {key: getattr(here, key) for key in PROPERTIES}
            properties["special"] |= token.properties.get("special", False)
        if here is None or any(getattr(here, key) != value for key, value in properties.items()):
            wanted.append(dataclasses.replace(token, properties=properties))
            (new if number is None else otherwise).append(token)
    library.add_tokens([AddedToken(token.content, **token.properties) for token in wanted])
    changes = []
    for token in wanted:
        given = library.token_to_id(token.content)
        if given is None or token.id not in (None, given):
            raise ValueError(f"{named}: {token.file} next to it adds {token.content!r} with the id {token.id}, but the "
                             f"library gives it {given}; save the tokenizer again, so that tokenizer.json has all "
                             f"tokens")
        changes.append(json.dumps([given, token.content, dict(sorted(token.properties.items()))]))

    def format_tokens(tokens):
        return _few([f"{token.content} ({library.token_to_id(token.content)})" for token in tokens])

    def names_of(tokens) -> str:
        return " and ".join(dict.fromkeys(token.file for token in tokens))

    notes = [f"{named}: {note}" for note in said.notes]
    if new:
        notes.append(f"{named}: {format_tokens(new)} added from {names_of(new)} next to it; tokenizer.json lacks "
                     f"{'it' if len(new) == 1 else 'them'}")
    if otherwise:
        notes.append(f"{named}: {names_of(otherwise)} redefines {format_tokens(otherwise)} of tokenizer.json; the new "
                     "definition is used")
    if elsewhere:
        notes.append(f"{named}: the ids of tokenizer.json are used; files next to it have other ids: {_few(elsewhere)}")
    return notes, changes


def beginning(library: Any, said: Said) -> str:
    """Return a note if tokenizer_config.json and tokenizer.json disagree on the token that begins a prompt; else ""."""
    bos = said.names.get("bos_token")
    if said.begins is None or bos is None:
        return ""
    first = library.encode("a", add_special_tokens=True).ids[:1]
    writes = first != library.encode("a", add_special_tokens=False).ids[:1]
    if said.begins and first != [library.token_to_id(bos)]:
        begins = library.id_to_token(first[0]) if writes else "nothing"
        return f"prompts begin with: {begins} ({CONFIG} requests {bos}, but tokenizer.json does not write it)"
    if not said.begins and writes:
        return (f"prompts begin with: {library.id_to_token(first[0])} (tokenizer.json writes it, though {CONFIG} has "
                f"add_bos_token=false)")
    return ""


def _of_templates(folder: Path, config: Mapping) -> list[str]:
    """Return a note if two files have different chat templates."""
    path, inside = folder / TEMPLATE, config.get("chat_template")
    if isinstance(inside, list):
        inside = _by_name(inside).get("default")
    if not isinstance(inside, str) or not path.is_file():
        return []
    text = files.attempt(path.read_bytes, f"{path} cannot be read", "make it readable")
    return [] if text.strip() == inside.encode(errors="surrogatepass").strip() else [
        f"{TEMPLATE} and {CONFIG} have different chat templates; the first is used, as in transformers"]


def _decode(folder: Path, number: str, token) -> NamedToken:
    content = _content(token)
    if not content or not number.isdecimal():
        raise ValueError(f"{folder / CONFIG}: added_tokens_decoder has {json.dumps({number: token})[:80]}, which does "
                         f"not map an id to a token; fix it, or remove it")
    return NamedToken(content, CONFIG, int(number), _properties(token))


def _list_tokens(value) -> list:
    """Return the tokens of a list, or of an object of further names."""
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _properties(given) -> dict[str, bool]:
    return {key: given[key] for key in PROPERTIES if type(given.get(key)) is bool} if isinstance(given, dict) else {}


def _bos_id(path: Path) -> int | None:
    """Return bos_token_id of a model's config.json next to the tokenizer; None if the folder has no such file or key. A
    file that is no model's config is ignored."""
    try:
        model = read_object(path)
    except ValueError:
        return None
    inside = model.get("text_config")
    number = (inside if isinstance(inside, dict) and "bos_token_id" in inside else model).get("bos_token_id")
    return number if type(number) is int and "model_type" in model else None


def _content(given) -> str:
    content = given.get("content") if isinstance(given, dict) else given
    return content if isinstance(content, str) else ""


def _few(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


def _object(path: Path, value) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {json.dumps(value)[:80]} is not a JSON object; fix it, or remove the file")
    return value


def read_object(path: Path) -> dict:
    """Return the object of a JSON file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    text = files.attempt(path.read_bytes, f"{path} cannot be read", "make it readable")
    try:
        return _object(path, json.loads(text))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); fix it, or remove it") from None


# ---- chat templates --------------------------------------------------------------------------------------------------


def local_template(given: str) -> Path:
    """Return the path of data.chat_template, or this host's copy for an address: a file if its name has a suffix, else
    a folder. Raises: ValueError if the name is both a shipped template and a local path; StorageError (a ValueError);
    FileSystemError."""
    if not addresses.is_remote(given):
        if (path := shipped.path_of(given, "chat_templates")) in shipped.names("chat_templates"):
            raise ValueError(f"data.chat_template={given!r} is a shipped template, and there is also a file or folder "
                             f"of this name here; write chat_templates/{given}.jinja or ./{given}")
        return Path(shipped.find_file(os.path.expanduser(path)))
    place = addresses.parse(given)
    at, _, name = place.path.rpartition("/")
    if "." in name:
        configs = [str(place.at(at).below(other)) for other in (CONFIG, MAP)]
        return copies.copy_files([given], lambda name: configs, copies.Copying(copies.home()))[0]
    return copies.folder(given, (TEMPLATE, CONFIG, MAP), CONFIG, CONFIG, weights="")


def read_template(place: Path, given: str) -> tuple[str, Path] | None:
    """Return (chat template, its file) of a folder, or of a file with data.chat_template=`given`; None if there is
    none. Raises: ValueError; FileSystemError."""
    def find() -> tuple[str, Path] | None:
        path = place if given and place.is_file() else place / TEMPLATE
        return (path.read_text(encoding="utf-8"), path) if path.is_file() else None

    what, remedy = f"the chat template of {place} cannot be read", "fix it, or name another as data.chat_template"
    try:
        if found := files.attempt(find, what, remedy):
            return found
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: {error}; {remedy}") from None
    path = place / CONFIG
    template = read_object(path).get("chat_template")
    if isinstance(template, list):
        named = _by_name(template)
        if not isinstance(named.get("default"), str):
            raise ValueError(f"{path} has the chat templates {', '.join(map(repr, named))}, but none named 'default'; "
                             "write one of them to a file, and name the file as data.chat_template")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{path}: chat_template is neither a string nor a list of {{name, template}}; name its file "
                         f"as data.chat_template")
    return (template, path) if template else None


def _by_name(templates: list) -> dict:
    return {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}


def named_tokens(folder: Path) -> dict[str, str | None]:
    """Return bos_token, eos_token, … for a chat template; None if explicitly absent. As in transformers,
    special_tokens_map.json takes precedence if tokenizer_config.json has no added_tokens_decoder."""
    config, legacy = read_object(folder / CONFIG), read_object(folder / MAP)
    both = {**legacy, **config} if "added_tokens_decoder" in config else {**config, **legacy}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in both.items()}
    return {key: value for key, value in tokens.items() if key in NAMES and isinstance(value, str | None)}
