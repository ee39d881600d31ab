"""python -m meshtrain.inspect [RUN.toml] [--section.key value …] [--topology h100:64] [--json]: what a run costs.

Compiles the training step, never trains, reads no data. With --topology the step is compiled for GPUs that are not
here, as many as it says. Exit codes: 0 · 2 the user's mistake, one message · 1 a program that would compute wrong numbers.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from meshtrain import assembly, config
from meshtrain.config import ConfigError
from meshtrain.cost import audit, report
from meshtrain.cost import compile as gpu_compile

USAGE = "python -m meshtrain.inspect [RUN.toml] [--section.key value ...] [--topology NAME:N] [--json]"


def main(argv: Sequence[str]) -> int:
    try:
        topology, as_json, rest = _own_flags(list(argv))
        run = config.load(rest, usage=USAGE)
        devices = _devices(run, topology)
        made = assembly.assemble(run, devices)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    executable = made.program.compile()
    program = audit.read(executable.as_text(), made.mesh)
    if as_json:
        print(json.dumps(report.as_json(made, executable, program)))
        for note in made.notes:
            print(f"note: {note}", file=sys.stderr)
    else:
        print("\n\n".join([report.before(made), report.params_table(made), report.memory_table(made, executable),
                           report.collectives_table(program), report.matmuls(program)]))
    return 1 if program.broken_permutes else 0


def _own_flags(argv: list[str]) -> tuple[str | None, bool, list[str]]:
    """(--topology, --json, the rest). Raises: ConfigError for a --topology without its value."""
    topology, rest = None, []
    as_json = "--json" in argv
    words = iter(arg for arg in argv if arg != "--json")
    for word in words:
        if word == "--topology":
            topology = next(words, "")
        elif word.startswith("--topology="):
            topology = word.partition("=")[2]
        else:
            rest.append(word)
    if topology is not None and (not topology or topology.startswith("--")):
        raise ConfigError("--topology has no value; write a GPU and how many, e.g. --topology h100:64")
    return topology, as_json, rest


def _devices(run, topology: str | None):
    if topology is None:
        return assembly.start_devices(run)
    try:
        return gpu_compile.topology(topology)
    except ValueError as error:
        raise ConfigError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
