"""Writes a run, or the shape of a model, as TOML for a run file; writes the text of --help."""
from __future__ import annotations

import shlex

from meshtrain.config import named
from meshtrain.config.messages import choices, kind_of, toml
from meshtrain.config.sections import Model, Run

USAGE = "python -m meshtrain.train [RUN.toml] [--section.key value ...]"
NOT_SHAPE = ("_dtype", "_dropout")  # suffixes of model keys that presets do not set
ENGINES = ("attention", "mlp")      # keys of [model] that say how it is computed


def dump(run: Run) -> str:
    """Format the run as TOML that loads to the same run and needs no preset."""
    path = f"{run.run.dir}/config.toml"
    lines = [f"# python -m meshtrain.train {shlex.quote(path) if path.isprintable() else toml(path)}"]
    for name, section in run:
        lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in section)]
    return "\n".join(lines) + "\n"


def shape_table(model: Model) -> str:
    """Format the keys of [model] that set its shape as TOML: all sizes, and other keys only if they are not defaults.
    """
    default = Model()
    keys = [key for key, value in model if not (key.endswith(NOT_SHAPE) or key in ("preset", *ENGINES))
            and (type(value) is int and value or value != getattr(default, key))]
    return "\n".join(["[model]", *(f"{key} = {toml(getattr(model, key))}" for key in keys)])


def help_text(run: Run, usage: str = USAGE) -> str:
    """List every key with its value in `run` and its description."""
    lines = [f"usage: {usage}", "", "Without RUN.toml: configs/quickstart.toml. Strings are bare, lists are TOML."]
    for name, section in run:
        lines += ["", type(section).__doc__ or ""]
        for key, field in type(section).model_fields.items():
            known = choices(field) if kind_of(field) == "choice" else []
            known += ["file.py:name"] * bool(named.find(field))
            shown = f" ({', '.join(known)})" if known else ""
            lines.append(f"  {f'--{name}.{key} {toml(getattr(section, key))}':<47} {field.description}{shown}")
    return "\n".join(lines)
