"""A temporary directory of this process for rule files given as text and for token caches. The Python interface uses
it, because its runs have no run.dir."""
from __future__ import annotations

import atexit
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from meshtrain import assembly, config, shipped
from meshtrain.config import ConfigError, Run
from meshtrain.data import sources
from meshtrain.data.batches import opened
from meshtrain.data.cache import parts
from meshtrain.data.documents.contracts import Batches
from meshtrain.run import dpo_reference
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Rules
from meshtrain.training import objective


@functools.cache
def directory() -> Path:
    """Return the temporary directory, which is removed when the process ends."""
    found = Path(tempfile.mkdtemp(prefix="meshtrain-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


def rule_file(given: Rules | Mapping[str, object] | str | Path) -> str:
    """Return the path of a rule file. given: rules that were read, a dict of tables, the text of a rule file, a shipped
    name, or a path. A text may extend a file in the current directory. Raises: ConfigError."""
    if isinstance(given, Rules):
        return given.path
    if not isinstance(given, (Mapping, str, Path)):
        raise ConfigError(f'rules={given!r} has the wrong type; give a shipped name ("zero3"), a path, the text of a '
                          f'rule file, or a dict, {{"params": {{"embed": "fsdp"}}}}')
    if isinstance(given, Path) or isinstance(given, str) and "\n" not in given and "=" not in given:
        return str(shipped.rule_file(given))
    with config.user_errors():
        text = given if isinstance(given, str) else rules.text_of(given)
        path = directory() / f"rules-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
        path.write_text(rules.parse(text, "rules").text, encoding="utf-8")
    return str(path)


def batches(run: Run, start: Callable[[], tuple[assembly.Assembly, dict]]) -> Batches:
    """Return the batches of the run's data. start: called for pairs of answers only; returns (the run on its devices,
    the weights at its start, which are the reference). Raises: ConfigError."""
    goal = objective.of_run(run)
    if what := {"answers": "answers that only python -m meshtrain.train samples and scores",
                "taught": "predictions of a teacher, which only python -m meshtrain.train loads"}.get(goal.data):
        raise ConfigError(f'training.objective="{run.training.objective}" trains on {what}; an Experiment with it can '
                          'inspect, generate and give logits')
    with config.user_errors():
        described = sources.describe(run.data, vocab_size=run.model.vocab_size)
        corpus = sources.corpus_of(described, described.open(directory(), parts.Job(lambda line: None)))
        data = opened.open_corpus(run.data, corpus, run.run.seed)
    if goal.data != "pairs":
        return data
    made, params = start()
    with jax.set_mesh(made.mesh):
        return dpo_reference.with_references(run, made.program, data, corpus, directory(), params)
