"""Prints a run's memory, communication and compute: python -m meshtrain.inspect RUN.toml.

Compiles the training step; reads no data and does not train. With --topology, the step is compiled for GPUs that this
machine need not have, and its time is predicted kernel by kernel. Exit codes: 0 · 1 XLA cannot compile the program, the
program would compute wrong numbers, or it differs from the file of --expect · 2 a mistake in the settings · 3 the step
does not fit into a GPU's memory · 75 stopped on request.
"""
from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from meshtrain import assembly, config, design, devices as local_devices, elastic, hardware, run_files, teacher
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import assumptions
from meshtrain.cost.program import compile as gpu_compile, roofline
from meshtrain.inspection import chart, expect, fitting, report, summary, topologies
from meshtrain.inspection.inspected import Inspected
from meshtrain.pages import layout, pictures, skin
from meshtrain.rl import samplers
from meshtrain.run import command, say
from meshtrain.run.stops import DOES_NOT_FIT, DONE, FAILED
from meshtrain.units import amount, size

COMMAND = config.Command("meshtrain.inspect", {
    "topology": config.Option("compile for N of these GPUs, also on a machine without them", "GPU:N", "h100:64"),
    "assume": config.Option("change an assumption of the roofline", "NAME=NUMBER", "matmul.best=0.7",
                            assumptions.parse, many=True),
    "schedule": config.Option("draw the pipeline schedule instead of compiling: as text, and as "
                              "<run.name>-schedule.svg"),
    "json": config.Option("print only JSON"),
    "html": config.Option("also write an HTML page: one file without external resources", "FILE", "cost.html"),
    "expect": config.Option("print only differences of collectives and memory from FILE",
                            "FILE", "step.toml"),
    "update": config.Option("write the file of --expect"),
}, "[RUN.toml]", (0, 1))


@command.entry(COMMAND, __doc__, (gpu_compile.NotCompiledError, assembly.BrokenProgramError))
def main(own: config.Arguments) -> int:
    with config.user_errors():
        hardware.memory_share()         # check the environment variable before anything is compiled
    as_json, given = own["json"], _read_assumptions(own)
    run = run_files.load(own.names + own.keys)
    if own["html"]:
        with config.user_errors():
            skin.check_free("--html", own["html"])
    if own["update"]:
        _check_writable(own["expect"])
    before = _read_expected(own["expect"]) if own["expect"] and not own["update"] else None
    if own["schedule"]:
        _show_schedule(run, own["topology"])
        if not as_json:
            return 0
    devices = _devices(run, own["topology"])
    run, fewer = elastic.fit(run, len(devices))
    if fewer:
        say.out(fewer)
    made = assembly.assemble(run, devices)
    if note := summary.note_unopened(run):
        made = dataclasses.replace(made, notes=(*made.notes, note))
    if given and not roofline.gpu_of(made.mesh):
        raise ConfigError("--assume changes the roofline, which needs a GPU of known speed; add e.g. --topology h100:8")
    step = inspect_step(made, given)
    now = expect.of(made, step.program.audit, step.memory_bytes)
    if own["update"]:
        _write(own["expect"], expect.dumps(
            now, f"python -m meshtrain.inspect {shlex.join(word for word in own.words if word != '--update')}"))
    if as_json or own["html"] or not own["expect"]:
        _tell(step, own)
    if step.program.audit.broken_permutes or before and _differs(before, now, own["expect"]):
        return FAILED
    gpu, needed = step.program.gpu, step.memory_bytes["total"]
    if step.fits or gpu is None or needed is None:
        return DONE
    say.err(f"it does not fit: {size(needed)} of {size(hardware.usable_bytes(gpu))} on {gpu.name}; "
            + fitting.advise(made, gpu, needed, own.names))
    return DOES_NOT_FIT


def inspect_step(made: assembly.Assembly, given: Mapping[str, float] = MappingProxyType({})) -> Inspected:
    """Compile the step of a run and, with [rl], the programs of its sampler, or the forward of its teacher. given:
    values that replace assumptions of the roofline, by name.

    Raises: gpu_compile.NotCompiledError, assembly.BrokenProgramError; ConfigError for faults of rl.rules.
    """
    logged: list[str] = []
    with say.without_noise(logged), gpu_compile.naming_faults(f"the programs of {made.run.run.name}"):
        with assembly.blame_own_code(made.run):
            lowered = made.program.lower_step()
        executable = assembly.compile_step(made, lowered, refuse_broken=False)  # a broken program is shown, not refused
        sampler = samplers.make(made) if made.program.step.objective.samples else None
        sampling = (sampler.costs, sampler.programs()) if sampler else None
    return Inspected(made, executable, given, logged, sampling, teacher.compile_alone(made))


def _tell(step: Inspected, own: config.Arguments) -> None:
    """Print the costs of a step and write its page, as the options ask."""
    data = report.as_json(step)
    if own["html"]:
        with config.user_errors():
            skin.write("--html", own["html"], layout.page(data))
    if own["json"]:
        say.answer(json.dumps(data))
        for note in step.made.notes:
            say.err(f"note: {note}")
    elif not own["expect"]:
        say.out(report.text(step))
    if own["html"]:
        say.err(f"written: {own['html']}")


def _read_assumptions(own: config.Arguments) -> dict[str, float]:
    """Return the values of --assume. Raises: ConfigError for unknown names and contradicting options."""
    given = dict(own["assume"])
    with config.user_errors():
        assumptions.Assumptions("", given)
    if foreign := [name for name in given if assumptions.TABLE[name].formula]:
        raise ConfigError(f"--assume {foreign[0]} applies only to the formulas of `python -m meshtrain.plan`: a "
                          f"compiled step itself shows what overlaps; leave it out")
    if own["update"] and not own["expect"]:
        raise ConfigError("--update needs a file: --expect FILE --update")
    for option in ("expect", "html"):
        if own[option] and own["schedule"] and not own["json"]:
            raise ConfigError(f"--schedule compiles nothing, so --{option} has no effect; leave one of them out")
    return given


# ---- the file of --expect --------------------------------------------------------------------------------------------


def _read_expected(path: str) -> expect.Expected:
    try:
        return expect.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--expect={path}: there is no such file; --expect {path} --update writes it") from None
    except OSError as error:
        raise ConfigError(f"--expect={path} cannot be read: {error.strerror}; give a readable file") from None
    except ValueError as error:
        message = f"--expect={path} is not a file that --update wrote: {error}; write it again with --update"
        raise ConfigError(message) from None


def _check_writable(path: str) -> None:
    """Check, before anything is compiled, that a file can be written. Writes nothing. Raises: ConfigError."""
    parent = Path(path).parent
    fault = ("it is a directory" if os.path.isdir(path) else f"there is no directory {parent}"
             if not os.path.isdir(parent) else
             "" if os.access(path if os.path.exists(path) else parent, os.W_OK) else "that is not permitted")
    if fault:
        raise ConfigError(f"--expect={path} cannot be written: {fault}; give a writable file")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--expect={path} cannot be written: {error.strerror}; give a writable file") from None
    say.err(f"written: {path}")


def _differs(before: expect.Expected, now: expect.Expected, path: str) -> bool:
    """Print all differences from the expected step. Return whether there are any."""
    lines, causes = expect.differences(before, now), expect.causes(before, now)
    for line in lines + causes:
        say.err(line)
    if lines:
        say.err(f"the step differs from {path}: {amount(len(lines), 'difference')}; to accept the step as it is, add "
                f"--update")
    else:
        sent = sum(row.bytes for row in now.collectives.values())
        say.err(f"the step agrees with {path}: {amount(len(now.collectives), 'kind')} of collectives, {sent:,} bytes "
                f"sent, {now.memory_bytes['total']:,} bytes held")
    return bool(lines)


def _devices(run: config.Run, topology: str | None):
    if topology is not None:
        return topologies.find_devices(run, topology)
    if run.mesh.simulated_devices:      # checked before devices start, each of which takes threads and memory
        elastic.check(run, run.mesh.simulated_devices)
    return local_devices.start(run)


def _show_schedule(run: config.Run, topology: str | None) -> None:
    """Print the pipeline schedule that `train` would choose on these GPUs (None: on this machine's devices), and write
    its picture. Compiles nothing. Raises: ConfigError."""
    choice = design.make(*topologies.resolve_layout(run, topology)).choice
    if choice is None:      # no mistake: a run file that `plan` wrote may have stages or not
        say.out("mesh.stage=1: the run has no pipeline, so there is no schedule to draw; a pipeline has e.g. "
                "--mesh.stage 4")
        return
    heading = chart.title(choice.schedule, choice.outcome, choice.memory_bytes)
    say.out(f"{heading}\n{choice.why}\n{chart.text(choice.schedule)}")
    path = Path(f"{run.run.name}-schedule.svg")
    try:
        path.write_text(skin.alone(pictures.schedule(chart.as_json(choice), heading)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; run the command in a writable "
                          f"directory") from None
    say.out(f"written: {path}")
