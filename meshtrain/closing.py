"""What a run does and says after its last step: checkpoint, exports, a sample of text, a summary."""
from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import shlex
import shutil
import sys

import jax

from meshtrain import starts, trained, training_data
from meshtrain.assembly import Assembly
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.places import Places
from meshtrain.cluster import watch
from meshtrain.data.documents import tokenizer as tokenizers
from meshtrain.huggingface.weights import exports
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.journal import goodput, rows
from meshtrain.run import contents, phases, say
from meshtrain.run.stops import DONE, FAILED
from meshtrain.storage import addresses
from meshtrain.training import objective
from meshtrain.training.state import State
from meshtrain.training_data import Opened
from meshtrain.units import amount

TEMPERATURE = 0.8       # of the sample of text


def end_finished(made: Assembly, start: resume.Start, places: Places, exporting: exports.Exports) -> int:
    """End the start of a run that has all its steps: save its last state, write missing exports. Return the exit code.
    """
    run, steps = made.run, made.run.training.steps
    if start.is_of(places.local):      # run.dir has no checkpoint of the last step
        assert start.saved is not None
        with watch.phase("last checkpoint", "save"):
            places.checkpoints.save(start.step, starts.start_state(made, start, None), start.saved.metadata)
            places.checkpoints.wait()
    say.out(f"{run.run.dir} is finished: it has {start.step} of training.steps={steps} steps; "
            "increase training.steps to continue")
    places.local.forget()      # remove local checkpoints that a crash or a failing file system left
    with watch.phase("export", "save"):
        return exit_code(exporting.finish())


def exit_code(missing: str) -> int:
    """Return the exit code of a run that has all its steps. missing: a text about failed exports, which is printed."""
    if missing and jax.process_index() == 0:
        say.err(f"error: the run is finished, but {missing}; check the directory and start the run again, which writes "
                f"the missing files")
    return FAILED if missing else DONE


def finish_saves(places: Places, exporting: exports.Exports, account: goodput.Account, finished: bool) -> str:
    """Wait for the last checkpoint. If the run is finished, write missing exports; return a text about those that
    failed."""
    with account.count_as("checkpoint"), watch.phase("last checkpoint", "save"), \
            phases.phase("saving the last checkpoint"):
        places.checkpoints.wait()
        places.local.forget()
    with watch.phase("export", "save"):
        return exporting.finish() if finished else ""


def show_sample(made: Assembly, opened: Opened, state: State) -> None:
    """Print the sample of text that run.sample_tokens asks for. In a run of one process, a failure is printed, too."""
    run, tokenizer = made.run, opened.corpus.tokenizer
    if not run.run.sample_tokens:
        return
    words = Words(tokenizer.decode, opened.ends.stops, opened.ends.ids)
    limits = GenerationLimits(run.run.sample_tokens, words.stop_ids, run.data.seq_len, words.at_string)
    try:
        with watch.phase("sample of text", "compile"), phases.phase("drawing a sample"):
            generator = trained.wrap(made, state.params).generator()
            prompt = training_data.sample_prompt(run, tokenizer)
            (answer,) = generator.complete([prompt], limits, Picking(temperature=TEMPERATURE), run.run.seed)
    except Exception as error:
        if jax.process_count() > 1:     # the other processes would wait for this one
            raise
        say.err(f"no sample of text: {type(error).__name__}: {error}")
        return
    begins = f"after {run.run.sample_prompt!r}" if run.run.sample_prompt else "no prompt"
    say.out(f"a sample ({len(answer.tokens)} tokens, {begins}):\n{run.run.sample_prompt}{words.text(answer.tokens)}\n")


def _python() -> str:
    """Return the command that starts this Python in a shell: `python` if PATH finds this Python by that name, else its
    path."""
    found, own = shutil.which("python"), sys.executable
    if not own or found and os.path.dirname(os.path.abspath(found)) == os.path.dirname(own):
        return "python"
    near = os.path.relpath(own)
    return shlex.quote(own if near.startswith(os.pardir) else near)


def summarize(opened: Opened, val_loss: float | None, goodput_line: str, cost_file: str) -> str:
    """Return the summary of a finished run: losses, goodput, its files, and further commands.

    val_loss: the last validation loss, if any. goodput_line: see `history.Attempt.describe`. cost_file: the name of the
    file with the costs of the step.
    """
    run, first, last = opened.made.run, None, None
    goal, place = objective.of_run(run), shlex.quote(run.run.dir)
    column, unit = goal.column, f" {goal.unit}".rstrip()
    with contextlib.suppress(OSError):
        written = rows.MetricRows(opened.directory / contents.METRICS)
        first, last = (next(ordered, {}).get(column) for ordered in (iter(written), reversed(written)))
    lines = [] if first is None or last is None else [
        f"{column} {first:.4f} → {last:.4f}{unit} in {amount(run.training.steps, 'step')}"]
    if val_loss is not None:
        bits = f" ({val_loss / math.log(2):.3f} bits)" if goal.unit == objective.NATS else ""
        lines += [f"validation {column} {val_loss:.4f}{unit}{bits}"]
    names = [contents.CONFIG, contents.RULES, contents.METRICS, contents.HISTORY, cost_file,
             f"{contents.CHECKPOINTS}/", *[f"{contents.TENSORBOARD}/"] * run.metrics.tensorboard]
    prompt = ("--chat" if run.data.source == "chat" else
              "--prompt-ids '[[0]]'" if isinstance(opened.corpus.tokenizer, tokenizers.Ids) else
              f"--prompt {shlex.quote(run.run.sample_prompt or 'The ')}") + f" --temperature {TEMPERATURE}"
    then = [f"{_python()} -m meshtrain.report {place}", f"{_python()} -m meshtrain.generate {place} {prompt}"]
    if run.metrics.tensorboard and not addresses.is_remote(run.run.dir):
        missing = not importlib.util.find_spec("tensorboard")
        then += [f"tensorboard --logdir {place}" + "      # pip install tensorboard" * missing]
    return "\n".join([*lines, *filter(None, [goodput_line]),
                      f"written: {run.run.dir}/ with {', '.join(names[:-1])} and {names[-1]}",
                      "next:", *(f"  {words}" for words in then)])
