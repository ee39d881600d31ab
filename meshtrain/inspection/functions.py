"""Compiles a jitted function of another project, for devices of this process or for GPUs that this machine need not
have, and reads its costs: `mt.inspect(step, *args)`.

The function may have any mesh, also one that it closes over if `make(mesh)` builds it. It is compiled without XLA
options of meshtrain, unless they are asked for. No formula covers such a function: all numbers come from the compiled
program.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import signature, unwrap
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from meshtrain import config, flags, hardware
from meshtrain.config import ConfigError
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.program import carried, compile as gpu_compile, traced
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.cost.program.roofline import Workload
from meshtrain.cost.program.sources import SourceFrame, line_of
from meshtrain.run import say
from meshtrain.units import shorten

PACKAGE = Path(__file__).resolve().parent.parent
OURS = "meshtrain"          # the value of `options` that stands for the options of `flags`
REPEATED = 1.01             # FLOPs of the program over those of the function beyond which work is repeated
# What jax says if a function that is compiled for other devices names a mesh of its own.
OTHER_DEVICES = re.compile("Received incompatible devices|should match the mesh passed to shard_map|"
                           "Memory kinds passed to jax.jit does not match")

GivenMesh: TypeAlias = Mapping[str, int] | Mesh | None
GivenOptions: TypeAlias = Mapping[str, bool | int | str] | str | None


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile for. topology: absent GPUs, "h100:8"; None: devices of this process. mesh: sizes of axes, or a
    mesh; None: the mesh of the arguments. options: XLA options, or OURS; None: none. tokens: tokens of a step on all
    devices. assume: values that replace assumptions of the roofline, by name."""
    topology: str | None = None
    mesh: GivenMesh = None
    options: GivenOptions = None
    tokens: int = 0
    assume: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among a function's arguments. local_shape: its shape on one device. copies: how many times all devices
    together hold it; None: the compiled program does not use it. whole_on: the mesh axes larger than 1 over which it is
    not split."""
    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    copies: float | None
    whole_on: tuple[str, ...]
    donated: bool


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A line of Python whose matmuls the devices compute `times` times. axes: the mesh axes that can be the reason,
    each entry sufficient; () if none is known."""
    line: str
    times: float
    axes: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class InspectedFunction:
    """A compiled function of another project, with lazily computed properties. options: XLA options. logged: XLA's log
    lines from the compilation."""
    name: str
    program: CompiledProgram
    traced: traced.TracedFlops
    arguments: tuple[Argument, ...]
    options: Mapping[str, object]
    logged: Sequence[str]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.program.mesh.shape)

    @cached_property
    def repeated(self) -> float | None:
        """The matmul FLOPs of all devices over those of the function; None without matmuls."""
        compiled = sum(self.program.audit.flops.values()) * self.program.mesh.size
        return compiled / self.traced.total if self.traced.total else None

    def names_of(self, dims: tuple[int, ...]) -> list[str]:
        """Return the names of the floating-point arguments that have these dims on one device, whole or without their
        first dimension (a layer of a stack)."""
        wanted = carried.bare(dims)
        return [one.name for one in self.arguments if "float" in one.dtype and len(wanted) > 1
                and wanted in (carried.bare(one.local_shape), carried.bare(one.local_shape[1:]))]

    @cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """The lines whose matmuls are repeated, the most FLOPs first; () where the function's FLOPs are a bound."""
        if self.repeated is None or self.repeated <= REPEATED or self.traced.bounds:
            return ()
        compiled: Counter[str] = Counter()
        for dot in self.program.audit.dots:
            compiled[dot.line] += dot.flops * self.program.mesh.size
        times = {line: count / self.traced.by_line[line] for line, count in compiled.most_common()
                 if self.traced.by_line[line]}
        split = {axis for argument in self.arguments if argument.copies is not None
                 for axis in self.sizes if axis not in argument.whole_on}
        return tuple(Repeat(line, each, explain_repeats(each, self.sizes, split))
                     for line, each in times.items() if each > REPEATED)


def explain_repeats(times: float, sizes: Mapping[str, int], split: set[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of mesh axes whose sizes multiply to `times`. If some of them split no argument, return only
    these. split: the axes that split an argument."""
    larger = [axis for axis, size in sizes.items() if size > 1]
    groups = [group for n in range(1, len(larger) + 1) for group in itertools.combinations(larger, n)
              if abs(math.prod(sizes[axis] for axis in group) - times) <= 0.01 * times]
    return tuple(group for group in groups if not set(group) & split) or tuple(groups)


# ---- compilation -----------------------------------------------------------------------------------------------------


def inspect(function: Callable, args: tuple, target: Target) -> InspectedFunction:
    """Compile a jitted function for its arguments, arrays or ShapeDtypeStructs; or what `make(mesh) -> (jitted, args)`
    returns for target.mesh, if the function is not jitted and there are no arguments.

    On a topology or another mesh, the arguments keep their PartitionSpecs. Raises: ConfigError for what cannot be
    compiled, and a mesh that is unknown or does not fit; gpu_compile.NotCompiledError if XLA cannot compile the
    program.
    """
    if not isinstance(target.topology, str | None):
        raise ConfigError(f'topology={target.topology!r} is not a string; give a GPU and a number, e.g. "h100:8"')
    if not isinstance(target.tokens, (int, np.integer)) or target.tokens < 0:
        raise ConfigError(f"tokens={target.tokens!r} is not a whole number of at least 0")
    if not isinstance(target.assume, Mapping) or not all(isinstance(n, (int, float)) for n in target.assume.values()):
        raise ConfigError(f"assume={shorten(target.assume)} is no dict of numbers; give e.g. "
                          f"{{\"matmul.sustained\": 0.75}}")
    with config.user_errors():
        Assumptions("", target.assume)      # before anything is compiled
    if hasattr(function, "trace"):
        return _inspect_jitted(function, args, target)
    if callable(function) and not args and target.mesh is not None:
        return _inspect_made(function, target)
    raise ConfigError("inspect takes an Experiment, a run file, a function that jax.jit returned with its arguments, "
                      "or make(mesh) -> (jitted, args) with mesh={...}; wrap a plain function: jax.jit(f)")


def _inspect_made(make: Callable, target: Target) -> InspectedFunction:
    mesh = _build_mesh(target.mesh, None, target.topology)
    made = make(mesh)
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "trace") and isinstance(made[1], tuple)):
        raise ConfigError(f"{_name(make)} returned {shorten(made)}; make(mesh) must return (jitted, args): a function "
                          f"of jax.jit, and the tuple of its arguments")
    own = _mesh_of(made[1])         # the arguments may be on a mesh of the same devices with further axes
    return _compile(made[0], made[1], own if isinstance(own, Mesh) else mesh, target)


def _inspect_jitted(function: Callable, args: tuple, target: Target) -> InspectedFunction:
    own = _mesh_of(args)
    if target.mesh is None and target.topology is None:
        return _compile(function, args, own if isinstance(own, Mesh) else None, target)
    mesh = _build_mesh(target.mesh or own, own, target.topology)
    return _compile(function, _place(args, mesh), mesh, target)


def _compile(function: Callable, args: tuple, mesh: Mesh | None, target: Target) -> InspectedFunction:
    """Compile a function whose arguments are already on the mesh. mesh: None if only the compiled program shows it."""
    logged: list[str] = []
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext(), say.without_noise(logged):
        try:
            staged = function.trace(*args)          # type: ignore[attr-defined]
            staged = getattr(staged, "traced", staged)      # nnx.jit wraps what jax.jit returns
            with gpu_compile.naming_faults(_name(function)):
                lowered = staged.lower()
        except ValueError as error:
            raise _explain(error, function, target) or error from None
        platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
        options = _options(target.options, platform, bool(target.topology))
        with gpu_compile.naming_faults(_name(function)):
            executable = lowered.compile(compiler_options=dict(options) or None)
    counted = traced.count(staged.jaxpr.jaxpr)
    dtype = hardware.dtype_name(max(counted.by_dtype, key=counted.by_dtype.__getitem__, default="bfloat16"))
    program = CompiledProgram(executable, mesh or _mesh_of_program(executable),
                              Workload(target.tokens, counted.total, dtype, packed=False), target.assume)
    arguments = _arguments(function, args, lowered, executable, program.mesh)
    return InspectedFunction(_name(function), program, counted, arguments, options, logged)


def _options(given: GivenOptions, platform: str, absent: bool) -> Mapping[str, bool | int | str]:
    if given == OURS:
        return flags.options(platform, {flags.DEVICELESS} if absent else set(), hardware.memory_share())
    if isinstance(given, str):
        raise ConfigError(f'options="{given}" is unknown; give a dict of XLA options, or "{OURS}" for those that '
                          f"meshtrain gives each of its programs")
    if not isinstance(given, Mapping | None):
        raise ConfigError(f'options={shorten(given)} is no dict; give XLA options, e.g. {{"xla_cpu_enable_fast_math": '
                          f'False}}, or "{OURS}"')
    return given or {}


def _explain(error: ValueError, function: Callable, target: Target) -> ConfigError | None:
    """Return the message for a function that names devices of its own; None for other errors, or without a topology or
    mesh."""
    if target.topology is None and target.mesh is None or not OTHER_DEVICES.search(str(error)):
        return None
    written = re.search(r" at (\S+?):(\d+)", str(error))
    frames = [SourceFrame(written[1], int(written[2]))] if written else [
        SourceFrame(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not Path(frame.filename).is_relative_to(PACKAGE)]
    where = line_of(frames) or "its in_shardings or out_shardings"
    return ConfigError(f"{_name(function)} names a mesh of its own at {where}, so it cannot be compiled for other "
                       f"devices; give make(mesh) -> (jitted, args) and mesh={{...}}, which calls make with the mesh "
                       f"of these devices, or write a bare PartitionSpec there")


# ---- meshes ----------------------------------------------------------------------------------------------------------


def _mesh_of(args: tuple) -> Mesh | AbstractMesh | None:
    """Return the mesh of the arguments, abstract if they name no devices, else the mesh of the context; None without a
    mesh. Raises: ConfigError for two meshes."""
    meshes: dict[tuple, Mesh | AbstractMesh] = {}
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            known = meshes.get(tuple(sharding.mesh.shape.items()))
            meshes[tuple(sharding.mesh.shape.items())] = known if isinstance(known, Mesh) else sharding.mesh
    if len(meshes) > 1:
        raise ConfigError(f"the arguments are on {len(meshes)} meshes, {', '.join(map(_words, map(dict, meshes)))}; "
                          f"place all of them on one")
    context = get_abstract_mesh()
    return next(iter(meshes.values()), None if context.empty else context)


def _build_mesh(given: GivenMesh | AbstractMesh, own: Mesh | AbstractMesh | None, topology: str | None) -> Mesh:
    """Return the mesh to compile for. given: sizes or a mesh, whose axes, kinds of axes and order of devices are kept.
    own: the mesh of the arguments; sizes take the kinds of axes from it. Raises: ConfigError."""
    if given is None:
        if not str(topology).endswith(":1"):
            raise ConfigError(f"the arguments are on no mesh, so every device of {topology} would do the same work; "
                              f'give arrays with a NamedSharding, mesh={{"data": N}}, or topology="h100:1"')
        given = {"device": 1}
    if not isinstance(given, Mapping) and not hasattr(given, "axis_types") or isinstance(given, Mapping) and not (
            given and all(isinstance(axis, str) and isinstance(n, (int, np.integer)) and n > 0
                          for axis, n in given.items())):
        raise ConfigError(f'mesh={given!r} is not a mesh; give sizes of axes, e.g. {{"data": 4, "model": 2}}, or a '
                          f"jax.sharding.Mesh")
    with config.user_errors():
        devices = gpu_compile.topology(topology) if topology else jax.devices()
    sizes = dict(given if isinstance(given, Mapping) else given.shape)
    count = math.prod(sizes.values())
    if count != len(devices) if topology else count > len(devices):
        raise ConfigError(f"the mesh {_words(sizes)} has {count} devices, and {topology or 'this process'} has "
                          f"{len(devices)}; " + (f'use topology="{topology.partition(":")[0]}:{count}" or other sizes, '
                                                 f"mesh={{...}}" if topology else "use topology=, or smaller sizes"))
    like = own if isinstance(given, Mapping) else given
    kinds = like.axis_types if like is not None and tuple(like.shape) == tuple(sizes) else (AxisType.Auto,) * len(sizes)
    order = np.arange(count)
    if isinstance(given, Mesh):
        order = np.argsort(np.argsort([device.id for device in given.devices.flat]))
    return Mesh(np.array(devices[:count])[order].reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def _mesh_of_program(executable: jax.stages.Compiled) -> Mesh:
    """Return the mesh of a program's arguments or results, else the mesh of its one device."""
    shardings = jax.tree.leaves([executable.input_shardings, executable.output_shardings])
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding) and isinstance(one.mesh, Mesh)]
    devices = {device for one in shardings for device in one.device_set}
    if not meshes and len(devices) > 1:
        raise ConfigError(f"the function runs on {len(devices)} devices, and no argument or result names their mesh; "
                          f"give mesh=")
    return meshes[0] if meshes else Mesh(np.array(list(devices) or jax.devices()[:1]), ("device",))


def _place(args: tuple, mesh: Mesh) -> tuple:
    """Return the arguments as shapes on a mesh, with their own PartitionSpecs. Arrays without a PartitionSpec are not
    split."""
    def place(leaf):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        named = {axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)}
        if unknown := sorted(map(str, named - set(mesh.shape))):
            raise ConfigError(f"an argument is split over {', '.join(unknown)}, and the mesh has the axes "
                              f"{', '.join(mesh.shape)}; name these axes in mesh=")
        kind = "pinned_host" if getattr(sharding, "memory_kind", None) == "pinned_host" else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)),
                                    sharding=NamedSharding(mesh, spec, memory_kind=kind))
    return jax.tree.map(place, args)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _arguments(function: Callable, args: tuple, lowered: jax.stages.Lowered, executable: jax.stages.Compiled,
               mesh: Mesh) -> tuple[Argument, ...]:
    infos, structure = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    shardings = structure.flatten_up_to(executable.input_shardings)     # None: the program does not read it
    given = [(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0] if hasattr(leaf, "shape")]
    try:
        names = list(signature(unwrap(function)).parameters)
    except (TypeError, ValueError):
        names = []

    def name(path) -> str:
        first = path[0].idx
        rest = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        return "/".join(filter(None, [names[first] if first < len(names) else str(first), rest]))
    # nnx.jit passes other trees on, usually with the same leaves
    alike = [leaf.shape for _, leaf in given] == [info.shape for _, info in infos]
    paths = [path for path, _ in given] if alike else [path[1:] for path, _ in infos]
    return tuple(_argument(name(path), info, sharding, mesh)
                 for path, (_, info), sharding in zip(paths, infos, shardings, strict=True))


def _argument(name: str, info, sharding, mesh: Mesh) -> Argument:
    whole = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    if isinstance(sharding, NamedSharding):
        named = {axis for entry in sharding.spec if entry for axis in ([entry] if isinstance(entry, str) else entry)}
        whole = tuple(axis for axis in whole if axis not in named)
    size = math.prod(info.shape)
    local = tuple(info.shape if sharding is None else sharding.shard_shape(info.shape))
    copies = None if sharding is None else math.prod(local) * mesh.size / size if size else 1.0
    return Argument(name, tuple(info.shape), local, str(info.dtype), size * info.dtype.itemsize, copies, whole,
                    info.donated)


# ---- words -----------------------------------------------------------------------------------------------------------


def _name(function: Callable) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _words(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {n}" for axis, n in sizes.items())
