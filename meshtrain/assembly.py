"""Puts a run's design on devices, and compiles its step, its evaluation and its initialization."""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import jax

from meshtrain import config, custom, design, flags, hardware
from meshtrain.cluster import agree, programs
from meshtrain.config import ConfigError, Run, named
from meshtrain.cost.program import audit, scheduling
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.design import Design
from meshtrain.run import say
from meshtrain.run.exits import RunError
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training import accumulate, state, step
from meshtrain.units import amount


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
    made = design.make(run, mesh_spec, device.platform, hardware.from_device_kind(device.device_kind), device)
    mesh, schedule = mesh_spec.build(devices), made.choice.schedule if made.choice else None
    spec = accumulate.step_spec(run, made.model, made.layout, mesh, made.engines, schedule)
    share = {} if device.platform == "cpu" else {"memory_share": hardware.memory_share()}
    return Assembly(**vars(made), mesh=mesh, program=step.build(spec, **share))


class BrokenProgramError(RunError):
    """A compiled program would compute wrong numbers without an error."""


def compile_step(made: Assembly, lowered: jax.stages.Lowered, refuse_broken: bool = True) -> jax.stages.Compiled:
    """Return the compiled training step of the run. All processes call it together. lowered: the result of
    `Program.lower_step`. Raises: as `check_program`, if refuse_broken; ConfigError for moments in the host memory of
    absent GPUs, if this jax lacks the private name.

    If much of the step waits for communication, the step is compiled again with a profile (see
    `cost.program.scheduling`), and the better of the two programs is returned.
    """
    if made.run.optimizer.offload and made.program.deviceless and (
            "mhlo.memory_kind" not in lowered.as_text().partition(" -> ")[0]):      # in the arguments of its function
        raise ConfigError(f"optimizer.offload=true: jax {jax.__version__} cannot compile moments in host memory for "
                          "GPUs that this machine does not have; use another version of jax, or leave it out")
    step = first = _compile(made, lowered)
    profile = agree.on_first(lambda: _profile(made, first))
    path = profile and programs.keep_profile(profile)
    if path and (options := flags.profile_options(path)):
        second = _compile(made, lowered, options)
        one, other = (CompiledProgram.of_run(made, executable) for executable in (first, second))
        step = second if agree.on_first(lambda: scheduling.is_better(other, one)) else first
    return check_program(made.mesh, "the training step", step) if refuse_broken else step


def _profile(made: Assembly, executable: jax.stages.Compiled) -> str:
    try:
        return scheduling.profile(CompiledProgram.of_run(made, executable))
    except Exception as error:      # a run must not fail because its step time cannot be predicted
        say.err(f"note: the step keeps XLA's own schedule, because its time cannot be predicted: {error!r}")
        return ""


def compile_evaluation(made: Assembly) -> Assembly:
    """Return the assembly with a compiled `evaluate`. Raises: as `check_program`."""
    program = made.program
    compiled = compile_function(made, "the evaluation", program.evaluate, made.state_shapes.params, program.step.rows)
    return dataclasses.replace(made, program=dataclasses.replace(program, evaluate=compiled))


def compile_function(made: Assembly, name: str, function: jax.stages.Wrapped, *args) -> jax.stages.Compiled:
    """Return a function compiled for these arguments (or ShapeDtypeStructs). name: the program's name, for the message.
    Raises: as `check_program`."""
    with blame_own_code(made.run):
        lowered = made.program.lower(function, *args)
    return check_program(made.mesh, name, _compile(made, lowered))


@contextlib.contextmanager
def blame_own_code(run: Run) -> Iterator[None]:
    """Turn an error that passed code of the run's own into a ConfigError with its key."""
    try:
        with custom.blame(named.values(run)):
            yield
    except custom.Misuse as error:
        raise ConfigError(str(error)) from error


def _compile(made: Assembly, lowered: jax.stages.Lowered, more: Mapping = MappingProxyType({})
             ) -> jax.stages.Compiled:
    """Return the compiled program, from the cache of an earlier start if possible. more: further XLA options."""
    return programs.compile(lowered, {**made.program.compiler_options, **more}, list(made.mesh.devices.flat))


def initialize(made: Assembly) -> state.State:
    """Compute the training state before the first step. Raises: as `check_program`."""
    return _run_once(made, "the initialization", made.program.initialize)


def initialize_params(made: Assembly) -> dict:
    """Compute only the weights before the first step. Raises: as `check_program`."""
    alone = jax.jit(lambda: made.program.initialize().params,
                    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, made.state_shapes.params))
    return _run_once(made, "the initialization of the weights", alone)


def _run_once(made: Assembly, name: str, function: jax.stages.Wrapped):
    """Compile and call a function without arguments. name: the program's name, for the message. Raises: as
    `check_program`."""
    lowered = made.program.lower(function)
    return check_program(made.mesh, name, lowered.compile(compiler_options=made.program.compiler_options))()


def may_refuse(mesh: jax.sharding.Mesh) -> bool:
    """Return whether `check_program` may refuse programs for these devices. If so, they are compiled before a run."""
    return mesh.devices.flat[0].platform != "cpu"


def check_program(mesh: jax.sharding.Mesh, name: str, executable: jax.stages.Compiled) -> jax.stages.Compiled:
    """Return the executable, unless it is known to compute wrong numbers. name: the program's name, for the message.

    Raises: BrokenProgramError if a collective-permute would leave devices with zeros, a fault of XLA on GPUs
    (openxla/xla 45218, 47083) that does not occur on CPUs.
    """
    if may_refuse(mesh) and (broken := audit.broken_permutes(executable.as_text(), mesh)):
        raise BrokenProgramError(
            f"XLA compiled {name} to {amount(len(broken), 'collective permute')} that leave devices with zeros, which "
            f"gives wrong numbers: {'; '.join(broken[:3])}; nothing was computed. Use another mesh or rule file, or "
            f"another version of jax")
    return executable
