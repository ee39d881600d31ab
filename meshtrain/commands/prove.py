"""Tests whether a run computes the same on every layout as on one device: python -m meshtrain.prove RUN.toml.

The run's model is made small; kinds of layers, experts, windows, adapters, objective and masks stay. The loss, every
gradient leaf and three steps are compared with those of one device, in float32 on simulated devices. The layouts cover
every pair of meshes, rule files, pipeline schedules, context methods, microbatches and remat policies that the run
allows. Reads no data and trains nothing. Exit codes: 0 · 1 a layout differs, or the GPU program or a rule file has a
fault · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import json

from meshtrain import config, devices as local_devices, parity, run_files
from meshtrain.pages import proofs, skin
from meshtrain.parity import smallest
from meshtrain.run import command, say

MOST_DEVICES = 64
COMMAND = config.Command("meshtrain.prove", {
    "rules": config.Option("test this rule file instead of the run's and the shipped ones", "FILE", "my_rules.toml",
                           many=True),
    "devices": config.Option("number of simulated devices", "N", "8", config.whole(2, MOST_DEVICES), 8),
    "cells": config.Option("test at most this many layouts, those that cover the most pairs of choices; default: "
                           "layouts that cover all pairs", "N", "10", config.whole(1)),
    "no-shrink": config.Option("do not search for the smallest run file that shows a difference"),
    "json": config.Option("print only JSON"),
    "html": config.Option("also write an HTML page: one file without external resources", "FILE", "proof.html"),
}, "[RUN.toml]", (0, 1))


@command.entry(COMMAND, __doc__)
def main(own: config.Arguments) -> int:
    run = run_files.load(own.names + own.keys)
    if own["html"]:
        with config.user_errors():
            skin.check_free("--html", own["html"])
    devices = local_devices.start(run.replace(mesh={"simulated_devices": own["devices"]}), cheaply=True)
    with say.without_noise([]):     # XLA's warnings about programs for CPUs do not matter here
        begun = say.live if say.on_terminal() and not own["json"] else lambda line: None
        proof = parity.prove(run, own["rules"], devices, own["cells"], say.out, begun)
        file = None if own["no-shrink"] else _write_smallest(proof, run, devices)
    data = proof.as_json() | {"smallest": file}
    if own["html"]:
        with config.user_errors():
            skin.write("--html", own["html"], proofs.page(data))
        say.err(f"written: {own['html']}")
    if own["json"]:
        say.answer(json.dumps(data))
    else:
        for note in proof.notes:
            say.out(f"note: {note}")
        say.out(parity.summarize(proof))
    return 1 if proof.failed else 0


def _write_smallest(proof: parity.Proof, run: config.Run, devices) -> str | None:
    """Write the smallest run file that shows the first difference. Return its path; None if nothing differs, or if the
    run file is already the smallest."""
    if (cell := next((cell for cell in proof.cells if cell.differs), None)) is None:
        return None
    say.out("searching for the smallest run file that shows the first difference …")
    counterexample = smallest.of(cell, devices, say.out)
    if counterexample.keys == smallest.keys_of(run):
        say.out("this run file is the smallest that shows the difference: no key can be left out")
        return None
    path = smallest.write(counterexample, run.run.name)
    say.out(f"written: {path}, {len(counterexample.keys)} keys; python -m meshtrain.prove {path} shows the difference "
            f"again")
    return str(path)
