"""Training of any loss by a rule file: the trainer's loop, metrics and checkpoints, with a step made of functions.

This module knows no model: the loss, the optimizer and the data are functions. `run_dir` has the directory of a run.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import given
from meshtrain.checkpoint.saved import format_form
from meshtrain.config import ConfigError
from meshtrain.config.sections import Run
from meshtrain.inspection import function_report, functions
from meshtrain.journal.guards import SkippedSteps
from meshtrain.journal.journal import Flops, Journal
from meshtrain.journal.rows import Row
from meshtrain.library import run_dir, staged
from meshtrain.library.axes import list_leaves
from meshtrain.library.gradients import check_options, check_trained
from meshtrain.library.layouts import TreeLayout
from meshtrain.library.run_dir import LoopParts
from meshtrain.library.stack import Stack
from meshtrain.library.staged import GivenSchedule
from meshtrain.run import loop, say, stops
from meshtrain.run.loop import StepBatch
from meshtrain.sharding.logical import nearest
from meshtrain.shown import Rows, history
from meshtrain.training.state import State
from meshtrain.training.step import dropout_key
from meshtrain.units import amount, shorten

REMEDY = "Lower the learning rate, clip gradients (optax.clip_by_global_norm), or look at the data of these steps"
MOST_SKIPPED = 10       # steps in a row


class FitOptions(TypedDict, total=False):
    """Options of `fit`. microbatches: microbatches per step; default: 1. dir: the directory of the run; default:
    nothing is saved. every: steps between checkpoints; 0: only after the last step. keep: number of checkpoints;
    default: 2. keys: whether the loss gets a key for each row, for dropout. seed: the seed of these keys. compute: the
    dtype in which weights are read. schedule, chunks: the pipeline schedule of a `Stack`, see `pipeline`."""
    microbatches: int
    dir: str | Path | None
    every: int
    keep: int
    keys: bool
    seed: int
    compute: str | None
    schedule: GivenSchedule
    chunks: int


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Checked arguments of `fit`."""
    steps: int
    microbatches: int = 1
    dir: str | Path | None = None
    every: int = 0
    keep: int = 2
    keys: bool = False
    seed: int = 0
    compute: str | None = None
    schedule: GivenSchedule | None = None
    chunks: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """The result of `fit`. state: step, params and opt_state, stored as in [optimizer]. history: a row of metrics for
    each step that this call took."""
    state: State
    history: Rows

    @property
    def params(self) -> Any:
        """The trained parameters, a tree like the `params` of `fit`."""
        return self.state.params


def fit(loss: Callable, params: Any, axes: Any = None, *, layout: TreeLayout,
        optimizer: optax.GradientTransformation, data: Callable[[int], Any], steps: int,
        **options: Unpack[FitOptions]) -> Fit:
    """Train until `steps` steps are taken. Return the state and the metrics.

    loss(params, rows) -> (sum, count), or a `Stack`; params, axes: see `Layout.gradients`. optimizer: an optax
    optimizer, including clipping and schedules, which updates the shards of [optimizer]. data(n) -> rows, arrays [B,
    …], of the step after n steps: a function only of n, called in every process. options: see `FitOptions`.

    A mesh axis that splits none of the step's matmuls is refused; one warning lists the lines whose matmuls are
    repeated. A step whose loss or gradients are not finite changes only the count of steps; ten such steps in a row end
    the run.

    With `dir` the call resumes from the newest checkpoint in this directory: bit for bit on the same layout, up to the
    order of sums on another layout. `python -m meshtrain.report DIR` shows its metrics. With `dir`, a stop signal ends
    the process after the current step, with the state saved and exit code 75.

    Raises: ConfigError; TooManySkippedSteps; CheckpointError.

    >>> done = mt.fit(lambda p, rows: (jnp.sum((rows * p["w"] - 3) ** 2), rows.size), {"w": np.zeros(1)}, {},
    ...               layout=mt.Layout("ddp", {"data": 4}), optimizer=optax.sgd(0.1),
    ...               data=lambda n: np.ones(8, np.float32), steps=30)
    >>> round(float(done.params["w"][0]), 2), len(done.history)
    (3.0, 30)
    """
    asked = _check(loss, layout, optimizer, data, steps, options)
    params, named = layout.name(params, axes)
    check_trained(params)
    gradients = layout.gradients(loss, named, asked.microbatches, asked.compute, asked.schedule, asked.chunks)
    first = data(0)
    feed = _Feed(layout, data, list_leaves(first))
    run, wanted = _describe_run(asked, feed), _describe_state(layout, optimizer, params, named)
    if asked.dir is not None:
        _check_saved(wanted)
    with jax.set_mesh(layout.mesh), contextlib.ExitStack() as stack:
        directory = None
        if asked.dir is not None:
            facts = _list_facts(layout, loss, named, asked, feed)
            directory = stack.enter_context(run_dir.open_directory(run, facts, layout.rules.text))
        state = directory.restore(wanted) if directory else None
        if state is None:
            state = _begin_state(layout, optimizer, params, named, wanted)
        start = int(state.step)
        if start >= asked.steps:
            if directory and jax.process_index() == 0:
                say.out(f"{asked.dir} has taken {start} steps already, and steps={asked.steps}, so no step is taken")
            return Fit(state, history([]))
        step = _compile(layout, _make_step(layout, gradients, optimizer, asked, wanted), wanted, layout.batch(first))
        taken: list[Row] = []
        guards = SkippedSteps(MOST_SKIPPED, REMEDY),
        with (directory.train(start, str(layout.spec), guards, taken) if directory else
              _train_here(run, guards, taken)) as training:
            state, done = loop.train(lambda limit: (), step, state, feed, asked.steps, *training)
    if done < asked.steps:
        say.out(f"stopped after step {done}, saved in {asked.dir}; call fit again to resume")
        raise SystemExit(stops.STOPPED)
    return Fit(state, history(taken))


@contextlib.contextmanager
def _train_here(run: Run, guards: Sequence, taken: list[Row]) -> Iterator[LoopParts]:
    """Context of a loop without a directory: rows are appended to `taken`, and nothing is printed or saved."""
    journal = Journal(run, run_dir.RowList(taken), _Silent(), Flops(0.0), guards=guards)
    yield LoopParts(journal, (), loop.Stop())


class _Silent:
    """A display of rows that shows nothing."""

    def step(self, row: Row) -> None:
        pass


class _Feed:
    """A loop.StepFeed of data(n). Raises: ConfigError for rows whose form differs from the rows of step 0."""

    def __init__(self, layout: TreeLayout, data: Callable[[int], Any], first: Mapping[str, Any]):
        self.layout, self.data = layout, data
        self.forms = {name: (np.shape(leaf), jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
                      for name, leaf in first.items()}
        sizes = {shape[:1] for shape, _ in self.forms.values()}
        if len(sizes) != 1 or sizes == {()}:
            shapes = ", ".join(str(shape) for shape, _ in self.forms.values())
            raise ConfigError(f"data(0) has {shapes or 'no arrays'}; each array must be [B, …] with the same number of "
                              f"rows B")
        (self.num_rows,) = sizes.pop()
        lengths = {shape[1] for shape, dtype in self.forms.values()
                   if len(shape) > 1 and np.issubdtype(dtype, np.integer)}
        # of metrics: sequences are integers [B, T], and other rows count as one token each
        if not self.num_rows:
            raise ConfigError("data(0) has no rows; each array must be [B, …] with at least one row")
        self.length = lengths.pop() if len(lengths) == 1 else 1

    def next(self, done: int, state: State, journal: Journal, stop: loop.Stop) -> StepBatch:
        rows = self.data(done)
        forms = {name: (np.shape(leaf), jax.dtypes.canonicalize_dtype(np.result_type(leaf)))
                 for name, leaf in list_leaves(rows).items()}
        if forms != self.forms:
            name = next(name for name in {**self.forms, **forms} if forms.get(name) != self.forms.get(name))
            raise ConfigError(f"data({done}) has {name} {format_form(forms.get(name))}, and data(0) had "
                              f"{format_form(self.forms.get(name))}; give rows of one shape and dtype in every step")
        return StepBatch(self.layout.batch(rows), self.tokens(1))

    def tokens(self, steps: int) -> int:
        return steps * self.num_rows * self.length

    def close(self) -> None:
        pass


def _make_step(layout: TreeLayout, gradients: Callable, optimizer: optax.GradientTransformation, asked: _Asked,
               wanted: State) -> jax.stages.Wrapped:
    """Return the jitted step (state, rows) -> (state, metrics), which donates the state."""
    passes_on = isinstance(optimizer, optax.MultiSteps)
    update = (optimizer if passes_on else optax.with_extra_args_support(optimizer)).update

    def train(state: State, rows):
        key = dropout_key(asked.seed, state.step) if asked.keys else None
        mean, grads = gradients(state.params, rows, key)
        norm = optax.global_norm(grads)

        def choose(new, old):
            new = jnp.where(finite, new, old)
            # a float32 gradient makes moments of narrower weights float32, but the step keeps the dtypes of its state
            return new if new.dtype == old.dtype else new.astype(old.dtype)
        updates, opt_state = update(grads, state.opt_state, state.params, value=mean, grad=grads)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        new = optax.apply_updates(state.params, updates), opt_state
        new = jax.tree.map(choose, new, (state.params, state.opt_state))
        rates = optax.tree.get_all_with_path(state.opt_state, "learning_rate")      # of optax.inject_hyperparams
        rate = rates[0][1] if len(rates) == 1 else math.nan
        metrics = {"loss": mean, "grad_norm": norm, "learning_rate": jnp.asarray(rate, jnp.float32), "skipped": ~finite}
        return State(state.step + 1, *new), metrics
    places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    return jax.jit(train, out_shardings=(places, NamedSharding(layout.mesh, P())), donate_argnums=0)


def _compile(layout: TreeLayout, step: jax.stages.Wrapped, wanted: State, rows: Any) -> jax.stages.Compiled:
    """Compile the step for its arguments. Warn in one line if devices repeat matmuls, or if repeats cannot be detected.
    Raises: ConfigError if devices repeat all matmuls: a mesh axis then splits no work."""
    inspected = functions.inspect(step, (wanted, rows), functions.Target(options=functions.OURS))
    traced, repeats = inspected.traced, inspected.repeats
    if repeats:
        also = f", and those of {amount(len(repeats) - 1, 'more line')}" * (len(repeats) > 1)
        # Rows are split over the batch axes, which therefore are the reason only if no other axes can be.
        likely = tuple(group for group in repeats[0].axes if not set(group) & set(layout.inner.batch_axes))
        first = dataclasses.replace(repeats[0], axes=likely or repeats[0].axes)
        told = f"fit on {layout}: {function_report.describe(first)}{also}; constrain an activation by that axis " \
               f"(layout.constrain), or leave it out of the mesh"
        if len(repeats) == len(traced.by_line):
            raise ConfigError(f"{told}. The devices repeat every matmul of the step")
        warnings.warn(told, stacklevel=3)
    elif layout.mesh.size > 1 and (unseen := (*traced.bounds, *traced.uncounted)):
        warnings.warn(f"fit on {layout}: whether devices repeat work cannot be seen in {', '.join(unseen)}",
                      stacklevel=3)
    return inspected.program.executable


def _describe_state(layout: TreeLayout, optimizer: optax.GradientTransformation, params: Any, named: Any) -> State:
    """Return the state as ShapeDtypeStructs with shardings, for compiling and for restoring."""
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    opt_state = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                             jax.eval_shape(optimizer.init, shapes), layout.states(optimizer, shapes, named))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(layout.mesh, P()))
    return State(step, layout.place(shapes, named), opt_state)


def _begin_state(layout: TreeLayout, optimizer: optax.GradientTransformation, params: Any, named: Any,
                 wanted: State) -> State:
    places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    # copies: the step donates its state, and the caller keeps params
    stored = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=places.params)(layout.place(params, named))
    opt_state = jax.jit(optimizer.init, out_shardings=places.opt_state)(stored)
    return State(jax.device_put(np.int32(0), places.step), stored, opt_state)


def _check(loss: object, layout: object, optimizer: object, data: object, steps: object,
           options: Mapping[str, Any]) -> _Asked:
    """Return checked options. Raises: ConfigError with every fault."""
    known, faults = [field.name for field in dataclasses.fields(_Asked) if field.name != "steps"], []
    for name in options:
        if name not in known:
            faults.append(f"fit has no option {name!r}{nearest(name, known)}; its options are {', '.join(known)}")
    if not isinstance(layout, TreeLayout):
        faults.append(f"layout={shorten(layout)} is no layout; give e.g. mt.Layout(\"zero3\", {{\"fsdp\": 8}})")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        faults.append(f"optimizer={shorten(optimizer)} has no init and update; give an optax.GradientTransformation, "
                      f"e.g. optax.adamw(1e-3)")
    try:
        check_options(loss, 1, options.get("compute"))
    except ConfigError as error:
        faults += error.messages
    if not isinstance(options.get("dir"), str | Path | None) or options.get("dir") == "":
        faults.append(f"dir={options['dir']!r} is not a path; give a directory, or leave it out to save nothing")
    if not callable(data):
        faults.append(f"data={str(data)[:60]!r} is not a function; give data(n) -> rows of the step after n steps, so "
                      f"that a resumed run sees the same rows")
    for name, value, least in (("steps", steps, 1), ("microbatches", options.get("microbatches", 1), 1),
                               ("every", options.get("every", 0), 0), ("keep", options.get("keep", 2), 1),
                               ("seed", options.get("seed", 0), 0), ("chunks", 1 if options.get("chunks") is None else
                                                                       options["chunks"], 1)):
        try:
            given.check_count(name, value, least)
        except ConfigError as error:
            faults += error.messages
    if isinstance(seed := options.get("seed", 0), int) and seed >= 2 ** 32:
        faults.append(f"seed={seed} is not below 2**32")
    if options.get("every") and options.get("dir") is None:
        faults.append(f"every={options['every']}: without dir nothing is saved; give dir=, or leave every out")
    if faults:
        raise ConfigError(*faults)
    return _Asked(int(steps), **options)        # type: ignore[call-overload]


def _check_saved(wanted: State) -> None:
    """Check that a checkpoint can hold the state. Raises: ConfigError with every array that it cannot hold."""
    whys = {name: "has no elements" if not leaf.size else f"has the dtype {leaf.dtype}"
            for name, leaf in list_leaves(wanted).items()
            if not leaf.size or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)}
    if whys:
        raise ConfigError(*(f"dir: the state has {name}, which {why} and cannot be saved; leave the array out, or "
                            f"leave dir out to save nothing" for name, why in whys.items()))


def _describe_run(asked: _Asked, feed: _Feed) -> Run:
    """Return a run file's sections for the trainer's functions, which read only the keys that are set here."""
    name = Path(asked.dir).name if asked.dir is not None else ""
    return Run(run={"name": name or "fit", "dir": str(asked.dir or ""), "seed": asked.seed},
               training={"steps": asked.steps, "microbatches": asked.microbatches},
               data={"global_batch": feed.num_rows, "seq_len": feed.length},
               checkpoint={"every": asked.every, "keep": asked.keep})


def _list_facts(layout: TreeLayout, loss: Callable, named: Any, asked: _Asked, feed: _Feed) -> dict[str, str | int]:
    """Return the facts on which the numbers of a run depend. A changed fact is reported when a run resumes."""
    written = (loss.embed, loss.layer, loss.head) if isinstance(loss, Stack) else (loss,)
    named_rows = ", ".join(f"{name} {format_form(form)}" for name, form in sorted(feed.forms.items()))
    facts: dict[str, str | int] = {
        "loss": _digest(*map(_read_source, written)), "axes": _digest(str(named)),
        "rules": f"{Path(layout.rules.path).stem} {_digest(layout.rules.text)}", "mesh": str(layout.spec),
        "rows": named_rows, "microbatches": asked.microbatches, "seed": asked.seed,
        "compute": asked.compute or "as stored"}
    if asked.schedule is not None:
        facts["schedule"] = _name_schedule(asked.schedule, layout.spec.sizes["stage"], asked)
    return facts


def _name_schedule(given: GivenSchedule, stages: int, asked: _Asked) -> str:
    made = staged.make_schedule(given, stages, asked.microbatches, asked.chunks)
    if isinstance(given, str) and not staged.is_table(given):
        return given + f", {made.num_chunks} chunks" * (made.num_chunks > 1)
    return f"table {_digest(str(made.ops.tolist()))}"


def _digest(*texts: str) -> str:
    """Return a short digest; "unknown" without texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12] if all(texts) else "unknown"


def _read_source(function: Callable) -> str:
    """Return the source of a function, without the functions that it calls; "" if there is no source (typed into
    python)."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
