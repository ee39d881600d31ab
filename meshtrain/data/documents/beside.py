"""Compares a tokenizer.json with what the files next to it say about its tokens.

Tokens that only tokenizer_config.json, added_tokens.json or special_tokens_map.json add are added, in the order of
transformers 5.24, with the properties that tokenizer_config.json gives them. What cannot be had as it is said is
refused; what is taken otherwise is told. A named token (bos_token, …) is special, so that no text has it. This module
knows the library's object alone, and no texts.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain import files

CONFIG, MAP, ADDED, MODEL = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
TEMPLATE = "chat_template.jinja"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FURTHER = ("extra_special_tokens", "additional_special_tokens")
PROPERTIES = ("special", "lstrip", "rstrip", "normalized", "single_word")


@dataclasses.dataclass(frozen=True)
class NamedToken:
    """A token that a file beside the tokenizer names. id: None where the file has none. properties: of PROPERTIES."""
    content: str
    file: str
    id: int | None = None
    properties: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Said:
    """tokens: in the order in which absent ones are added. names: bos_token, … -> its token. begins: add_bos_token;
    None: not said. bos_id: bos_token_id of config.json. notes: on files that say different things."""
    tokens: tuple[NamedToken, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    begins: bool | None = None
    bos_id: int | None = None
    notes: tuple[str, ...] = ()


def read(folder: Path) -> Said:
    """Read the files of a tokenizer's folder. Raises: ValueError for a malformed file."""
    config, legacy, added = (_read(folder / name) for name in (CONFIG, MAP, ADDED))
    tokens, decoder = [], config.get("added_tokens_decoder")
    if decoder is not None:
        legacy, added = {}, {}      # as transformers, which reads them where there is no added_tokens_decoder
        tokens = [_decoded(folder, number, token) for number, token in _object(folder / CONFIG, decoder).items()]
    both = ((legacy, MAP), (config, CONFIG))        # the first wins, as in transformers
    named = [(key, where[key], file) for key in NAMES for where, file in both if _content(where.get(key))]
    names, notes = {}, []
    for key, given, _ in named:
        first = names.setdefault(key, _content(given))
        if first != _content(given):
            notes.append(f"{MAP} has the {key} {first}, and {CONFIG} {_content(given)}; the first is taken, as "
                         f"transformers does")
    special = [(given, file) for key, given, file in named if names[key] == _content(given)]
    special += [(given, file) for key in FURTHER for where, file in both for given in _listed(where.get(key))
                if _content(given)]
    plain = added.keys() - {_content(given) for given, _ in special}
    for content, number in added.items():
        if type(number) is not int:
            raise ValueError(f"{folder / ADDED}: {content!r} has the id {json.dumps(number)[:40]}, which is no whole "
                             f"number; fix it, or take the file away")
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
    """Add what the files beside the tokenizer add. library: tokenizers.Tokenizer, which is changed. named: its name
    for messages.

    Returns (notes, the changes, by which two tokenizers differ). Raises: ValueError where a token does not come out
    at its id.
    """
    from tokenizers import AddedToken       # here: of an extra, without which there is no library
    wanted, new, otherwise, elsewhere = [], [], [], []
    added = library.get_added_tokens_decoder()      # once: some tokenizers have thousands
    for token in said.tokens:
        number = library.token_to_id(token.content)
        here = added.get(number)
        if here is not None and token.id not in (None, number):
            elsewhere.append(f"{token.content} ({token.file}: {token.id}; tokenizer.json: {number})")
            token = dataclasses.replace(token, id=number)       # as transformers
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
        found = library.token_to_id(token.content)
        if found is None or token.id not in (None, found):
            raise ValueError(f"{named}: {token.file} beside it adds {token.content!r} with the id {token.id}, and it "
                             f"comes out with {found}; save the tokenizer again, so that tokenizer.json has all tokens")
        changes.append(json.dumps([found, token.content, dict(sorted(token.properties.items()))]))
    shown = lambda tokens: _few([f"{token.content} ({library.token_to_id(token.content)})" for token in tokens])
    names_of = lambda tokens: " and ".join(dict.fromkeys(token.file for token in tokens))
    notes = [f"{named}: {note}" for note in said.notes]
    if new:
        notes.append(f"{named}: {shown(new)} added, as {names_of(new)} beside it says; tokenizer.json lacks "
                     f"{'it' if len(new) == 1 else 'them'}")
    if otherwise:
        notes.append(f"{named}: {shown(otherwise)} read as {names_of(otherwise)} says, not as tokenizer.json does")
    if elsewhere:
        notes.append(f"{named}: ids are those of tokenizer.json; files beside it give others: {_few(elsewhere)}")
    return notes, changes


def beginning(library: Any, said: Said) -> str:
    """A note where tokenizer_config.json and tokenizer.json disagree on what a prompt begins with; else empty."""
    bos = said.names.get("bos_token")
    if said.begins is None or bos is None:
        return ""
    first = library.encode("a", add_special_tokens=True).ids[:1]
    writes = first != library.encode("a", add_special_tokens=False).ids[:1]
    if said.begins and first != [library.token_to_id(bos)]:
        begins = library.id_to_token(first[0]) if writes else "nothing"
        return f"prompts begin with: {begins} ({CONFIG} asks for {bos}, tokenizer.json does not write it)"
    if not said.begins and writes:
        return (f"prompts begin with: {library.id_to_token(first[0])} (tokenizer.json writes it, though {CONFIG} has "
                f"add_bos_token=false)")
    return ""


def _of_templates(folder: Path, config: Mapping) -> list[str]:
    """A note where two files have different chat templates."""
    path, inside = folder / TEMPLATE, config.get("chat_template")
    if isinstance(inside, list):
        inside = next((one.get("template") for one in inside if isinstance(one, dict) and one.get("name") == "default"),
                      None)
    if not isinstance(inside, str) or not path.is_file():
        return []
    text = files.attempted(path.read_bytes, f"{path} cannot be read", "let it be read")
    return [] if text.strip() == inside.encode(errors="surrogatepass").strip() else [
        f"{TEMPLATE} is another chat template than that of {CONFIG}; the first is taken, as transformers does"]


def _decoded(folder: Path, number: str, token) -> NamedToken:
    content = _content(token)
    if not content or not number.isdecimal():
        raise ValueError(f"{folder / CONFIG}: added_tokens_decoder has {json.dumps({number: token})[:80]}, which is no "
                         f"id with a token; fix it, or take it out")
    return NamedToken(content, CONFIG, int(number), _properties(token))


def _listed(value) -> list:
    """The tokens of a list, or of an object of further names."""
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _properties(given) -> dict[str, bool]:
    return {key: given[key] for key in PROPERTIES if type(given.get(key)) is bool} if isinstance(given, dict) else {}


def _bos_id(path: Path) -> int | None:
    """bos_token_id of a model's config.json beside the tokenizer. A file that is none is not looked at."""
    try:
        model = _read(path)
    except ValueError:
        return None
    inside = model.get("text_config")
    found = (inside if isinstance(inside, dict) and "bos_token_id" in inside else model).get("bos_token_id")
    return found if type(found) is int and "model_type" in model else None


def _content(given) -> str:
    content = given.get("content") if isinstance(given, dict) else given
    return content if isinstance(content, str) else ""


def _few(found: list[str]) -> str:
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _object(path: Path, value) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {json.dumps(value)[:80]} is no object; fix it, or take the file away")
    return value


def _read(path: Path) -> dict:
    """The object of a JSON file; empty if there is none."""
    if not path.is_file():
        return {}
    text = files.attempted(path.read_bytes, f"{path} cannot be read", "let it be read")
    try:
        return _object(path, json.loads(text))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); fix it, or take it away") from None
