"""Finds where a run starts, and makes its state: a checkpoint's, another run's, a model folder's, or random weights."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain import assembly, config, shipped
from meshtrain.assembly import Assembly
from meshtrain.checkpoint import init_from, resume
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.checkpoint.places import Places
from meshtrain.checkpoint.saved import Saved
from meshtrain.checkpoint.store import AVERAGE, OPTIONAL, SHARES
from meshtrain.cluster import agree, watch
from meshtrain.config import Run
from meshtrain.huggingface.weights import ends, growth, peft_folder, pretrained
from meshtrain.huggingface.weights.pretrained import FolderWeights
from meshtrain.journal import goodput
from meshtrain.run import phases, say
from meshtrain.sharding import rules
from meshtrain.training import average
from meshtrain.training.state import State


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """Where a run starts.

    made: the run, with its data.eos. origin: the checkpoint that the run resumes from, or another run's checkpoint
    whose weights the run loads. named: key that names a file -> content of the file, because a file may change under
    its name.
    """
    made: Assembly
    start: resume.Start
    origin: Saved | None
    named: dict[str, str]

    def describe(self) -> dict:
        """Return the fields of the history's line for this start."""
        made = self.made
        return {"on": f"{made.mesh_spec}: {made.mesh_spec.num_devices} × {made.mesh.devices.flat[0].device_kind}",
                "processes": jax.process_count(), "cause": self.start.cause}


def find(made: Assembly, here: Places) -> Beginning:
    """Find the newest checkpoint of a run, or the checkpoint of step checkpoint.step. All processes call it. Raises:
    ConfigError if the run cannot continue from there."""
    with watch.phase("looking for a checkpoint", "restore"):
        named = _read_named_files(made)
        start = resume.find(made.run, here.checkpoints, here.local, made.state_shapes, named)
    run, origin = _resolve_eos(made.run, start)
    return Beginning(dataclasses.replace(made, run=run), start, origin, named)


def _resolve_eos(run: Run, start: resume.Start) -> tuple[Run, Saved | None]:
    """Return (the run with data.eos, the checkpoint that data.eos comes from, if any). The run resumes from this
    checkpoint or loads its weights."""
    if start.saved:
        return resume.in_force(run, start), start.saved
    with watch.phase("opening the data", watch.UNLIMITED), config.user_errors():      # may copy remote files
        origin = resume.origin(run)
        eos, line = agree.on_first(lambda: ends.default(run, origin))
    if line:
        say.out(line)
    return run.replace(data={"eos": eos}), origin


def _read_named_files(made: Assembly) -> dict[str, str]:
    run, rl, named = made.run, made.run.rl, {"sharding.rules": made.layout.rules.text}
    for key, given in (("rl.rules", rl.rules), ("distill.rules", run.distill.rules)):
        if given:
            with config.user_errors():
                named[key] = rules.load(shipped.rule_file(given), key).text
    if rl.reward:
        from meshtrain.rl.rewards import workers        # here: only runs that sample answers have rewards
        if digest := workers.digest(rl.reward):
            named["rl.reward"] = f"{digest} {rl.reward.rpartition(':')[2]}"
    return agree.on_first(lambda: named)


def begin_state(made: Assembly, start: resume.Start, folder: FolderWeights | None, account: goodput.Account) -> State:
    """Return the state as `start_state`, and show what is done meanwhile. All processes call it together."""
    fresh = start.saved is None and not folder and not (made.run.checkpoint.init_from or made.run.lora.init_from)
    with account.count_as("start" if fresh else "restore"), \
            watch.phase("restore" if start.saved else "initialization", "restore"), \
            phases.phase(f"restoring step {start.step}" if start.saved else "initializing the weights" if fresh else
                         "loading the weights"):
        return agree.everywhere(lambda: start_state(made, start, folder))


def start_state(made: assembly.Assembly, start: resume.Start, given: FolderWeights | None) -> State:
    """Return the state after step `start.step`. given: the model folder, from `pretrained.open_folder`; None: there is
    none."""
    if start.saved is not None:
        wanted = made.state_shapes
        absent = [part for part in OPTIONAL if not start.saved.has(part)]
        without: dict[str, Any] = dict.fromkeys(absent)
        with config.user_errors():
            state = start.saved.restore(dataclasses.replace(wanted, **without))
        source = start.saved.checkpoints
        say.out(f"resuming after step {start.step}" + (
            f", kept in {source.name}" if isinstance(source, LocalCheckpoints) else ""))
        return _complete(made, start, state, absent)
    state = with_weights(made, given, assembly.initialize(made))
    if state.ema is None or not (given or made.run.checkpoint.init_from):
        return state
    state = dataclasses.replace(state, ema=None)        # of the initial weights; frees its memory first
    return begin_average(made, state)


def _complete(made: assembly.Assembly, start: resume.Start, state: State, absent: Sequence[str]) -> State:
    """Return a restored state with the parts that the run has and the checkpoint lacks. absent: names from OPTIONAL."""
    wanted = made.state_shapes
    if wanted.ema is None and AVERAGE not in absent:
        say.out("training.ema=0: the average of the weights in the checkpoint is left out")
    if wanted.shares is not None and SHARES in absent:
        say.out('experts.balance="batch": the checkpoint has no shares of the experts, so they start equal, and step '
                f"{start.step + 1} has no balance loss")
        begin = jax.jit(made.program.step.state.begin_shares, out_shardings=wanted.shares.sharding)
        state = dataclasses.replace(state, shares=begin())
    if wanted.ema is not None and AVERAGE in absent:
        say.out(f"training.ema={made.run.training.ema}: the checkpoint has no average of the weights, so it starts as "
                f"a copy of the weights of step {start.step}")
        state = begin_average(made, state)
    return state


def begin_average(made: assembly.Assembly, state: State) -> State:
    """Return the state with an average of the weights that starts as a copy of them."""
    placed = jax.tree.map(lambda leaf: leaf.sharding, made.state_shapes.ema)
    begin = jax.jit(functools.partial(average.begin, made.model), out_shardings=placed)
    return dataclasses.replace(state, ema=begin(state.params))


def with_weights(made: assembly.Assembly, given: FolderWeights | None, state: State, **keys) -> State:
    """Return the initialized state with the weights that the run starts from, if there are any. keys: values of
    [checkpoint] that replace the run's."""
    run = made.run.replace(checkpoint=keys)
    if given:
        pretrained.tell(given[0])
        params = pretrained.load(*given, made.model.places(), state.params)
        state = dataclasses.replace(state, params=growth.grow(given[0], run, params))
    elif run.checkpoint.init_from:
        state = init_from.initial_state(run, made.model, made.layout, made.mesh, made.state_shapes, state)
    if run.lora.init_from:
        with config.user_errors("lora.init_from: "):
            found = peft_folder.open_folder(run.lora.init_from, run.checkpoint.init_from, run.model)
        for line in peft_folder.tell(found):
            say.out(line)
        state = dataclasses.replace(state, params=peft_folder.load(found, made.model, state.params))
    return state


def copy_first_params(made: assembly.Assembly, start: resume.Start, state: State, step: int) -> dict:
    """Return a copy of the weights that the run started from. state: the state at `start`. step: the step of the
    checkpoint in checkpoint.init_from that has these weights; 0: the newest."""
    if start.saved is None:
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, state.params))(state.params)
    # Without an optimizer state, for which there may be no memory.
    fresh = State(state.step, assembly.initialize_params(made), {})
    given = pretrained.open_folder(made.run, made.model)
    return with_weights(made, given, fresh, step=step, init_optimizer=False).params
