"""Tries a run's own code on shapes, before any data are read: one layer of each kind, on one device."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain import custom, pattern
from meshtrain.choices.engines import choose
from meshtrain.choices.setting import Setting
from meshtrain.config import Run, named
from meshtrain.inference import cache
from meshtrain.model import params
from meshtrain.model.execution import Execution, Numerics
from meshtrain.model.stats import LayerStats
from meshtrain.model.transformer import Transformer
from meshtrain.names import AXES, LEADING
from meshtrain.sharding import logical
from meshtrain.sharding.rules import Layout, Rules
from meshtrain.training import objective, optimizer, rounding

ROWS = 2


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """A key that names code of the run's own."""
    key: str
    value: str
    contract: str

    def refuse(self, what: str) -> ValueError:
        return custom.refuse(self.key, self.value, self.contract, what)

    def trace(self, function: Callable, *shapes: object) -> Any:
        """Trace a function and return its result. Only shape and dtype of arrays in the result may be read. Raises:
        ValueError, whatever the function raises."""
        returned: list = []
        try:
            jax.eval_shape(lambda *arrays: returned.append(function(*arrays)), *shapes)
        except custom.ERRORS as error:
            raise self.refuse(f"raised {custom.tell(error)}") from error
        return returned[0]


def check(run: Run, model: Transformer, rules: Rules) -> None:
    """Call the run's own code as the run will, with shapes in place of arrays. Raises: ValueError for code that is not
    what its key needs."""
    parts = {key: OwnPart(key, value, contract) for key, value, contract in named.values(run)}
    if part := parts.get("optimizer.name"):
        _try_optimizer(part, run, model)
    if part := parts.get("optimizer.schedule"):
        _try_schedule(part, run)
    for info in model.parameters():
        if faults := _find_axis_faults(info, rules) if pattern.CUSTOM in info.path else ():
            raise ValueError(f"the parameter {info.name} has {faults[0]}")
    goal = objective.of_run(run)
    if any(key.startswith(("model.", "training.")) for key in parts):
        with custom.blame(named.values(run)):
            _try_layers(parts.get("training.objective"), run, model, rules, goal)
    if parts and (run.run.sample_tokens or goal.samples):
        cache.check(run.model)


def _find_axis_faults(info: params.ParamInfo, rules: Rules) -> list[str]:
    """Return the logical axes of a parameter that no weight has, each with a remedy."""
    known = rules.names
    return [f"the logical axis {axis!r}, which " + (
        f"only activations have; give this dim of {list(info.shape)} another name, or None" if axis in known else
        f"no rule knows{logical.nearest(axis, known)}; declare it in [{logical.NAMES}] of a rule file of your own")
            for axis in info.axes if axis not in (None, LEADING) and known.get(axis, "activation") == "activation"]


def _try_optimizer(part: OwnPart, run: Run, model: Transformer) -> None:
    trained = params.divide(model.parameters(), params.tree(model.parameters(), lambda info: info))[0]
    weights = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, jnp.float32), trained)
    rule = optimizer.load_rule(run.optimizer, jax.tree.map(lambda info: info.role, trained))
    state = part.trace(rule.init, weights)
    if run.optimizer.moments_dtype == "bfloat16" and not any(rounding.find_moments(state, weights)):
        raise part.refuse('has no float32 state with the path and shape of a weight, which '
                          'optimizer.moments_dtype="bfloat16" stores in bfloat16')
    forms = [part.trace(lambda *arrays: list(map(_form, arrays)), weights, state)]
    forms.append(part.trace(lambda grads, state, params: list(map(_form, rule.update(grads, state, params))),
                            weights, state, weights))
    for what, wanted, got in zip(("updates", "state"), *forms, strict=True):
        if got != wanted:
            raise part.refuse(f"has an `update` that returns {what} of another structure, shape or dtype than it got")


def _form(tree: object) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _try_schedule(part: OwnPart, run: Run) -> None:
    rate = optimizer.learning_rate_schedule(run.optimizer, run.training.steps)
    if not callable(rate):
        raise part.refuse(f"returned {_tell(rate)}")
    value = part.trace(rate, jax.ShapeDtypeStruct((), jnp.int32))
    if not _is_scalar(value):
        raise part.refuse(f"returned a function that returns {_tell(value)}")


def _try_layers(part: OwnPart | None, run: Run, model: Transformer, rules: Rules, goal: objective.Objective) -> None:
    """Trace all layers, and the objective if `part` is code of the run's own."""
    plain = run.replace(model={"attention": "blockwise", "mlp": "auto", "matmul_dtype": "auto"})
    layout = Layout(rules, dict.fromkeys(AXES, 1))
    ex = Execution(layout, Numerics(jnp.dtype(run.model.compute_dtype)),
                   choose(Setting(layout, "cpu", installed=False, run=plain)).value)
    weights = params.tree(model.parameters(), lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype))
    batch = {name: jax.ShapeDtypeStruct((ROWS, *[run.data.seq_len] * dims), dtype)
             for name, (dims, dtype) in goal.fields.items()}
    x_BTD = jax.eval_shape(lambda p, batch: model.through_layers(ex, p, batch), weights, batch)
    if part is None:
        return
    count = part.trace(goal.count, batch)
    if not _is_scalar(count):
        raise part.refuse(f"has a `count` that returns {_tell(count)}, not the number of tokens of a batch")
    sums = part.trace(lambda p, x_BTD, batch: goal.head(model, ex, p, x_BTD, batch), weights, x_BTD, batch)
    if not (isinstance(sums, tuple) and len(sums) == 3 and all(map(_is_scalar, sums[:2]))
            and isinstance(sums[2], LayerStats)):
        raise part.refuse(f"has a `head` that returns {_tell(sums)}")
    if jnp.result_type(sums[0]) != jnp.float32:
        raise part.refuse(f"has a `head` that differentiates {_tell(sums[0])}, not float32")


def _is_scalar(value: object) -> bool:
    return getattr(value, "shape", () if isinstance(value, (int, float)) else None) == () and jnp.result_type(
        value).kind in "fiub"


def _tell(value: object) -> str:
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(_tell, value))})"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"{value.dtype}{list(shape)}"      # type: ignore
