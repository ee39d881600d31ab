"""Checks a run before it starts: python -m meshtrain.check RUN.toml --topology h100:64.

Checks the run file, the rules on the mesh, the begin of the data, the tokenizer, the chat template, the weights and the
run directory. Predicts memory, step time and MFU by formulas. Compiles nothing, trains nothing, leaves no files behind.
A mistake in one part does not keep other parts from being checked. Exit codes: 0 · 1 a file system or server failed · 2
mistakes, each with its remedy · 3 the run does not fit into memory · 75 stopped on request.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshtrain import config, design, devices, files, hardware, run_files, training_data
from meshtrain.checkpoint import resume
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import footprint, price
from meshtrain.data import sources
from meshtrain.design import Design
from meshtrain.files import FileSystemError
from meshtrain.huggingface.weights import pretrained
from meshtrain.inspection import fitting, topologies
from meshtrain.journal import trackers
from meshtrain.rl import prompts
from meshtrain.rl.rewards import workers
from meshtrain.run import command, contents, rundir, say
from meshtrain.run.stops import DOES_NOT_FIT, DONE, FAILED, USER_ERROR
from meshtrain.storage import addresses, buckets, model_folder
from meshtrain.units import amount, size

OK, NOTE, WRONG, UNFIT, FAULT, LEFT = "ok", "note", "wrong", "does not fit", "failed", "not checked"
MARKS = {OK: "✓", NOTE: "!", WRONG: "✗", UNFIT: "✗", FAULT: "✗", LEFT: "–"}

COMMAND = config.Command("meshtrain.check", {
    "topology": config.Option("check for N of these GPUs, also on a machine without them", "GPU:N", "h100:64"),
    "offline": config.Option("contact no server: use this host's copies of files at addresses, or skip them"),
    "print-config": config.Option("also print the resolved run file"),
    "json": config.Option("print only JSON"),
}, "[RUN.toml]", (0, 8))        # run_files.load reports a second run file with its own message


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. verdict: a key of MARKS."""
    part: str
    verdict: str
    text: str


@command.entry(COMMAND, __doc__)
def main(own: config.Arguments) -> int:
    if own["offline"]:
        os.environ["HF_HUB_OFFLINE"] = "1"
    rows, run = look_at_file(own)
    if run:
        seen, run = look_at_run(run, own["topology"], own["offline"], own.names)
        rows += seen
    if own["json"]:
        say.answer(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        say.out(table(rows))
    if own["print-config"] and run:
        say.answer(config.dump(run)) if not own["json"] else say.err(config.dump(run))
    verdicts = {row.verdict for row in rows}
    return (USER_ERROR if WRONG in verdicts else DOES_NOT_FIT if UNFIT in verdicts else
            FAILED if FAULT in verdicts else DONE)


def look_at_file(own: config.Arguments) -> tuple[list[Finding], Run | None]:
    """Return (findings about the run file, the run; None if the file has mistakes)."""
    try:
        run = run_files.load(own.names + own.keys)
    except ConfigError as error:
        return [Finding("run file", WRONG, message) for message in error.messages], None
    return [Finding("run file", OK, f"{own.names[0] if own.names else 'the quickstart'}, run.name {run.run.name}")], run


def look_at_run(given: Run, topology: str | None, offline: bool, names: Sequence[str]) -> tuple[list[Finding], Run]:
    """Return (findings about everything but the run file, the run with its layout resolved). names: the words of the
    command line that are no options, for messages."""
    rows, laid_out = _look_at("layout", lambda: _layout(given, topology))
    run = given
    if laid_out:
        made, gpu = laid_out
        run = made.run
        rows += _look_at("memory and speed", lambda: _price(made, gpu, names))[0]
        rows += _look_at("weights", lambda: _weights(run, made))[0]
    rows += _look_at("data", lambda: _data(run, offline))[0]
    rows += _look_at("places", lambda: _places(run, offline))[0]
    return rows + _look_at("extras", lambda: _extras(run))[0], run


def _look_at(part: str, look: Callable[[], Iterator[Finding | tuple]]) -> tuple[list[Finding], tuple | None]:
    """Run the check of one part up to its first mistake. Return (its findings, the tuple that it yielded, if any)."""
    rows, made = [], None
    try:
        with config.user_errors():
            for item in look():
                if isinstance(item, Finding):
                    rows.append(item)
                else:
                    made = item
    except ConfigError as error:
        rows += [Finding(part, WRONG, message) for message in error.messages]
    except FileSystemError as error:
        rows.append(Finding(part, FAULT, str(error)))
    return rows, made


def _layout(run: Run, topology: str | None) -> Iterator[Finding | tuple[Design, hardware.Gpu | None]]:
    """Check mesh and rules. Yields findings and finally (design, GPU)."""
    if topology is None and run.mesh.simulated_devices:
        config.mesh_sizes(run, run.mesh.simulated_devices)
    run, spec, platform, gpu = topologies.resolve_layout(run, topology)
    made = design.make(run, spec, platform, gpu)
    if faults := design.check_teacher(run, platform, gpu):
        raise ConfigError(*faults)
    on = f"{spec.num_devices} × {gpu.name}" if gpu else f"{amount(spec.num_devices, 'device')} of {platform}"
    schedule = f", {made.choice.schedule.name}" if made.choice else ""
    yield Finding("layout", OK, f"{spec} on {on}, {run.sharding.rules}{schedule}")
    for note in made.notes:
        yield Finding("layout", NOTE, note)
    yield made, gpu


def _price(made: Design, gpu: hardware.Gpu | None, names: Sequence[str]) -> Iterator[Finding]:
    """Predict the memory of a device and, if the GPU's speed is known, the step time."""
    run, num_devices = made.run, made.mesh_spec.num_devices
    timed = gpu if gpu is not None and gpu.hbm_bytes_per_s is not None else None      # its speed is known
    if timed is None and not run.mesh.simulated_devices:
        yield Finding("memory", LEFT, "the GPUs are unknown; add e.g. --topology h100:8")
        return
    rated = fitting.rates_of(timed or hardware.get("h100"))
    options = fitting.options_of(made, gpu, rated)
    held = footprint.memory(made.placed, options)
    most = max((name for name in held if name != "total"), key=held.__getitem__)
    if timed is not None:
        needed, has, where = held["total"], hardware.usable_bytes(timed), f"the limit of {timed.name}"
        remedy = fitting.advise(made, timed, needed, names) if needed > has else ""
    else:
        needed, has, where = num_devices * held["total"], devices.machine_bytes(), "this machine, for all its devices"
        remedy = "use a smaller model or batch"
    told = f"{size(needed)} of {size(has)}, {where}"
    yield Finding("memory", OK, told) if needed <= has else Finding(
        "memory", UNFIT, f"{told}; the largest part is {most}, {size(held[most])} per device; {remedy}")
    if timed is not None:
        priced = price.price(made.placed, rated, options)
        yield Finding("speed", OK, f"{priced.step_s:.3g} s a step, {priced.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, "
                               f"{priced.mfu:.1%} MFU by the formulas; inspect predicts it from the compiled step")


def _weights(run: Run, made: Design) -> Iterator[Finding]:
    """Check that checkpoint.init_from is a model folder with all tensors of the model, or a run with checkpoints. Their
    content is verified when the run starts."""
    source, step = run.checkpoint.init_from, run.checkpoint.step
    if not source:
        yield Finding("weights", OK, "random (no checkpoint.init_from)")
    elif addresses.is_remote(source):       # not downloaded: it may have gigabytes
        yield Finding("weights", LEFT, f"{source}: read when the run starts")
    elif model_folder.is_at(source):
        _, rows = pretrained.open_folder(run, made.model)
        yield Finding("weights", OK, f"{source}: a model folder with the {amount(len(rows), 'tensor')} of the model")
    else:
        saved = Path(source) / contents.CHECKPOINTS
        steps = sorted(int(name) for name in os.listdir(saved) if name.isdecimal()) if saved.is_dir() else []
        if not steps or step and step not in steps:
            has = f"; it has {', '.join(map(str, steps))}" if steps else ""
            raise ConfigError(f"checkpoint.init_from={source} has no checkpoint{f' of step {step}' if step else ''}"
                              f"{has}; give the run.dir of a run that has saved one")
        yield Finding("weights", OK, f"step {step or steps[-1]} of {source}")


def _data(run: Run, offline: bool) -> Iterator[Finding]:
    """Check the tokenizer and the files of the data; read the begin of each source."""
    data, vocab = run.data, run.model.vocab_size
    training_data.check_source(run)
    # with HF_HUB_OFFLINE the hub is not contacted
    if offline and (asked := [name for name in _names(data) if addresses.is_remote(name)
                              and addresses.parse(name).scheme != addresses.HUB]):
        yield Finding("data", LEFT, f"{asked[0]}: --offline")
        return
    folders = [] if offline and addresses.is_remote(run.run.dir) else model_folder.companion_folders(
        run.run.dir, "" if offline and addresses.is_remote(run.checkpoint.init_from) else run.checkpoint.init_from)
    if data.source == "prompts":
        corpus, examples = prompts.open_prompts(data, vocab_size=vocab, seed=run.run.seed,
                                                longest=data.seq_len - run.rl.max_tokens + 1, folders=folders)
        yield from _tokenizer(corpus.tokenizer, vocab)
        yield Finding("data", OK, f"{amount(len(examples.prompts), 'prompt')}, {len(examples.held)} held out, of up to "
                                  f"{examples.longest} tokens")
        return
    described = sources.describe(data, vocab_size=vocab, folders=folders)
    yield from _tokenizer(described.tokenizer, vocab)
    if described.chats:
        yield Finding("template", OK, f"{described.chats.template.path} renders conversations")
    training_data.sample_prompt(run, described.tokenizer)
    for component in described.components:
        ids = sources.sample(described, component)
        of = f"{component.where}: {component.source}, {amount(len(component.paths), 'file')}"
        if not len(ids):
            yield Finding("data", LEFT, f"{of}, nothing was read")
            continue
        shown = described.tokenizer.decode(ids[:12])
        yield Finding("data", OK, f"{of}, beginning {shown!r}" if shown else f"{of}, ids up to {int(ids.max())}")


def _names(data: config.Data) -> list[str]:
    """Return the values of [data] that may be addresses."""
    sections = (data, *data.mixture, *data.validation_sources)
    paths = [path for section in sections for key in ("paths", "validation_paths")
             for path in getattr(section, key, ())]
    return [*paths, data.tokenizer, data.chat_template]


def _tokenizer(reader, vocab_size: int) -> Iterator[Finding]:
    yield Finding("tokenizer", OK, f"{reader.vocab_size} ids of model.vocab_size={vocab_size}")
    for note in sources.notes(reader, vocab_size):
        yield Finding("tokenizer", NOTE, note)


def _places(run: Run, offline: bool) -> Iterator[Finding]:
    """Check that run.dir is writable, and either free or the directory of a run that can resume with these settings."""
    name = run.run.dir
    if addresses.is_remote(name):
        if not offline:
            buckets.children(addresses.parse(name))
        yield Finding("run.dir", LEFT, f"{name}: checked when the run starts")
    else:
        yield _run_dir(run, Path(name))
    for key, directory in (("data.cache", run.data.cache), ("checkpoint.local_dir", run.checkpoint.local_dir)):
        if directory:
            _check_writable(key, Path(directory).expanduser())
            yield Finding(key, OK, directory)


def _run_dir(run: Run, directory: Path) -> Finding:
    rundir.check_directory(run, directory)
    _check_writable("run.dir", directory)
    if (owner := rundir.at_work(directory)) is not None:
        raise ConfigError(f"run.dir={directory} is in use by another run{rundir.by(owner)}; wait for it or give "
                          f"another run.name")
    checkpoints = resume.checkpoints_of(str(directory)) if files.is_dir(directory / contents.CHECKPOINTS) else None
    steps = checkpoints.steps() if checkpoints else []
    if run.checkpoint.step and run.checkpoint.step not in steps and not run.checkpoint.init_from:
        raise ConfigError(f"checkpoint.step={run.checkpoint.step}: {directory} has no checkpoint of this step; it "
                          f"has {', '.join(map(str, steps)) or 'none'}; leave checkpoint.step out for the newest")
    if not checkpoints or not steps:
        return Finding("run.dir", OK, f"{directory}: free")
    step = run.checkpoint.step if run.checkpoint.step in steps else steps[-1]
    changed = [key for key, *_ in resume.changes_of(run, checkpoints.open(step), None)]
    return Finding("run.dir", OK, f"{directory}: a run that resumes after step {step}"
                              + (f", with other values of {', '.join(changed)}" if changed else ""))


def _check_writable(key: str, directory: Path) -> None:
    """Check that a directory is writable, by creating and removing a temporary directory there. key: for messages.
    Raises: ConfigError."""
    def attempt() -> None:
        with contextlib.suppress(FileNotFoundError):        # other errors, e.g. of a name that is too long, are raised
            os.stat(directory)
        existing = next(path for path in (directory, *directory.absolute().parents) if files.status(path))
        with tempfile.TemporaryDirectory(prefix=".check-", dir=existing):
            pass
    files.attempt(attempt, f"{key}={directory} cannot be written", "give a writable directory", ConfigError)


def _extras(run: Run) -> Iterator[Finding]:
    trackers.check(run)
    if run.rl.reward:
        workers.digest(run.rl.reward)
        yield Finding("reward", OK, run.rl.reward)


def table(rows: Sequence[Finding]) -> str:
    """Return the findings as text: a line for each, and a summary."""
    width = max(len(row.part) for row in rows)
    lines = [f"{MARKS[row.verdict]} {row.part:<{width}}  {row.text}" for row in rows]
    counts = {kind: sum(row.verdict == kind for row in rows) for kind in (WRONG, UNFIT, FAULT)}
    wrong = [f"{count} {kind}" for kind, count in counts.items() if count]
    return "\n".join([*lines, "", ", ".join(wrong) if wrong else "no problem found"])
