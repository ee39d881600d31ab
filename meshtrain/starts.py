"""The state that a run starts from: a checkpoint's, another run's, a model folder's, or random weights."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtrain import assembly, config
from meshtrain.checkpoint import init_from, pretrained, resume
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.run import say
from meshtrain.training.state import State


def start_state(made: assembly.Assembly, start: resume.Start, given) -> State:
    """Return the state after step `start.step`. given: the model folder, from `pretrained.open_folder`; None: there is
    none."""
    if start.saved is not None:
        with config.user_errors():
            state = start.saved.restore(made.state_shapes)
        source = start.saved.checkpoints
        say.out(f"resuming after step {start.step}" + (
            f", kept in {source.name}" if isinstance(source, LocalCheckpoints) else ""))
        return state
    return with_weights(made, given, assembly.initialize(made))


def with_weights(made: assembly.Assembly, given, state: State, **keys) -> State:
    """Return the initialized state with the weights that the run starts from, if there are any. keys: values of
    [checkpoint] that replace the run's."""
    run = made.run.replaced(checkpoint=keys)
    if given:
        pretrained.tell(given[0])
        return State(state.step, pretrained.load(*given, made.model.places(), state.params), state.opt_state)
    if run.checkpoint.init_from:
        return init_from.initial_state(run, made.model, made.layout, made.mesh, made.state_shapes, state)
    return state


def copy_first_params(made: assembly.Assembly, start: resume.Start, state: State, step: int) -> dict:
    """Return a copy of the weights that the run started from. state: the state at `start`. step: of the checkpoint in
    checkpoint.init_from that has these weights; 0: the newest."""
    if start.saved is None:
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, state.params))(state.params)
    # Without an optimizer state, for which there may be no memory.
    fresh = State(state.step, assembly.initialize_params(made), {})
    given = pretrained.open_folder(made.run, made.model)
    return with_weights(made, given, fresh, step=step, init_optimizer=False).params
