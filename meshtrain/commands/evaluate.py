"""Measures how well a model predicts text: python -m meshtrain.evaluate RUN_DIR, or HF_DIR --data.paths FILES.

Prints loss (nats per target token, including the end of a document), perplexity and bits per byte of text, for each
source and for all. RUN_DIR, a run directory: evaluates on all held-out documents of the run, or on all documents of
--data.paths (with --data.source, --data.mixture) if they are given. HF_DIR, a Hugging Face model folder: evaluates on
the given documents. --mesh.data, --mesh.fsdp, --mesh.tensor N: the mesh of this command, as in meshtrain.generate. Exit
codes: 0 · 1 any other failure · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from meshtrain import assembly, config, trained
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.config import ConfigError
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.data.documents import text_bytes, tokenizer
from meshtrain.huggingface.weights import ends
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.score import Scorer
from meshtrain.names import NO_TARGET
from meshtrain.run import command, say, stops


def _tasks(text: str) -> list[str]:
    if names := [task for task in text.split(",") if task]:
        return names
    raise ValueError("names no task; give names, comma-separated, e.g. --tasks lambada_openai,hellaswag")


COMMAND = config.Command("meshtrain.evaluate", config.OF_TRAINED | {
    "tasks": config.Option("tasks of the LM evaluation harness, by name or path of a YAML file, comma-separated "
                           "(pip install -e '.[eval]')", "A,B", "hellaswag", _tasks, ()),
    "num-fewshot": config.Option("number of few-shot examples before each document of the tasks",
                                 "N", "5", config.whole()),
    "limit": config.Option("maximum number of documents of each task", "N", "100", config.whole()),
    "add-bos": config.Option("put the token that begins a document before the texts of tasks, even if the folder's "
                             "tokenizer does not"),
    "json": config.Option('print only JSON: {"loss", "tokens", "perplexity", "bits_per_byte", "sources": {name: the '
                          'same}, "tasks": {name: metrics}}; unknown values are null'),
}, "RUN_DIR|HF_DIR", (1, 1))
# keys that choose the documents to evaluate on
GIVEN = ("data.source", "data.paths", "data.mixture", "data.validation_paths", "data.validation_sources")
SEQ_LEN = 1024      # default data.seq_len for a model folder, if the model supports it


@dataclasses.dataclass
class Sums:
    """Sums over the scored targets. nats: their summed loss. tokens: their number. num_bytes: bytes of their text;
    None if it cannot be derived from the tokenizer."""
    nats: float = 0.0
    tokens: int = 0
    num_bytes: int | None = 0

    def __add__(self, other: Sums) -> Sums:
        num_bytes = None if self.num_bytes is None or other.num_bytes is None else self.num_bytes + other.num_bytes
        return Sums(self.nats + other.nats, self.tokens + other.tokens, num_bytes)

    def as_json(self) -> dict:
        loss = self.nats / self.tokens if self.tokens else math.nan
        bits = self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {"loss": finite(loss), "tokens": self.tokens,
                "perplexity": finite(math.exp(loss) if loss < 700 else math.inf),
                "bits_per_byte": finite(bits)}


@command.entry(COMMAND, __doc__, (CheckpointError, assembly.BrokenProgramError))
def main(options: config.Arguments) -> None:
    if not options["tasks"] and (unused := options.given & {"num-fewshot", "limit", "add-bos"}):
        said = {name: f"--{name}" if options[name] is True else f"--{name} {options[name]}" for name in sorted(unused)}
        raise ConfigError(*(f"{option} is an option of --tasks, which is missing; add e.g. --tasks hellaswag, or "
                            f"leave it out" for option in said.values()))
    source = trained.describe(options.names[0], options["step"], options.keys, "evaluate", keys=("data.",),
                              weights=options["weights"], merge=options["merge"])
    source = _with_tokenizer(source)
    if 0 < (longest := source.longest()) < source.run.data.seq_len:
        say.err(f"note: data.seq_len={source.run.data.seq_len} exceeds the model's maximum of {longest} tokens "
                f"(max_position_embeddings of its config.json); later tokens are predicted badly")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        stops.end_together(lambda: shutil.rmtree(scratch, ignore_errors=True))      # a stop request skips __exit__
        corpus, sets = _open_data(source, bool(options["tasks"]), Path(scratch))
        asked = _open_tasks(source, options) if options["tasks"] else None
        placed = source.place()
        with jax.set_mesh(placed.mesh):
            scorer = placed.scorer()
            each = {held.name or source.run.data.source: _measure(scorer, corpus, held) for held in sets}
            tasks = asked(scorer, placed.generator()) if asked else {}
    scores = sum(each.values(), Sums()).as_json() | {
        "sources": {name: sums.as_json() for name, sums in each.items()}, "tasks": tasks}
    say.answer(json.dumps(scores) if options["json"] else _table(scores))


# ---- the documents ---------------------------------------------------------------------------------------------------


def _with_tokenizer(source: trained.Trained) -> trained.Trained:
    """Return the model with the folder's own tokenizer, separator, end token and sequence length in its run, unless the
    command line gives others. A model of a run directory is returned unchanged. Raises: ConfigError."""
    if not source.of_folder:
        return source
    changes: dict[str, object] = {}
    path, data = source.directory / tokenizer.FILE, source.run.data
    if "data.seq_len" not in source.given:
        changes["seq_len"] = min(filter(None, (SEQ_LEN, source.longest())))
    if "data.tokenizer" not in source.given and os.path.isfile(path):
        changes["tokenizer"] = str(path)
        with config.user_errors():
            separator = source.separator()
            names = tokenizer.names_of(path, separator, ends.of_documents(source.directory, separator))
            if tokenizer.find_separator(path) is not None:
                names[0] = ""       # opening the tokenizer finds it again, and reports if files disagree on it
        changes |= {key: name for key, name in zip(("bos_token", "eos"), names) if name
                    and f"data.{key}" not in source.given}
    elif "data.tokenizer" not in source.given and any(key in source.given for key in GIVEN) and any(
            part.source != "tokens" for part in (*(data.mixture or [data]), *data.validation_sources)):
        raise ConfigError(f"{source.directory} has no {tokenizer.FILE}, which the texts need; set "
                          f"--data.tokenizer to the path of its tokenizer.json, or to bytes")
    return dataclasses.replace(source, run=source.run.replace(data=changes))


def _open_data(source: trained.Trained, may_be_none: bool, scratch: Path) -> tuple[
        sources.Corpus | None, Sequence[packing.PackedValidation]]:
    """Return (corpus, sets to evaluate on): all documents that the command line gives, else the run's held-out ones.

    may_be_none: with --tasks, return (None, ()) if there are no documents to evaluate on. scratch: for the token cache
    of a folder. Raises: ConfigError.
    """
    data, everything = source.run.data, source.of_folder or any(key in source.given for key in GIVEN)
    if data.source == "preferences":
        if may_be_none:
            return None, ()
        raise ConfigError('data.source="preferences" has pairs of answers, but a loss is measured on texts; give '
                          "texts, e.g. --data.source text --data.paths '[\"corpus/*.txt\"]', or --tasks")
    if source.of_folder and not any(key in source.given for key in GIVEN):
        if may_be_none:
            return None, ()
        raise ConfigError(f"{source.directory} is a model folder, which has no documents to evaluate on; give e.g. "
                          f"--data.source text --data.paths '[\"corpus/*.txt\"]', or --tasks")
    if "data.validation_paths" in source.given and data.validation_paths:
        data = data.model_copy(update={"paths": data.validation_paths, "validation_paths": ()})
    elif "data.paths" in source.given or "data.mixture" in source.given:     # without the run's held-out documents
        given = {"validation_sources"} if "data.validation_sources" in source.given else set()
        data = data.model_copy(update=dict.fromkeys({"validation_paths", "validation_sources"} - given, ()))
    if everything:
        data = data.model_copy(update={"global_batch": 1})
    with config.user_errors():
        folders = [source.files] if source.files else []
        cache = scratch if source.of_folder else source.directory / sources.CACHE
        corpus = sources.open_corpus(data, vocab_size=source.run.model.vocab_size, cache_dir=cache,
                                     tell=say.err, folders=folders)
        of = data, corpus, source.run.run.seed
        sets = packing.open_whole(*of) if everything else packing.open_batches(*of).validation
    if not sets:
        raise ConfigError(f"the run in {source.directory} has no held-out documents "
                          f"(data.validation_fraction={data.validation_fraction}); give documents, e.g. "
                          f"--data.source text --data.paths '[\"corpus/*.txt\"]'")
    return corpus, sets


def _measure(scorer: Scorer, corpus: sources.Corpus, held: packing.PackedValidation) -> Sums:
    """Return the sums over all targets of a set. Bytes are those of its documents if known, else those of its tokens
    if each token has a known number of bytes."""
    lengths, total, counted = text_bytes.lengths(corpus.tokenizer), Sums(), held.text_bytes
    if lengths and lengths.prefix != 0 and held.of_conversations:
        lengths = None      # a space may follow every special token
    for batch in _batches(held, scorer):
        logprobs, _ = scorer.score(batch)
        targets, here = batch["targets"], batch["targets"] != NO_TARGET
        num_bytes: int | None = 0
        if counted is None:
            first = here & (batch["tokens"] == corpus.tokenizer.bos) & (targets != corpus.eos)
            num_bytes = _bytes_of(lengths, targets[here], int(first.sum()) if held.begins else 0)
        total += Sums(-float(logprobs[here].sum(dtype=np.float64)), int(here.sum()), num_bytes)
    return total if counted is None else dataclasses.replace(total, num_bytes=counted)


def _bytes_of(lengths: text_bytes.Lengths | None, targets: np.ndarray, begun: int) -> int | None:
    """Return the bytes of text of these tokens; None if they are unknown. begun: number of tokens that are the first of
    a document."""
    if lengths is None or begun and lengths.prefix is None:
        return None
    each = lengths.bytes_V[targets]
    return None if (each == text_bytes.UNKNOWN).any() else int(each.sum()) - begun * (lengths.prefix or 0)


def _batches(held: packing.PackedValidation, scorer: Scorer) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of a set in batches of the scorer's size. Rows without targets fill up the last batch."""
    kept: list[dict] = []
    for i in range(held.num_batches):
        batch = held.batch(i)
        kept += [{name: x[row] for name, x in batch.items()} for row in range(len(batch["tokens"]))]
        count = scorer.rows(batch["tokens"].shape[1])
        while len(kept) >= count or kept and i == held.num_batches - 1:
            taken, kept = kept[:count], kept[count:]
            empty = {name: np.full_like(x, NO_TARGET if name == "targets" else 0) for name, x in taken[0].items()}
            taken += [empty] * (count - len(taken))
            yield {name: np.stack([row[name] for row in taken]) for name in taken[0]}


def _open_tasks(source: trained.Trained, options: config.Arguments):
    """Return a function (scorer, generator) -> {task: metrics} that runs the harness. Raises: ConfigError if the
    harness is not installed, or the model has no tokenizer."""
    with config.user_errors():
        tokenizer.import_extra("lm_eval", "--tasks", "eval")
    from meshtrain.inference import harness     # here: it imports lm_eval, which is an extra
    text, stop_ids = source.text(), source.ends.ids
    if text is None:
        raise ConfigError(f"--tasks needs a tokenizer, but {source.directory} has none; set --data.tokenizer to the "
                          f"path of a tokenizer.json")
    for note in getattr(text.of, "notes", ()):
        say.err(f"note: {note}")
    prefix = next((id for id in (source.separator() if source.of_folder else text.of.bos,
                                 *stop_ids) if id is not None), None)
    if prefix is None:
        raise ConfigError(f"--tasks: {source.directory} has neither bos_token_id nor eos_token_id, but each text must "
                          f"begin with one of them; add one to its config.json")
    lead = [prefix] if options["add-bos"] else source.lead(text, prefix)
    length = source.longest() or source.run.data.seq_len
    if source.of_folder and not source.longest():
        say.err(f"note: the maximum length of sequences is unknown (max_position_embeddings); contexts of tasks are "
                f"cut to data.seq_len={length} tokens")

    def run_tasks(scorer, generator) -> dict:
        words = Words(text.decode, source.ends.stops, stop_ids)
        model = harness.HarnessModel(scorer, generator, text.encode, words, prefix, length, lead)
        with config.user_errors(), contextlib.redirect_stdout(sys.stderr):
            return harness.results(model, options["tasks"], options["num-fewshot"], options["limit"])
    return run_tasks


def _table(scores: dict) -> str:
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    rows = [("", "loss", "perplexity", "bits per byte", "tokens")]
    named = scores["sources"] if len(scores["sources"]) == 1 else {**scores["sources"], "all": scores}
    rows += [(name, show(sums["loss"]), show(sums["perplexity"]), show(sums["bits_per_byte"]), f"{sums['tokens']:,}")
             for name, sums in named.items()]
    tasks = [f"{task}: {', '.join(f'{name} {value:.4g}' for name, value in metrics.items())}"
             for task, metrics in scores["tasks"].items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(tasks if len(rows) == 1 else [*lines, *tasks])
