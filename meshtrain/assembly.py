"""Builds mesh, layout, model and jitted training step from a run file."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax

from meshtrain import config, flags, hardware
from meshtrain.cluster import agree, programs
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import assumptions, footprint, price, rates, simulate
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.program import audit, scheduling
from meshtrain.inference import placement
from meshtrain.model import mlp, transformer
from meshtrain.names import AXES
from meshtrain.parallel.context import attention, recurrence
from meshtrain.parallel.experts import dispatch
from meshtrain.parallel.pipeline import stages
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.run import say
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout, Tensor
from meshtrain.shipped import rule_file
from meshtrain.training import accumulate, objective, state, step
from meshtrain.units import counted


@dataclasses.dataclass(frozen=True, eq=False)
class Design:
    """A checked run with the parts that need no devices: mesh, layout, model, attention, schedule."""
    run: Run
    mesh_spec: MeshSpec
    layout: Layout
    model: transformer.Transformer
    attend: Callable
    recurrence: recurrence.LinearAttention | None
    choice: simulate.Choice | None      # the pipeline's schedule; None without stages
    notes: tuple[str, ...]              # printed once for the user

    @functools.cached_property
    def placed(self) -> Placed:
        """The run's weights and layout as input of the cost formulas."""
        return place(self.model.parameters(), self.run.model, self.layout, self.mesh_spec)


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly(Design):
    """A design on devices; nothing is compiled or initialized yet."""
    mesh: jax.sharding.Mesh
    program: step.Program

    @property
    def state_shapes(self) -> state.State:
        """The training state as jax.ShapeDtypeStructs with shardings."""
        return self.program.step.state.abstract


def assemble(run: Run, devices: Sequence[jax.Device]) -> Assembly:
    """Build a run's mesh, layout and programs on these devices. Raises: ConfigError with every fault of mesh and rules.
    """
    run = config.on_devices(run, len(devices))
    mesh_spec, device = MeshSpec(config.mesh_sizes(run, len(devices)), run.mesh.placement), devices[0]
    gpu = hardware.from_device_kind(device.device_kind)
    if gpu is None:
        _check_float8(run, device.platform, device.device_kind, None, getattr(device, "compute_capability", None))
    made = design(run, mesh_spec, device.platform, gpu)
    mesh, schedule = mesh_spec.build(devices), made.choice and made.choice.schedule
    spec = accumulate.step_spec(run, made.model, made.layout, mesh, made.attend, made.recurrence, schedule)
    share = {} if device.platform == "cpu" else {"memory_share": hardware.memory_share()}
    return Assembly(**vars(made), mesh=mesh, program=step.build(spec, **share))


def design(run: Run, mesh_spec: MeshSpec, platform: str, gpu: hardware.Gpu | None) -> Design:
    """Check the layout and make the choices that the run leaves open. They are the same in all processes and restarts.

    platform: jax's name. gpu: the devices' row in the hardware table; None if it has none. Raises: as `assemble`.
    """
    sizes = mesh_spec.sizes
    if gpu is not None:
        _check_float8(run, platform, gpu.name, gpu)
    with config.user_errors():
        loaded = rules.load(run.sharding.rules)
        model = transformer.build(run.model, run.lora)
    layout, notes, faults = lay_out(run, sizes, loaded, model, platform, gpu)
    if faults:
        raise ConfigError(*faults)
    with config.user_errors():
        attend, note = attention.choose(run, layout, platform, gpu.name if gpu else "")
        fused = mlp.choose(run, layout, platform, gpu)
    choice = _choose_schedule(run, mesh_spec, model, layout, gpu) if sizes["stage"] > 1 else None
    if choice:
        notes = [f"pipeline: {choice.why}", *stages.notes(run, choice.schedule), *notes]
    for axis, section in (("stage", run.pipeline), ("context", run.context)):
        if sizes[axis] == 1 and section != type(section)():
            notes.append(f"mesh.{axis}=1: [{type(section).__name__.lower()}] is not used")
    linear = recurrence.choose(run, layout, platform, gpu.name if gpu else "")
    return Design(run, mesh_spec, layout, model, attend, linear, choice,
                  tuple(filter(None, [note, linear and linear.note, mlp.note(run, fused),
                                      dispatch.note(run, layout), *notes, *config.notes(run)])))


def refusals(run: Run, platform: str, gpu: hardware.Gpu | None) -> list[str]:
    """Return the reasons why the program refuses this run; empty if it accepts the run. No mesh axis may be -1.

    Runs the checks of loading a run file, then those of `design`. Raises: ConfigError for files that cannot be read.
    """
    if faults := config.problems(run):
        return faults
    with config.user_errors():
        loaded, model = rules.load(run.sharding.rules), transformer.build(run.model, run.lora)
    return lay_out(run, {axis: getattr(run.mesh, axis) for axis in AXES}, loaded, model, platform, gpu)[2]


def lay_out(run: Run, sizes, loaded: rules.Rules, model: transformer.Transformer, platform: str = "",
            gpu: hardware.Gpu | None = None) -> tuple[Layout, list[str], list[str]]:
    """Return (the layout that the rules give on a mesh of these sizes, notes for the user, reasons for refusing it).

    The run must have passed `config.problems`. platform: jax's name; "": unknown devices, for which attention engines
    and the sampler are not checked. gpu: see `design`.
    """
    fitted, notes = stages.fit(run, loaded, sizes, transformer.padded_vocab(run.model))
    fitted, shared = model.fit(fitted, sizes)
    layout = Layout(fitted, sizes)
    # Checks of context parallelism come first: a length that follows only the rules' remedy might be refused again.
    # Stages have their own checks, so the rules are checked with stage 1.
    faults = attention.problems(run, layout) + recurrence.problems(run, layout) + dispatch.problems(run, layout)
    faults = faults or stages.problems(run, loaded, sizes) + rules.problems(
        fitted, {**sizes, "stage": 1}, tensors(run, model, layout), config.SIZE_KEYS)
    idle, partly = rules.unsplit(Layout(loaded, sizes), model.products())
    if not objective.of_run(run).pipelined and sizes["stage"] > 1:
        faults = [f'mesh.stage={sizes["stage"]}: pipelines do not support training.objective='
                  f'"{run.training.objective}"; use mesh.stage=1', *faults]
    faults = faults + idle
    if platform and not faults:
        faults = _unserved(run, layout, model, platform, gpu)
    return layout, notes + shared + partly, faults


def _unserved(run: Run, layout: Layout, model: transformer.Transformer, platform: str, gpu: hardware.Gpu | None
              ) -> list[str]:
    """Return the reasons why the engines that the run names, or its sampler, do not support this layout on these
    devices; empty if they do. Installed packages are not checked."""
    def sampler() -> None:
        given = rules.load(rule_file(run.rl.rules), "rl.rules") if run.rl.rules else None
        if faults := dispatch.problems(run, placement.beside(model, layout, given)):
            raise ValueError("\n".join(faults))

    asked: list[Callable[[], object]] = [
        lambda: attention.engine_name(run, layout, gpu.name if gpu else "", platform),
        lambda: mlp.choose(run, layout, platform, gpu)]
    faults: list[str] = []
    for ask in asked + [sampler] * (objective.of_run(run).samples and not run.rl.lag):
        try:
            ask()
        except ValueError as refused:
            faults += str(refused).splitlines()
    return faults


def _check_float8(run: Run, platform: str, name: str, gpu: hardware.Gpu | None,
                  compute_capability: str | None = None) -> None:
    if run.model.matmul_dtype == "float8" and platform != "cpu" and hardware.lacks_float8(gpu, compute_capability):
        raise ConfigError(f'model.matmul_dtype="float8": {name} has no float8 matmuls (e4m3fn, e5m2), which NVIDIA '
                          f'GPUs have since H100; use model.matmul_dtype="auto", or other GPUs')


class BrokenProgramError(RuntimeError):
    """A compiled program would compute wrong numbers without an error."""


def compile_step(made: Assembly):
    """Return the compiled training step of the run. Raises: as `checked_program`."""
    return checked_program(made.mesh, "the training step", compile_unchecked(made))


def compile_unchecked(made: Assembly):
    """Compile the training step without the check of `checked_program`. All processes call it together.

    If much of the step waits for communication, it is compiled again with a profile (see `cost.program.scheduling`),
    and the better of the two programs is returned.
    """
    lowered = made.program.lowered()
    first = _compiled(made, lowered)
    profile = agree.on_first(lambda: _profile(made, first))
    path = profile and programs.kept_profile(profile)
    if not path or not (options := flags.profiled(path)):
        return first
    second = _compiled(made, lowered, options)
    return second if agree.on_first(lambda: scheduling.is_better(made, second, first)) else first


def _profile(made: Assembly, executable) -> str:
    try:
        return scheduling.profile(made, executable)
    except Exception as error:      # a run must not fail because its step time cannot be predicted
        say.err(f"note: the step keeps XLA's own schedule, because its time cannot be predicted: {error!r}")
        return ""


def compile_evaluation(made: Assembly) -> Assembly:
    """Return the assembly with a compiled `evaluate`. Raises: as `checked_program`."""
    program = made.program
    lowered = program.lower(program.evaluate, made.state_shapes.params, program.step.batch)
    return dataclasses.replace(made, program=dataclasses.replace(
        program, evaluate=checked_program(made.mesh, "the evaluation", _compiled(made, lowered))))


def _compiled(made: Assembly, lowered: jax.stages.Lowered, more: Mapping = MappingProxyType({})):
    """Return the compiled program, from the cache of an earlier start if possible. more: further XLA options."""
    return programs.compiled(lowered, made.program.compiler_options | more, list(made.mesh.devices.flat))


def initialize(made: Assembly) -> state.State:
    """Compute the training state before the first step. Raises: as `checked_program`."""
    return checked_program(made.mesh, "the initialization", made.program.compiled(made.program.initialize))()


def initialize_params(made: Assembly) -> dict:
    """Compute only the weights before the first step. Raises: as `checked_program`."""
    alone = jax.jit(lambda: made.program.initialize().params,
                    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, made.state_shapes.params))
    return checked_program(made.mesh, "the initialization of the weights", made.program.compiled(alone))()


def checked_program(mesh: jax.sharding.Mesh, name: str, executable):
    """Return the executable, unless it is known to compute wrong numbers. name: of the program, for the message.

    Raises: BrokenProgramError if a collective-permute would leave devices with zeros, a fault of XLA on GPUs
    (openxla/xla 45218, 47083) that does not occur on CPUs.
    """
    if mesh.devices.flat[0].platform != "cpu":
        if broken := audit.broken_permutes(executable.as_text(), mesh):
            raise BrokenProgramError(
                f"XLA compiled {name} to {counted(len(broken), 'collective permute')} that leave devices with "
                f"zeros, which gives wrong numbers: {'; '.join(broken[:3])}; nothing was computed. Use another mesh "
                f"or rule file, or another version of jax")
    return executable


def tensors(run: Run, model: transformer.Transformer, layout: Layout) -> list[Tensor]:
    """Return every tensor that the rules shard, with its full shape: parameters in three rule tables, and activations.
    """
    placed = [Tensor(table, info.name, info.shape, info.axes) for table in ("params", "grads", "optimizer")
              for info in model.parameters()]
    return placed + model.activations(run.data.global_batch // run.training.microbatches, run.data.seq_len, layout)


def _choose_schedule(run: Run, mesh_spec: MeshSpec, model, layout: Layout, gpu) -> simulate.Choice:
    """Return the pipeline schedule of the run, with its time and memory."""
    placed = place(model.parameters(), run.model, layout, mesh_spec)
    optimizer_bytes = state.optimizer_bytes(model, run.optimizer, run.training.steps)

    def held(schedule: Schedule) -> simulate.StepBytes:
        options = Options.of(run, gpu.name if gpu else "", schedule=schedule.name, chunks=schedule.num_chunks,
                             optimizer_bytes=optimizer_bytes)
        return simulate.StepBytes(round(footprint.slot_bytes(placed, options)),
                                  footprint.memory(placed, options)["total"])
    usable_bytes = hardware.usable_bytes(gpu) if gpu and gpu.hbm_bytes else None
    return simulate.of_run(run, _stage_costs(run, placed, gpu), mesh_spec.sizes["stage"], held, usable_bytes)


def _stage_costs(run: Run, placed: Placed, gpu) -> Callable[[Schedule], simulate.Costs]:
    """Return a function from a schedule to the costs of a stage's ops. assumption: if the devices' speed is unknown,
    ops have the relative costs of an H100, and memory-bound ops and links cost nothing."""
    known = gpu is not None and gpu.hbm_bytes_per_s is not None
    gpu = gpu if known else hardware.get("h100")
    rated = rates.Rates(gpu, assumptions.Assumptions(gpu.name))
    attended = rates.attended(run, placed.layout, rated.assumed)

    def of(schedule: Schedule) -> simulate.Costs:
        options = Options.of(run, gpu.name, schedule=schedule.name if known else "", chunks=schedule.num_chunks,
                             attended=attended)
        costs = price.stage_costs(placed, rated, options)
        return costs if known else dataclasses.replace(costs, link_s=0.0)
    return of
