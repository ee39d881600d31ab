"""Checks of the data: each source has files, and no key that the source's format does not read."""
from __future__ import annotations

from collections.abc import Iterator

from meshtrain import custom
from meshtrain.config.messages import choices, join, toml
from meshtrain.config.sections import Component, Data, Run, source_of

FIELD_SOURCES = ("jsonl", "parquet", "arrow")     # sources whose documents have their text in data.field


def check_data(run: Run) -> Iterator[str]:
    """Check the sources of [data]."""
    data = run.data
    if data.source == "mixture":
        if not data.mixture:
            yield ('data.source="mixture" has no data.mixture; give its sources, e.g. '
                   'data.mixture=[{source="jsonl", paths=["a.jsonl"], weight=0.7}, {source="stdlib", weight=0.3}]')
        names = [table.name or str(i) for i, table in enumerate(data.mixture)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f'data.mixture has two sources named {toml(name)}; give each its own name'
        for key in ("paths", "field", "validation_paths"):
            if getattr(data, key) != Data.model_fields[key].default:
                yield (f'data.{key}={toml(getattr(data, key))} is not read by data.source="mixture"; '
                       "give it to the sources of data.mixture")
    elif data.mixture:
        yield f'data.mixture is not read by data.source={toml(data.source)}; use data.source="mixture", or leave it out'
    names = [table.name or str(i) for i, table in enumerate(data.validation_sources)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'data.validation_sources has two sources named {toml(name)}; give each its own name'
    if data.validation_sources and any(
            table.validation_paths for table in [data, *data.mixture, *data.validation_sources]):
        yield ("data.validation_sources and validation_paths both say what to validate on; move the "
               "files of validation_paths into a table of data.validation_sources")
    named = [(f"data.mixture[{i}]", table) for i, table in enumerate(data.mixture)] or [("data", data)]
    for key, others in (("chat_template", ("preferences", "prompts")), ("template_arguments", (
            "preferences", "prompts")), ("loss_on", ()), ("faulty", ("preferences",))):
        is_default = getattr(data, key) == Data.model_fields[key].default
        kinds = {table.source for _, table in named}
        # "": another fault, or the data of a trained model
        if not is_default and kinds != {""} and not kinds & {"chat", *others}:
            yield (f'data.{key}={toml(getattr(data, key))} applies only to conversations; use data.source="chat", or '
                   f'leave it out')
    named += [(f"data.validation_sources[{i}]", table) for i, table in enumerate(data.validation_sources)]
    for where, table in named:
        if table.field != Data.model_fields["field"].default and table.source not in (*FIELD_SOURCES, "mixture"):
            yield (f"{where}.field={toml(table.field)} is not read by {where}.source={toml(table.source)}; use "
                   f"{join(map(toml, FIELD_SOURCES), 'or')}, or leave it out")
        if not table.source:
            yield from [_say_unknown(where, table)] * bool(table.paths or table is not data)
        elif table.source == "stdlib" and table.paths:
            yield (f'{where}.paths={toml(table.paths)} is not read by {where}.source="stdlib"; set {where}.source="" '
                   f'to read files by their suffix, or leave the paths out')
        elif custom.is_path(table.source) and _reads_files(table.source) is False:
            for key in ("paths", "validation_paths"):
                if value := getattr(table, key):
                    yield (f"{where}.{key}={toml(value)} is not read by {where}.source={toml(table.source)}, which "
                           "takes no argument; leave it out, or let the function take a path")
        elif table.source not in ("stdlib", "mixture") and not table.paths and (
                not custom.is_path(table.source) or _reads_files(table.source)):
            examples = {"text": "data/*.txt", "tokens": "data/*.tokens.npy", "chat": "data/*.jsonl",
                        "preferences": "data/*.jsonl", "prompts": "data/*.jsonl"}
            example = examples.get(table.source, "data/*" if custom.is_path(table.source) else f"data/*.{table.source}")
            yield (f'{where}.source={toml(table.source)} has no {where}.paths to read; use e.g. '
                   f'{where}.paths=["{example}"]')


def _reads_files(source: str) -> bool | None:
    """Return whether code of the run's own takes a path; None if the code's file cannot be read, which another check
    reports."""
    try:
        return custom.count_arguments(source) > 0
    except (OSError, SyntaxError, ValueError):
        return None


def check_for_source(run: Run) -> list[str]:
    """Return the message for a run to train that names no data. A trained model needs no data."""
    return [] if run.data.source or run.data.paths else [_say_unknown("data", run.data)]


def _say_unknown(where: str, table: Data | Component) -> str:
    """Return the message for a source that neither its key nor the suffixes of its files name."""
    known = choices(type(table).model_fields["source"])
    if not table.paths:
        return (f'{where}.paths names no files; give some, e.g. ["data/*.jsonl"], or {where}.source="stdlib", which is '
                f"Python's own library")
    several = {source_of((path,)) for path in table.paths} - {""}
    if len(several) > 1:
        return (f"{where}.paths={toml(table.paths)} have several formats ({join(sorted(several), 'and')}), but a "
                f"source has one; make each format a table of data.mixture")
    return (f"{where}.paths={toml(table.paths)} has no suffix of a known format; give {where}.source, one of "
            f"{join(map(toml, [name for name in known if name not in ('stdlib', 'mixture')]), 'and')}")
