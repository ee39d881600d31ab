"""The Python interface, `import meshtrain as mt`: the functions of the commands, for notebooks and scripts.

An `Experiment` is a run on a mesh. It compiles, inspects, steps and generates with the modules of the commands and has
no arithmetic of its own. Results are the JSON of a command; they print as text and show a picture in a notebook.
"""
from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshtrain.run import say

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with say.without_noise():       # of a CUDA plugin without a GPU
    import jax
import numpy as np

from meshtrain import (assembly, config, devices as local_devices, elastic, given, parity, run_files, scratch, shown,
                       starts, trained)
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.saved import Saved
from meshtrain.commands import inspect as inspect_command, plan as plan_command
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import simulate as pipeline_times
from meshtrain.data import sources
from meshtrain.data.documents import contracts
from meshtrain.devices import simulate
from meshtrain.drawn import bars, curves, mesh, shards
from meshtrain.exercise import check_answer
from meshtrain.huggingface.weights import ends, pretrained
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.inspection import functions, report, step_costs, summary, topologies
from meshtrain.inspection.inspected import Inspected
from meshtrain.library import proving
from meshtrain.library.fit import fit
from meshtrain.library.layouts import Layout
from meshtrain.library.pipeline import pipeline
from meshtrain.library.ring import ring_attention, token_order
from meshtrain.library.stack import Stack
from meshtrain.library.unpack import unpack
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding import rules as rule_files
from meshtrain.shown import DrawnSchedule, JsonTable, ProgramCosts, Rows, StepCosts
from meshtrain.training.accumulate import drops
from meshtrain.training.state import State
from meshtrain.training.step import dropout_key
from meshtrain.units import size

__all__ = ["ConfigError", "Experiment", "Layout", "Rules", "Stack", "bars", "check_answer", "compare", "curves", "fit",
           "inspect", "mesh", "pipeline", "plan", "prove", "ring_attention", "schedule", "shards", "simulate", "size",
           "token_order", "unpack"]

DRAWN_EVERY_S = 0.5     # interval at which `Experiment.train` redraws its curve
# Settings of an experiment without a run file that replace the quickstart's mesh and optimizer.
WITHOUT_A_FILE = {f"mesh.{axis}": 1 for axis in AXES} | {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3}


# Forms of rules: a result of `Rules`, a dict of tables, a shipped name, a path, or the text of a rule file.
GivenRules = rule_files.Rules | Mapping[str, object] | str | Path
# Options of `python -m meshtrain.plan`, with _ for -.
PlanOptions = TypedDict("PlanOptions", {
    "seq_len": int, "global_batch": int, "data": int, "fsdp": int, "tensor": int, "stage": int, "context": int,
    "schedule": str, "chunks": int, "microbatches": int, "remat": str, "compute_dtype": str,
    "rules": Sequence[str] | str, "max_memory": float, "gpus_per_host": int, "tokens": float, "budget_hours": float,
    "assume": Sequence[str] | str, "verify": int}, total=False)


def Rules(text: str | Mapping[str, object]) -> rule_files.Rules:
    """Return checked rules from the text of a rule file or a dict of its tables. They are written to a temporary file,
    which is removed when the process ends. Raises: ConfigError.

    >>> mt.Rules('extends = "ddp"\\n[params]\\nembed = "fsdp"').mesh_axes("grads", "embed")
    ('fsdp',)
    >>> mt.Rules({"extends": "ddp", "params": {"embed": "fsdp"}}).mesh_axes("grads", "embed")
    ('fsdp',)
    """
    with config.user_errors():
        return rule_files.load(scratch.rule_file(text), "rules")


class Experiment:
    """A run on a mesh of simulated devices, or of this machine's devices (simulated_devices=0).

    run_file: a run file, whose keys settings and mesh override. Without one, the model is the quickstart's with adamw,
    on one device or on the given mesh. settings: keys of a run file, {"model.num_layers": 2} or {"model":
    {"num_layers": 2}}. rules: a shipped name, a path, the text of a rule file or a dict of its tables; default: those
    of the run file. mesh: sizes of axes; without a run file, other axes are 1. simulated_devices: number of simulated
    devices; default: the number of `simulate`, else 8.

    Devices start with the first method that computes. All experiments of a process share them; each uses as many as its
    mesh has. Raises: ConfigError.

    >>> run = mt.Experiment(mesh={"fsdp": 4}, settings={"model.num_layers": 2}, rules="zero3")
    >>> run.layout
    'fsdp=4, zero3'
    """

    def __init__(self, run_file: str | Path | None = None, settings: Mapping[str, object] | None = None,
                 rules: GivenRules | None = None, simulated_devices: int | None = None, *,
                 mesh: Mapping[str, int] | None = None):
        words = config.words({} if settings is None else settings)
        if mesh is not None:
            words += given.mesh_words(mesh, words)
        if rules is not None:
            if any(word.startswith("--sharding.rules=") for word in words):
                raise ConfigError("sharding.rules is given twice, in settings and as rules; give it once")
            words += config.words({"sharding.rules": scratch.rule_file(rules)})
        count = local_devices.num_simulated() if simulated_devices is None else simulated_devices
        first = [str(run_file)] if run_file else config.words(WITHOUT_A_FILE)
        self.run = run_files.load([*first, *words, *config.words({"mesh.simulated_devices": count})])
        self._state, self.history = None, shown.history([])

    def __repr__(self) -> str:
        return f"Experiment({self.run.run.name}: {self.layout})"

    @property
    def layout(self) -> str:
        """The mesh axes larger than 1 and the rule file's name."""
        count = self.run.mesh.simulated_devices
        run = config.on_devices(self.run, count) if count else self.run
        sizes = [f"{axis}={n}" for axis in AXES if (n := getattr(run.mesh, axis)) != 1]
        return ", ".join([" ".join(sizes) or "one device", Path(run.sharding.rules).stem])

    def inspect(self, topology: str | None = None) -> StepCosts:
        """Return memory, traffic and time of the compiled step. topology: GPUs to compile for, e.g. "h100:8".

        >>> run.inspect().memory_bytes["compiled"]["params"] < 2e6
        True
        """
        if topology is None:
            return StepCosts(self._inspected)
        if not isinstance(topology, str):
            raise ConfigError(f'topology={topology!r} is not a string; give a GPU and a number, e.g. "h100:8"')
        if self.run.mesh.simulated_devices:     # started first: else jax would start with one CPU device
            local_devices.start(self.run, cheaply=True)
        run = self.run.replace(mesh={"simulated_devices": 0})
        with given.reword_for_python():
            devices = topologies.find_devices(run, topology)
        return StepCosts(inspect_command.inspect_step(assembly.assemble(elastic.fit(run, len(devices))[0], devices)))

    def parameters(self) -> Rows:
        """Return a row for each parameter: name, shape, mesh axes that shard it when read and when stored, bytes per
        device.

        >>> [row["read"] for row in run.parameters() if row["name"] == "layers/mlp/up/kernel"]
        [[[], ['fsdp'], []]]
        """
        return Rows(summary.parameters(self.made), report.params_table(self.made))

    @property
    def made(self) -> assembly.Assembly:
        """The run assembled on its devices. Raises: ConfigError, also if jax already runs with other devices, or its
        settings were changed since."""
        local_devices.own_settings_told(os.environ)
        return self._made

    @functools.cached_property
    def _made(self) -> assembly.Assembly:
        all_devices = local_devices.start(self.run, cheaply=True)
        wanted = math.prod(getattr(self.run.mesh, axis) for axis in AXES)
        try:
            return assembly.assemble(self.run, all_devices[:wanted] if 0 < wanted < len(all_devices) else all_devices)
        except ConfigError as error:
            if wanted <= len(all_devices) or not self.run.mesh.simulated_devices:
                raise
            raise ConfigError(*error.messages, f"for {wanted} simulated devices restart the process (in a notebook: "
                                               f"the kernel) and begin with mt.simulate({wanted})") from None

    @property
    def state(self) -> State:
        """Weights, optimizer state and number of steps; initially the state that the run starts with. The property may
        be set to the state of an experiment with the same model and optimizer on any layout.

        >>> int(run.state.step)
        0
        """
        if self._state is None:
            step_costs.check_memory(self.made)
            with jax.set_mesh(self.made.mesh), config.user_errors():
                given = pretrained.open_folder(self.run, self.made.model)
                self._state = starts.with_weights(self.made, given, assembly.initialize(self.made))
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        shapes = self.made.state_shapes
        if jax.tree.map(given.form, state) != jax.tree.map(given.form, shapes):
            raise ConfigError("this state belongs to another model or optimizer; use the state of an experiment with "
                              "the same [model] and [optimizer]")
        self._state = jax.tree.map(lambda x, leaf: jax.device_put(np.asarray(x), leaf.sharding), state, shapes)

    def batch(self, n: int | None = None) -> dict[str, np.ndarray]:
        """Return batch n of the run's data: int32 arrays [B, T], see `data.documents.contracts`. n: the batch's number;
        default: that of the next step.

        >>> run.batch()["tokens"].shape == (run.run.data.global_batch, run.run.data.seq_len)
        True
        """
        done = int(self.state.step) if self._state else 0
        return self._batches.batch(done if n is None else given.check_count("n", n, 0))

    def step(self, n: int = 1, batch: Mapping[str, np.ndarray] | None = None) -> dict[str, float]:
        """Train n steps, and return the metrics of the last one. batch: used in every step; default: the run's data.

        >>> sorted(run.step())
        ['grad_norm', 'learning_rate', 'loss', 'skipped', 'tokens']
        """
        for _ in range(given.check_count("n", n)):
            self.history.append(self._advance(batch))
        self.history = shown.history(self.history)
        return {name: value for name, value in self.history[-1].items() if name not in ("step", "step_s")}

    def train(self, steps: int) -> None:
        """Train, and redraw the curve of the loss in a notebook meanwhile. The numbers are in `history`.

        >>> run.train(2)
        >>> run.history[-1]["step"] == int(run.state.step)
        True
        """
        screen, drawn_s = shown.display(self.history), time.monotonic()
        for n in range(given.check_count("steps", steps, 0)):
            self.step()
            if screen and (n == steps - 1 or time.monotonic() > drawn_s + DRAWN_EVERY_S):
                screen.update(self.history)
                drawn_s = time.monotonic()

    def loss(self, batch: Mapping[str, np.ndarray] | None = None) -> float:
        """Return the mean loss of a batch in nats per target token (DPO: per pair), without dropout. batch: default:
        that of the next step.

        >>> 5 < run.loss() < 8
        True
        """
        total, count = self._evaluate(self.state.params, self._place(batch))
        if not count:
            raise ConfigError("batch has no loss target, so it has no mean loss; give targets that are token ids")
        return float(total) / float(count)

    def gradients(self, batch: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Return the gradients of the next step, before clipping, as unsharded arrays by the names of `parameters`.
        They are those of `loss` with dropout, plus the step's other terms (z-loss, balance of experts, depths of MTP).

        >>> run.gradients()["layers/mlp/up/kernel"].shape
        (2, 192, 512)
        """
        state = self.state
        grads, *_ = self._gradients(state.params, self._place(batch), state.step, state.shares)
        named = [info.name for info in self.made.model.parameters() if info.trainable]
        return dict(zip(named, map(np.asarray, jax.tree.leaves(grads)), strict=True))

    def logits(self, tokens: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Return float32 logits [B, T, V] of the next token after each position of tokens [B, T].

        >>> run.logits([[1, 2, 3]]).shape
        (1, 3, 512)
        """
        tokens = given.check_tokens(tokens, self.run.model.vocab_size)
        with jax.set_mesh(self.made.mesh):
            return trained.wrap(self.made, self.state.params).scorer().logits(tokens)

    def generate(self, prompt: str | Sequence[int] = "", max_tokens: int = 50, temperature: float = 0.0,
                 seed: int = 0) -> str:
        """Return the text that continues a prompt. prompt: a text or token ids.

        >>> isinstance(run.generate("def ", max_tokens=4), str)
        True
        """
        prompt = given.check_prompt(prompt, self.run.model.vocab_size)
        max_tokens = given.check_count("max_tokens", max_tokens, 0)
        with config.user_errors():
            run, origin = self._with_documents_end
            reader, _ = sources.reader_of(run.data, vocab_size=run.model.vocab_size)
            stop_tokens = ends.of_run(run, origin)
        words = Words(reader.decode, stop_tokens.stops, stop_tokens.ids)
        ids = [reader.bos, *map(int, reader.encode([prompt])[0])] if isinstance(prompt, str) else prompt
        limits = GenerationLimits(max_tokens, words.stop_ids, self.run.data.seq_len, words.at_string)
        with jax.set_mesh(self.made.mesh):
            generator = trained.wrap(self.made, self.state.params).generator()
            (answer,) = generator.complete([ids], limits, Picking(temperature), seed)
        return words.text(answer.tokens)

    @functools.cached_property
    def _inspected(self) -> Inspected:
        return inspect_command.inspect_step(self.made)

    @functools.cached_property
    def _batches(self) -> contracts.Batches:
        return scratch.batches(self._with_documents_end[0], lambda: (self.made, self.state.params))

    @functools.cached_property
    def _with_documents_end(self) -> tuple[Run, Saved | None]:
        """The run with data.eos resolved from the weights that it starts from, as in `train`, and their checkpoint."""
        if not self.run.checkpoint.init_from:
            return self.run, None
        _, origin = self.made, resume.origin(self.run)      # checkpoints are read when jax has its devices
        with config.user_errors():
            return self.run.replace(data={"eos": ends.default(self.run, origin)[0]}), origin

    @functools.cached_property
    def _evaluate(self):
        program = self.made.program
        return program.compile_function(program.evaluate, self.made.state_shapes.params, program.step.rows)

    @functools.cached_property
    def _gradients(self):
        program, run, shapes = self.made.program, self.run, self.made.state_shapes

        def gradients(p, batch, step, shares):
            key = dropout_key(run.run.seed, step) if drops(run) else None
            return program.gradients(p, batch, key, shares)
        return program.compile_function(jax.jit(gradients), shapes.params, program.step.batch, shapes.step,
                                        shapes.shares)

    def _place(self, batch: Mapping[str, np.ndarray] | None) -> dict[str, jax.Array]:
        program = self.made.program
        if batch is None:
            return program.place(self.batch())
        made = program.step.objective.extra_fields
        expected = {name: array for name, array in program.step.batch.items() if name not in made}
        return program.place(given.check_batch(batch, expected, self.run.model.vocab_size))

    def _advance(self, batch: Mapping[str, np.ndarray] | None) -> dict[str, float]:
        placed, program, began = self._place(batch), self.made.program, time.perf_counter()
        self._state, metrics = self._inspected.executable(self.state, placed, *program.limit(math.inf))
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items() if np.ndim(x) == 0}
        return {"step": int(self.state.step)} | metrics | {"step_s": time.perf_counter() - began}


def compare(experiments: Sequence[Experiment] | Mapping[str, Experiment], steps: int = 2,
            topology: str | None = None) -> Rows:
    """Compare experiments: bytes that a device holds and sends, step time, loss after `steps` steps from the start.

    topology: GPUs to compile for; the time is then that of the roofline. Without it, the time is measured on the
    simulated devices and says nothing about GPUs. The state of the experiments does not change.

    >>> [row["name"] for row in mt.compare({"whole": run, "again": run}, steps=1)]
    ['whole', 'again']
    """
    given_ones = experiments.values() if isinstance(experiments, Mapping) else experiments
    if wrong := [one for one in given_ones if not isinstance(one, Experiment)]:
        raise ConfigError(f"{wrong[0]!r} is not an Experiment; write e.g. mt.compare({{\"a\": mt.Experiment(…)}})")
    rows, costs, named = [], {}, shown.name_all(experiments)
    steps = given.check_count("steps", steps)
    for name, one in named.items():
        kept, one._state, costs[name] = one._state, None, one.inspect(topology)
        try:
            passed = [one._advance(None) for _ in range(steps)]
        finally:
            one._state = kept
        rows.append(shown.comparison_row(name, one.layout, costs[name], passed))
    return shown.comparison(rows, costs, steps)


def inspect(step: Experiment | str | Path | Callable, *args, topology: str | None = None,
            mesh: functions.GivenMesh = None, options: functions.GivenOptions = None, tokens: int = 0,
            assume: Mapping[str, float] | None = None) -> ProgramCosts:
    """Return memory, traffic and time of a compiled step. step: an experiment, a run file, your own jitted function, or
    `make(mesh) -> (jitted, args)` for a function that names its mesh.

    args: the function's arguments: arrays, or ShapeDtypeStructs with a sharding. topology: GPUs to compile for,
    "h100:8"; default: the devices of this process. The others are for functions only. mesh: sizes of axes, or a mesh;
    default: that of the arguments. options: XLA options, or "meshtrain" for the options that meshtrain gives each of
    its programs; default: none. tokens: tokens of a step on all devices. assume: assumptions of the roofline, by name.
    Raises: ConfigError.

    >>> mt.inspect(run).sent_bytes["all-gather"] > 0
    True
    """
    if isinstance(step, (str, Path)):
        step = Experiment(step)
    if isinstance(step, Experiment):
        if args or mesh is not None or options is not None or tokens or assume:
            raise ConfigError("args, mesh, options, tokens and assume are for a function of jax.jit; an experiment has "
                              "its own")
        return step.inspect(topology)
    target = functions.Target(topology, mesh, options, tokens, assume or {})
    with given.reword_for_python():
        return shown.FunctionCosts(functions.inspect(step, args, target))


def plan(model: str | Path, gpus: int | Sequence[int], gpu: str, settings: Mapping[str, object] | None = None,
         **options: Unpack[PlanOptions]) -> Rows:
    """Return the layouts of a model that fit, the fastest first.

    model: a preset ("llama3-8b"), a run file, a model folder, or "hf://org/name" on the Hugging Face hub. gpus: number
    of GPUs; for several numbers, the result has the best plan for each. gpu: the type of GPU. options: those of `python
    -m meshtrain.plan`, with _ for -. Raises: ConfigError.

    >>> mt.plan("llama3-8b", gpus=8, gpu="h100", stage=1, context=1)[0]["fits"]
    True
    """
    counts = ",".join(map(str, gpus)) if isinstance(gpus, Sequence) and not isinstance(gpus, str) else gpus
    given_options = {"gpus": counts, "gpu": gpu, **options}
    if unknown := sorted({"html", "write"} & set(options)):
        raise ConfigError(f"{unknown[0]} is an option of the command line that writes a file; in "
                          f"Python, write the result of plan to a file yourself")
    with given.reword_for_python():
        read = plan_command.COMMAND.of([str(model)], given_options, config.words({} if settings is None else settings))
        return shown.show_plans(plan_command.make_plans(read))


def schedule(table: str, stages: int = 0, microbatches: int = 0, chunks: int = 1) -> DrawnSchedule:
    """Return a pipeline schedule by its name, or your own schedule table after a check. A table has a line per stage
    and a word per tick, see `parallel.pipeline.schedules.parse`. Raises: ConfigError.

    >>> print(mt.schedule("F0 F1 · B0 B1\\n· F0 F1+B0 B1"))
    table: 2 stages, 2 microbatches · bubble 33.3% · peak memory: activations of 2 microbatches on stage 0
    stage 0 F0 F1 ·  ·  B0 B1
    stage 1 ·  F0 F1 B0 B1 ·
    """
    written = "\n" in table or " " in table
    stages, microbatches = given.check_count("stages", stages, 0), given.check_count("microbatches", microbatches, 0)
    with config.user_errors():
        of = schedules.parse(table) if written else schedules.make(table, stages, microbatches, chunks)
    return DrawnSchedule(of, pipeline_times.simulate(of))


def prove(run_file: str | Path | Callable | None = None, settings: Any = None, axes: Any = None, *,
          rules: GivenRules | Sequence[GivenRules] = (), rows: Any = None, cells: int | None = None,
          model: Callable | None = None, parameters: Mapping[str, tuple] | None = None) -> JsonTable:
    """Test whether a run, a layer or a loss computes the same on every layout as on one device (docs/prove.md).

    A run: run_file, settings. A layer: model, a function (params, x_BTD) -> y_BTD; parameters, name -> (shape, logical
    axes). A loss: `mt.prove(loss, params, axes, rows=rows)`, see `library.proving.prove_loss`. rules: your own rules,
    see `Experiment`, or a list of them; default: the run's and the shipped ones. cells: maximum number of layouts.

    >>> mt.prove(model=lambda w, x: x @ w["out"], parameters={"out": ((32, 32), ("mlp", "embed"))}, cells=3)["failed"]
    False
    """
    cells = None if cells is None else given.check_count("cells", cells)
    chosen: Sequence[GivenRules] = [rules] if isinstance(rules, (str, Path, Mapping, rule_files.Rules)) else rules
    files = [scratch.rule_file(one) for one in chosen]
    if callable(run_file):
        return shown.show_proof(proving.prove_loss(run_file, settings, axes, rows, files, cells=cells))
    if axes is not None or rows is not None:
        raise ConfigError("prove: axes= and rows= are for a loss; for rule files write rules=[…]")
    devices = local_devices.start(run := Experiment(run_file, settings).run, cheaply=True)
    with given.reword_for_python():
        return shown.show_proof(parity.prove_layer(model, parameters or {}, files, devices, cells) if model else
                                parity.prove(run, files, devices, cells))
