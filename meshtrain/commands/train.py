"""Trains a model: python -m meshtrain.train [RUN.toml] [--section.key value …].

Exit codes: 0 done · 1 any other failure · 2 a mistake in the settings · 75 stopped on request, state saved.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from meshtrain import assembly, closing, config, process, run_files, starts, trainer, training_data
from meshtrain.assembly import Assembly
from meshtrain.checkpoint import places, resume
from meshtrain.checkpoint.places import Places
from meshtrain.cluster import agree, watch
from meshtrain.huggingface.weights import exports, pretrained
from meshtrain.huggingface.weights.exports import Exports
from meshtrain.inspection import measured, report, step_costs
from meshtrain.journal import goodput, history, trackers
from meshtrain.journal.history import Attempt
from meshtrain.process import Joined
from meshtrain.run import command, exits, loop, phases, replicas, say, stops
from meshtrain.run.stops import DONE, FAILED, STOPPED
from meshtrain.starts import Beginning
from meshtrain.training.step import Program
from meshtrain.trainer import CompiledRun, Trainer


def main(argv: Sequence[str], began: float | None = None) -> int:
    """Run the command. Return its exit code. began: time.perf_counter when its process began; None: now."""
    account = goodput.Account(began)
    command.print_notices()
    try:
        try:
            run = run_files.load(argv)
        finally:
            phases.end()
        trackers.check(run)
        with process.join(run, argv) as joined:     # which process of how many; signals, watchdog, devices
            return train(joined, account)
    except Exception as error:
        return exits.code_of(error)
    finally:
        say.format_lines("plain")


def train(joined: Joined, account: goodput.Account) -> int:
    """Train a run to its last step, from its newest checkpoint if it has one. Return the exit code."""
    run = joined.run
    agree.same_everywhere("the run", config.dump(run))
    made = agree.everywhere(lambda: assembly.assemble(run, joined.devices))     # mesh, layout, model
    agree.everywhere(lambda: step_costs.check_memory(made))
    with jax.set_mesh(made.mesh), places.claim(run, joined.watchdog) as here:
        beginning = starts.find(made, here)         # a checkpoint, or step 0 of a new run
        made, start = beginning.made, beginning.start
        exporting = exports.Exports(made.run, made.model, here.checkpoints, made.state_shapes.params)
        if start.step >= run.training.steps:
            return closing.end_finished(made, start, here, exporting)
        with history.record_attempt(here.directory, start.step, account, beginning.describe()) as attempt:
            return _train_from(beginning, here, exporting, attempt)


def _compile_evaluation(made: Assembly) -> Program:
    """Return the program of a run with a compiled evaluation. All processes call it together."""
    return agree.everywhere(lambda: assembly.compile_evaluation(made)).program


def _train_from(beginning: Beginning, here: Places, exporting: Exports, attempt: Attempt) -> int:
    """Open and compile what the run needs, train it, and end the attempt. Return the exit code."""
    made, start, run, account = beginning.made, beginning.start, beginning.made.run, attempt.account
    folder, opened = training_data.open_run(beginning, here, account)
    say.out(report.before(made))
    state = starts.begin_state(made, start, folder, account)        # restored, loaded or initialized
    feed = training_data.of_run(run).feed(opened, start, state)
    with account.count_as("compile"), watch.phase("compile", "compile"), phases.phase("compiling", "compiled in"):
        later = None
        if feed.evaluates and not assembly.may_refuse(made.mesh):
            later = functools.cache(functools.partial(_compile_evaluation, made))
        elif feed.evaluates:
            made = dataclasses.replace(made, program=_compile_evaluation(made))
        with agree.on_errors(), assembly.blame_own_code(run):
            step = assembly.compile_step(made, made.program.lower_step())       # refuses programs known to be wrong
        compiled = CompiledRun(made, step, replicas.of_run(run, made.state_shapes, made.mesh), later)
    exporting.set_aside_after(start.step)                           # the first change in the run directory
    resume.begin(run, start, here.checkpoints, here.local, made.layout.rules.text)
    if start.saved is None:
        pretrained.keep_companions(run, here.directory)
    # Process 0 prices the step, and all wait: before the loop a stop signal ends a process at once, within it a stop is
    # deferred, so all processes enter the loop together.
    agree.everywhere(lambda: step_costs.write_cost(compiled.made, compiled.step, here.directory))
    state = trainer.warm_up_biases(compiled, start, state, feed, account)
    with account.count_as("rest"), stops.defer() as listener:
        stop = loop.Stop(listener.has_request, here.claim)
        end = Trainer(compiled, opened, beginning.named, here, exporting, attempt, stop, step_costs.flops_of_step(made),
                      step_costs.memory_reader(compiled.made, compiled.step)).train(start, state, feed)
        finished = end.step == run.training.steps
        missing = closing.finish_saves(here, exporting, account, finished)
        if finished:
            training_data.finish(run, here.directory)
        attempt.end(listener.ending(finished), code=STOPPED if not finished else FAILED if missing else DONE)
    if not finished:
        say.out(attempt.describe())
        say.out(f"stopped after step {end.step}, saved in {run.run.dir}; run the same command again to resume")
        return STOPPED
    if not stop.agreed:
        closing.show_sample(compiled.made, opened, end.state)
    if jax.process_index() == 0:
        say.out(closing.summarize(opened, end.val_loss, attempt.describe(), measured.COST))
    return closing.exit_code(missing)
