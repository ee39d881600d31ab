"""The teacher of a run with training.objective = "distill": a frozen model that predicts the tokens of every batch.

It is the model of a folder, on the run's mesh, by the run's rule file or its own, with weights in the compute dtype.
Before each step it computes its most likely next tokens from the batch that is already on the devices.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import assembly, config, design, hardware
from meshtrain.assembly import Assembly
from meshtrain.config import ConfigError
from meshtrain.data.documents import tokenizer
from meshtrain.data.documents.tokenizer import Tokenizer, TokenizerFile
from meshtrain.huggingface.weights import pretrained
from meshtrain.run import say
from meshtrain.storage import model_folder
from meshtrain.training import accumulate
from meshtrain.units import size

KEY = "distill.teacher"


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """predict: (weights, arrays of a batch) -> `Distillation.device_fields`, on the run's devices."""
    params: dict
    predict: Callable
    reads: tuple[str, ...]

    def teach(self, batch: dict) -> dict:
        """Return the batch with the teacher's predictions. batch: the result of `Program.place`."""
        return batch | self.predict(self.params, {name: batch[name] for name in self.reads})


def load(made: Assembly, reader: Tokenizer) -> Teacher:
    """Load the teacher of a run and compile it. All processes call it together. reader: the run's tokenizer. Raises:
    ConfigError if it does not fit the run."""
    run = made.run
    with config.user_errors(f"{KEY}: "):
        directory = model_folder.local_path(run.distill.teacher)
        _compare_tokens(directory, reader)
        taught = assemble(made)
        opened = pretrained.open_folder(taught.run, taught.model)
    assert opened
    shapes = taught.state_shapes.params
    zeros = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
                    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))
    params = pretrained.load(*opened, taught.model.places(), zeros())
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(shapes))
    count = sum(info.size for info in taught.model.parameters())
    say.out(f"teacher: {run.distill.teacher}, {count:,} weights, {size(held)} on each device; its "
            f"{run.distill.top_tokens} most likely tokens are learned")
    return Teacher(params, _compile(made, taught), tuple(taught.program.step.batch))


def assemble(made: Assembly) -> Assembly:
    """Put the teacher of a run on the run's devices. Raises: ConfigError, ValueError if it does not fit the run."""
    device = made.mesh.devices.flat[0]
    if faults := design.check_teacher(made.run, device.platform, hardware.from_device_kind(device.device_kind)):
        raise ConfigError(*faults)
    taught = assembly.assemble(design.teacher_run(made.run), made.mesh.devices.flat)
    _compare_order(made, taught)
    return taught


def _compare_tokens(directory, reader: Tokenizer) -> None:
    """Check that the teacher has the run's tokens, by their texts. Raises: ValueError."""
    path = directory / tokenizer.FILE
    if not isinstance(reader, TokenizerFile) or not path.is_file():
        say.out(f"note: {KEY}: the teacher's tokens cannot be compared with the run's, because one of the two has no "
                f"{tokenizer.FILE}; they must be the same")
        return
    theirs, ours = (library.get_vocab(with_added_tokens=True) for library in (
        tokenizer.open_published(path).library, reader.library))
    if apart := {text for text, number in ours.items() if theirs.get(text, number) != number}:
        text = min(apart, key=ours.__getitem__)
        raise ValueError(f"{path} has the id {theirs[text]} for the token {text!r}, but data.tokenizer={reader.path} "
                         f"has {ours[text]}; use a teacher with the tokens of the model")


def _compare_order(made: Assembly, taught: Assembly) -> None:
    """Check that both models take tokens in the same order. Raises: ValueError."""
    ours, theirs = (one.program.step.order for one in (made, taught))
    if (ours is None) != (theirs is None) or ours is not None and not np.array_equal(ours, theirs):
        raise ValueError("its attention and the model's take the tokens of a sequence in different orders; use another "
                         "context.method, or mesh.context=1")


def compile_alone(made: Assembly) -> jax.stages.Compiled | None:
    """Return the compiled forward of a run's teacher, from its config.json alone; None without a teacher. Raises:
    ConfigError if it does not fit the run."""
    with config.user_errors(f"{KEY}: "):
        return _compile(made, assemble(made)) if made.run.distill.teacher else None


def _compile(made: Assembly, taught: Assembly) -> jax.stages.Compiled:
    """Return the compiled `Teacher.predict`, from shapes alone. The two programs may divide a batch over the devices in
    different ways."""
    step, own, given = taught.program.step, made.program.step, made.run.distill
    into = {name: own.batch[name] for name in own.objective.device_fields}

    def predict(p, batch: dict):
        arrays = {name: jax.lax.with_sharding_constraint(x.reshape(step.batch[name].shape), step.batch[name].sharding)
                  for name, x in batch.items()}
        found = accumulate.top_tokens(step, given.top_tokens, given.temperature, p, arrays)
        return {name: x.reshape(into[name].shape) for name, x in zip(into, found, strict=True)}
    function = jax.jit(predict, out_shardings={name: of.sharding for name, of in into.items()})
    return assembly.compile_function(taught, "the teacher", function, taught.state_shapes.params, {
        name: own.batch[name] for name in step.batch})
