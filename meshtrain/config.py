"""The run file: from TOML and `--section.key value` to one frozen `Run`, or one message with everything that is wrong.

`load` gathers every fault it can find (unknown names, types, ranges, keys that do not agree) before it raises, because
a queue for a pod is a slow way to find them one by one. `dump` writes a run back as a file that needs no preset.
This module knows no jax: whether a layout fits its rule file is asked where the rules are known.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
import tomllib
import typing
from pathlib import Path

from pydantic import BaseModel, ValidationError

from meshtrain.sections import (
    Checkpoint, Component, Context, Data, Distributed, Identity, Mesh, Metrics, Model, Optimizer, Pipeline, Run, Sharding,
    Training, Validation,
)  # fmt: skip

__all__ = [
    "AXES", "ConfigError", "dump", "help_text", "load", "mesh_sizes", "presets", "problems",
    "Checkpoint", "Component", "Context", "Data", "Distributed", "Identity", "Mesh", "Metrics", "Model", "Optimizer",
    "Pipeline", "Run", "Sharding", "Training", "Validation",
]  # fmt: skip

AXES = ("data", "fsdp", "tensor", "stage", "context")
ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.toml"
USAGE = "python -m meshtrain.train [RUN.toml] [--section.key value ...]"
BYTE_VOCAB = 257  # 256 bytes and the separator between documents
NOT_SHAPE = ("_dtype", "_dropout")  # model keys that no preset sets

SECTIONS = {name: field.annotation for name, field in Run.model_fields.items()}


class ConfigError(ValueError):
    """Everything that is wrong with a run; `messages` holds one line each: the value, the rule, the remedy."""

    def __init__(self, *messages: str):
        self.messages = list(messages)
        super().__init__("\n".join(messages))


# ---- load ------------------------------------------------------------------------------------------------------------


def load(argv: typing.Sequence[str], usage: str = USAGE) -> Run:
    """The run that `argv` asks for: an optional run file, then overrides.

    Raises: ConfigError with every fault at once; SystemExit(0) after printing --help.
    """
    path, overrides, faults = _arguments(argv)
    tables, unreadable = _read(path or QUICKSTART)
    _override(tables, overrides)
    run, wrong, told = _build(tables)
    if {"--help", "-h"} & set(argv):
        print(help_text(run, usage))
        raise SystemExit(0)
    # Without the file its keys are defaults, and a replaced key is one too: what follows from those is no second fault.
    contradictions = [] if unreadable else [message for message in problems(run) if not told.search(message)]
    if faults + unreadable + wrong + contradictions:
        raise ConfigError(*faults, *unreadable, *wrong, *contradictions)
    return run


def _arguments(argv):
    """(run file or None, [(section.key, text)], faults)."""
    path, overrides, faults = None, [], []
    rest = [arg for arg in argv if arg not in ("--help", "-h")]
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-"):
            if path is not None:
                faults.append(f"{arg} is a second run file beside {path}; give one, and changes as --section.key value")
            path = path or Path(arg)
            continue
        name, equals, text = arg.removeprefix("--").partition("=")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if not arg.startswith("--") or name.count(".") != 1:
            homes = [f"--{section}.{name}" for section, cls in SECTIONS.items() if name in cls.model_fields]
            remedy = f"did you mean {_join(homes, 'or')}?" if homes else "options are --section.key value"
            faults.append(f"{arg} is not an option; {remedy}")
        elif text is None:
            faults.append(f"{arg} has no value; write {arg} VALUE or {arg}=VALUE")
        else:
            overrides.append((name, text))
    return path, overrides, faults


def _read(path: Path) -> tuple[dict, list[str]]:
    """(the file's tables, faults)."""
    try:
        return tomllib.loads(path.read_bytes().decode()), []
    except FileNotFoundError:
        shipped = {file.stem: _shown(file) for file in sorted((ROOT / "configs").glob("*.toml"))}
        near = difflib.get_close_matches(path.stem, shipped, n=1)
        remedy = f"did you mean {shipped[near[0]]}?" if near else f"shipped are {_join(shipped.values(), 'and')}"
        return {}, [f"{path}: there is no such run file; {remedy}"]
    except IsADirectoryError:
        return {}, [f"{path} is a directory; name the run file, e.g. {path / 'config.toml'}"]
    except OSError as e:
        return {}, [f"{path} cannot be read: {e.strerror}; name a file that can"]
    except UnicodeDecodeError as e:
        return {}, [f"{path} is not text (byte {e.start} is not UTF-8); a run file is TOML in UTF-8"]
    except ValueError as e:  # bad TOML, or a number of thousands of digits
        where = re.search(r" \(at line (\d+), column (\d+)\)$", str(e))
        place, what = (f"{path}:{where[1]}:{where[2]}", str(e)[: where.start()]) if where else (str(path), str(e))
        return {}, [f"{place}: {what}; in TOML strings take quotes, booleans are true or false, lists close with ]"]


def _override(tables: dict, overrides) -> None:
    """Put the command line's values into the tables: bare text where the key is a string, else a TOML value."""
    if dict(overrides).get("model.preset") and isinstance(tables.get("model"), dict):
        # A preset on the command line replaces the shape in the file; only a key on the command line stands beside it.
        tables["model"] = {key: value for key, value in tables["model"].items() if key.endswith(NOT_SHAPE)}
    for name, text in overrides:
        section, key = name.split(".")
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            continue  # already a fault of the file
        field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        table[key] = text
        if field is not None and _kind(field) not in ("string", "choice"):
            try:
                parsed = tomllib.loads(f"value = {text}")
            except ValueError:
                continue  # stays text, and is refused as text with its type's remedy
            table[key] = parsed["value"] if len(parsed) == 1 else text


def _build(tables: dict) -> tuple[Run, list[str], re.Pattern]:
    """A run from raw tables, what is wrong with their names and values, and a pattern of the names already told.

    A faulty key takes its default, so that the search can go on.
    """
    faults, faulty, sections = [], [], {}
    for name, table in tables.items():
        if name not in SECTIONS:
            faults.append(_unknown_section(name, table))
        elif not isinstance(table, dict):
            faults.append(f"{name}={_toml(table)} is not a section; write [{name}] with its keys below it")
            faulty.append(name)
    for name, cls in SECTIONS.items():
        table = tables.get(name, {})
        table = dict(table) if isinstance(table, dict) else {}
        for key in [key for key in table if key not in cls.model_fields]:
            faults.append(_unknown_key(name, key, table.pop(key)))
        if name == "model" and isinstance(table.get("preset"), str) and table["preset"]:
            if table["preset"] in presets():
                table = _read(presets()[table["preset"]])[0]["model"] | table
            else:
                faults.append(_unknown_name("model.preset", table["preset"], presets()))
                faulty.append("model.preset")
            del table["preset"]
        try:
            sections[name] = cls(**table)
        except ValidationError as e:
            faults += [_wrong_value(name, cls, error) for error in e.errors()]
            wrong = {error["loc"][0] for error in e.errors()}
            faulty += [f"{name}.{key}" for key in wrong]
            sections[name] = cls(**{key: value for key, value in table.items() if key not in wrong})
    run = Run(**sections)
    beside_package = ROOT / run.sharding.rules
    if not Path(run.sharding.rules).exists() and beside_package.is_file():
        run = run.model_copy(update={"sharding": Sharding(rules=str(beside_package))})
    faulty += ["model"] if "model.preset" in faulty else []
    return run, faults, re.compile("|".join(rf"\b{re.escape(name)}\b" for name in faulty) or "$^")


# ---- what one key owes to another ------------------------------------------------------------------------------------


def problems(run: Run) -> list[str]:
    """Everything in which the keys of a run contradict each other or the files they name; empty = sound."""
    return [*_run_problems(run), *_mesh_problems(run), *_model_problems(run), *_data_problems(run), *_training_problems(run),
            *_distributed_problems(run), *_metrics_problems(run)]


def _run_problems(run: Run):
    name, source = run.run.name, run.checkpoint.init_from
    if not re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", name) or not name.strip("."):
        yield f"run.name={_toml(name)} is not a plain name; use letters, digits, - and _, and run.dir for a path"
    if not source or "://" in source:
        return
    if not Path(source).is_dir():
        yield f"checkpoint.init_from={_toml(source)} is not a directory; name the run.dir whose weights to start from"
    elif Path(source).resolve() == Path(run.run.dir).resolve():
        yield (f"checkpoint.init_from={_toml(source)} is this run's own run.dir={_toml(run.run.dir)}; "
               "give the new run another run.name, or leave init_from out to go on with the old run")


def _mesh_problems(run: Run):
    mesh = run.mesh
    rest = [f"mesh.{axis}=-1" for axis in AXES if getattr(mesh, axis) == -1]
    if len(rest) > 1:
        yield f"{_join(rest, 'and')}: only one axis can take the devices that are left; give the others a size"
    for axis in AXES:
        size = getattr(mesh, axis)
        if size == 0:
            yield f"mesh.{axis}=0 leaves no device; use 1, or -1 for the devices that are left"
    if sorted(mesh.placement) != sorted(AXES):
        yield f"mesh.placement={_toml(mesh.placement)} must name each axis once; use e.g. {_toml(Mesh().placement)}"
    rules = run.sharding.rules
    if not Path(rules).is_file():
        shipped = [file.stem for file in sorted((ROOT / "sharding_rules").glob("*.toml"))]
        near = difflib.get_close_matches(Path(rules).stem, shipped, n=1)
        remedy = f"did you mean sharding_rules/{near[0]}.toml?" if near else f"shipped are {_join(shipped, 'and')}"
        yield f"sharding.rules={_toml(rules)} is not a file; {remedy}"


def _model_problems(run: Run):
    model, seq_len = run.model, run.data.seq_len
    if model.num_heads % model.num_kv_heads:
        divisors = [n for n in range(1, min(model.num_heads, 1024) + 1) if model.num_heads % n == 0]
        yield (f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}; "
               f"use {_join(map(str, divisors), 'or')}")
    if model.head_dim == 0:
        yield (f"model.embed_dim={model.embed_dim} cannot be split over model.num_heads={model.num_heads}; "
               f"use a multiple, e.g. {_next_multiple(model.embed_dim, model.num_heads)}, or give model.head_dim")
    if model.position == "rope" and model.head_dim % 2:
        yield (f"model.head_dim={model.head_dim} (model.embed_dim={model.embed_dim}, model.num_heads={model.num_heads}) "
               f'is odd, and model.position="rope" rotates pairs; use e.g. {model.head_dim + 1}, or "learned" positions')
    if model.position == "learned" and seq_len > model.max_seq_len:
        yield (f"data.seq_len={seq_len} is longer than the model.max_seq_len={model.max_seq_len} learned positions; "
               "shorten the sequences or lengthen the table")
    if model.rope_scaling_factor != 1 and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        yield (f"model.rope_high_freq_factor={model.rope_high_freq_factor} must be larger than "
               f"model.rope_low_freq_factor={model.rope_low_freq_factor} for a scaled rope; use e.g. 4.0 and 1.0")
    if model.attention_dropout:
        yield (f"model.attention_dropout={model.attention_dropout} needs the full score matrix, which is never held; "
               "use 0.0, and model.residual_dropout instead")
    only_ids = {one.source for one in run.data.mixture or [run.data]} == {"tokens"}
    if model.vocab_size < BYTE_VOCAB and run.data.tokenizer == "bytes" and not only_ids:
        yield (f"model.vocab_size={model.vocab_size} is too small for data.source={_toml(run.data.source)}, "
               f"which has 256 bytes and a separator; use at least {BYTE_VOCAB}")


def _data_problems(run: Run):
    data = run.data
    if data.source == "mixture":
        if not data.mixture:
            yield ('data.source="mixture" has no data.mixture; give its sources, e.g. '
                   'data.mixture=[{source="jsonl", paths=["a.jsonl"], weight=0.7}, {source="stdlib", weight=0.3}]')
        for key in ("paths", "field"):
            if getattr(data, key) != Data.model_fields[key].default:
                yield (f'data.{key}={_toml(getattr(data, key))} is not read by data.source="mixture"; '
                       "give it to the sources of data.mixture")
    elif data.mixture:
        yield f'data.mixture is not read by data.source={_toml(data.source)}; use data.source="mixture", or leave it out'
    named = [(f"data.mixture[{i}]", one) for i, one in enumerate(data.mixture)] or [("data", data)]
    for where, one in named:
        if one.source not in ("stdlib", "mixture") and not one.paths:
            example = {"text": "data/*.txt", "tokens": "data/*.tokens.npy"}.get(one.source, f"data/*.{one.source}")
            yield f'{where}.source={_toml(one.source)} has no {where}.paths to read; use e.g. {where}.paths=["{example}"]'


def _training_problems(run: Run):
    data, training = run.data, run.training
    if data.global_batch % training.microbatches:
        yield (f"data.global_batch={data.global_batch} cannot be split over training.microbatches={training.microbatches}"
               f"; use a multiple, e.g. {_next_multiple(data.global_batch, training.microbatches)}")
    if run.validation.every and not data.validation_fraction:
        yield (f"validation.every={run.validation.every} has no data, since data.validation_fraction=0 holds none out; "
               "use e.g. data.validation_fraction=0.02, or validation.every=0")
    if run.optimizer.schedule == "wsd" and not run.optimizer.decay_steps:
        yield ('optimizer.schedule="wsd" ends with a decay, and optimizer.decay_steps=0 gives it no steps; '
               f"use e.g. {max(1, training.steps // 10)}")


def _distributed_problems(run: Run):
    address, count, index = run.distributed.coordinator_address, run.distributed.num_processes, run.distributed.process_id
    port = re.fullmatch(r"(?:[^\s:\[\]]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)
    if address and not (port and 0 < int(port[1]) < 65536):
        yield (f"distributed.coordinator_address={_toml(address)} is not HOST:PORT; "
               "use e.g. node1:12345, with a port that is free on that host")
    if bool(count) != (index >= 0) or count and not address:
        yield (f"distributed.num_processes={count}, distributed.process_id={index} and distributed.coordinator_address="
               f"{_toml(address)} describe one process together; give all three, or none under srun and mpirun")
    elif index >= count > 0:
        yield (f"distributed.process_id={index} is not one of distributed.num_processes={count} processes; "
               f"they are counted from 0 to {count - 1}")


def _metrics_problems(run: Run):
    steps, name = run.metrics.profile_steps, f"metrics.profile_steps={_toml(run.metrics.profile_steps)}"
    if len(steps) not in (0, 2):
        yield f"{name} is not a first and a last step; use e.g. {_toml(steps[:1] * 2 or (1, 1))}, or [] for no profile"
    elif steps and not 1 <= steps[0] <= steps[1] <= run.training.steps:
        yield (f"{name} must be steps from 1 to training.steps={run.training.steps}, the first not after the last; "
               f"use e.g. {_toml((min(2, run.training.steps),) * 2)}, or [] for no profile")


def _next_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def mesh_sizes(run: Run, device_count: int, enough: str = "mesh.simulated_devices={} to try it on the CPU") -> dict[str, int]:
    """The size of every axis on `device_count` devices, -1 resolved. enough: how to have {} devices, for the message.

    Raises: ConfigError where they do not fit.
    """
    sizes = {axis: getattr(run.mesh, axis) for axis in AXES}
    product = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "a mesh of 1"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if device_count % fixed or device_count == 0:
            raise ConfigError(
                f"{product} cannot fill {device_count} devices: not a multiple of {fixed}; use e.g. "
                f"{_next_multiple(max(device_count, 1), fixed)} devices, or axes whose product divides {device_count}"
            )
        return {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
    if fixed != device_count:
        raise ConfigError(
            f"{product} takes {fixed} devices, and there are {device_count}; {_mesh_remedy(sizes, fixed, device_count)}"
            f"or {enough.format(fixed)}"
        )
    return sizes


def _mesh_remedy(sizes: dict[str, int], fixed: int, device_count: int) -> str:
    for axis in ("fsdp", "data", "tensor"):
        if device_count % (fixed // sizes[axis]) == 0:
            return f"use mesh.{axis}={device_count * sizes[axis] // fixed} (or -1: what is left), "
    return f"use axes whose product is {device_count}, "


# ---- messages --------------------------------------------------------------------------------------------------------


def _kind(field) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return "choice"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(annotation, "list")


def _wrong_value(section: str, cls, error) -> str:
    key, *index = error["loc"]
    if len(index) > 1:  # a key of a table in a list
        i, inner, *_ = index
        return _wrong_in_table(f"{section}.{key}[{i}]", inner, {**error, "loc": tuple(index[1:])})
    field, value, limits = cls.model_fields[key], error["input"], error.get("ctx", {})
    name = f"{section}.{key}" + "".join(f"[{i}]" for i in index)
    numbers = int in typing.get_args(field.annotation)
    kind = ("integer" if numbers else "string") if index else _kind(field)
    if field.annotation == tuple[Component, ...]:
        kind = "table" if index else "tables"
    if error["type"] == "literal_error" and isinstance(value, str):
        return _unknown_name(name, value, typing.get_args(field.annotation))
    bounds = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    for limit, words in bounds.items():
        if limit in limits and error["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return f"{name}={_toml(value)} is out of range; use {words.format(limits[limit])}, e.g. {_toml(field.default)}"
    rule, remedy = {
        "boolean": ("true or false", "write true or false, without quotes"),
        "integer": ("a whole number", f"write e.g. {_toml(1 if index else field.default)}, without quotes or a decimal point"),
        "number": ("a finite number", f"write e.g. {_toml(field.default)}, without quotes"),
        "string": ("a string", "write it in quotes"),
        "choice": ("a string", f"use {_join(map(_toml, typing.get_args(field.annotation)), 'or')}"),
        "list": (("a list of whole numbers", "write it as TOML, e.g. [1, 2]") if numbers else
                 ("a list of strings", 'write it as TOML, e.g. ["first", "second"]')),
        "tables": ("a list of tables", 'write it as TOML, e.g. [{source="jsonl", paths=["a.jsonl"], weight=0.7}]'),
        "table": ("a table", 'write e.g. {source="jsonl", paths=["a.jsonl"], weight=0.7}'),
    }[kind]
    return f"{name}={_toml(value)} is not {rule}; {remedy}"


def _wrong_in_table(name: str, key: str, error) -> str:
    if error["type"] == "extra_forbidden":
        return _unknown_key(name, key, error["input"], Component)
    if error["type"] == "missing":
        known = typing.get_args(Component.model_fields[key].annotation)
        return f"{name} has no {key}; give one of {_join(map(_toml, known), 'or')}"
    return _wrong_value(name, Component, error)


def _unknown_name(name: str, value: str, known) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    guess = f"did you mean {_toml(near[0])}? There are " if near else "use "
    return f"{name}={_toml(value)} is unknown; {guess}{_join(map(_toml, known), 'and' if near else 'or')}"


def _unknown_section(name: str, value) -> str:
    near = difflib.get_close_matches(name, SECTIONS, n=1)
    homes = [section for section, cls in SECTIONS.items() if name in cls.model_fields]
    if homes and not isinstance(value, dict):
        return f"{name}={_toml(value)} stands outside a section; did you mean {homes[0]}.{name}?"
    remedy = f"did you mean [{near[0]}]?" if near else f"the sections are {_join(SECTIONS, 'and')}"
    return f"there is no section [{name}]; {remedy}"


def _unknown_key(section: str, key: str, value, cls=None) -> str:
    keys = (cls or SECTIONS[section]).model_fields
    homes = [f"{other}.{key}" for other, cls in SECTIONS.items() if key in cls.model_fields]
    near = [f"{section}.{name}" for name in difflib.get_close_matches(key, keys, n=1)]
    guesses = near or homes
    remedy = f"did you mean {guesses[0]}?" if guesses else f"its keys are {_join(keys, 'and')}"
    return f"{section}.{key}={_toml(value)} is not a key of [{section}]; {remedy}"


def _join(names, word: str) -> str:
    *head, last = list(names) or ["none"]
    return f"{', '.join(head)} {word} {last}" if head else last


def _shown(path: Path) -> str:
    """A shipped file as the user would type it from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# ---- out -------------------------------------------------------------------------------------------------------------


def presets() -> dict[str, Path]:
    """The shipped model shapes by name."""
    return {file.stem: file for file in sorted((ROOT / "configs" / "models").glob("*.toml"))}


def dump(run: Run) -> str:
    """The run as TOML that loads to the same run and needs no preset."""
    path = f"{run.run.dir}/config.toml"
    lines = [f"# python -m meshtrain.train {shlex.quote(path) if path.isprintable() else _toml(path)}"]
    for name, section in run:
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section)]
    return "\n".join(lines) + "\n"


def help_text(run: Run, usage: str = USAGE) -> str:
    """Every key with its value in `run` and its description."""
    lines = [f"usage: {usage}", "", "Without RUN.toml: configs/quickstart.toml. Strings are bare, lists are TOML."]
    for name, section in run:
        lines += ["", type(section).__doc__]
        for key, field in type(section).model_fields.items():
            choices = f" ({', '.join(typing.get_args(field.annotation))})" if _kind(field) == "choice" else ""
            lines.append(f"  {f'--{name}.{key} {_toml(getattr(section, key))}':<47} {field.description}{choices}")
    return "\n".join(lines)


def _toml(value) -> str:
    """A value as TOML. JSON's escapes are TOML's, but for DEL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, BaseModel):
        return _toml(dict(value))
    return str(value)
