"""Compares a user's own layer on many meshes and rule files with one device. The layer is a function that may use
collectives."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshtrain import config
from meshtrain.parity import cells as cells_of, compare, proof
from meshtrain.sharding import rules as rules_of
from meshtrain.sharding.logical import nearest
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.shipped import find_file

B, T, D = 8, 16, 32
X_AXES = ("batch", "seq", None)
HINTS = "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"
Declared = Mapping[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


@dataclasses.dataclass(frozen=True)
class _DrawnLayer:
    function: Callable
    parameters: Declared
    values: Mapping[str, np.ndarray]
    x_BTD: np.ndarray
    dy_BTD: np.ndarray

    def tensors(self) -> list[rules_of.Tensor]:
        weights = [rules_of.Tensor(table, name, tuple(shape), tuple(axes)) for table in ("params", "grads")
                   for name, (shape, axes) in self.parameters.items()]
        return [*weights, rules_of.Tensor("activations", "x", self.x_BTD.shape, X_AXES)]

    def compute(self, layout: rules_of.Layout, devices: Sequence[jax.Device]) -> dict[str, np.ndarray]:
        """Return y ("y") and the gradients of sum(y · dy) with respect to x ("x") and each parameter, by name. Weights
        are sharded by [params], gradients by [grads], x by batch and seq of [activations]."""
        mesh = MeshSpec(layout.sizes).build(devices)

        def place(table: str, axes: Sequence[str | None]) -> NamedSharding:
            return NamedSharding(mesh, layout.spec(table, axes))
        x_at = place("activations", X_AXES)
        weights_at, grads_at = ({name: place(table, axes) for name, (_, axes) in self.parameters.items()}
                                for table in ("params", "grads"))

        def step(w, x_BTD):
            y_BTD, back = jax.vjp(self.function, w, x_BTD)
            if y_BTD.shape != x_BTD.shape:
                raise config.ConfigError(f"the layer returns an array of shape {y_BTD.shape} for x of {x_BTD.shape}; "
                                         f"it must return one of x's shape, [B, T, D]")
            return y_BTD, *back(jnp.asarray(self.dy_BTD, y_BTD.dtype))
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            placed = jax.device_put((dict(self.values), self.x_BTD), (weights_at, x_at))
            y, dw, dx = jax.jit(step, out_shardings=(x_at, grads_at, x_at))(*placed)
        return jax.device_get({"y": y, "x": dx, **dw})


def prove_layer(function: Callable, parameters: Declared, rules: Sequence[str] = (),
                devices: Sequence[jax.Device] | None = None, cells: int | None = None) -> proof.Proof:
    """Compare function(params, x_BTD) -> y_BTD and its gradients with respect to params and x with those on one device.

    parameters: name -> (shape, logical axes of rule files). The function runs under `jax.set_mesh` with all five mesh
    axes, and may use shard_map and collectives over them. D is the size of the logical axis `embed`. rules: rule files;
    empty: the shipped ones. devices, cells: see `prove`. Raises: ConfigError.
    """
    began, devices = time.monotonic(), devices if devices is not None else jax.devices()
    with config.user_errors():
        loaded = [rules_of.load(find_file(path)) for path in dict.fromkeys(rules or cells_of.list_shipped_rules())]
    of_weights = {name for file in loaded for name, kind in file.names.items() if kind != "activation"}
    layer = _draw(function, parameters, of_weights)
    loaded = cells_of.distinct(loaded, [tuple(axes) for _, axes in parameters.values()])
    chosen = choose_layouts(layer.tensors(), loaded, len(devices))[:cells]
    if not chosen:
        raise config.ConfigError("no rule file splits this layer on these devices: give its parameters logical axes "
                                 f"that rule files name, e.g. {', '.join(HINTS)}")
    expected = layer.compute(rules_of.Layout(loaded[0], MeshSpec({}).sizes), devices)
    compare.check_finite(expected, "the layer")
    results = [compare_layout(layout, functools.partial(layer.compute, layout, devices), expected, "y")
               for layout in chosen]
    name = getattr(function, "__name__", "layer")
    return proof.Proof(name, None, len(devices), tuple(results), (), (), time.monotonic() - began)


def _draw(function: Callable, parameters: Declared, known: Collection[str]) -> _DrawnLayer:
    """Return the layer with random parameters, x and dy. known: logical axes of weights. Raises: ConfigError for
    others."""
    if wrong := [name for name, given in parameters.items() if not (
            isinstance(given, Sequence) and len(given) == 2 and all(isinstance(part, Sequence) for part in given))]:
        raise config.ConfigError(f"{wrong[0]}: {parameters[wrong[0]]!r} is not (shape, logical axes); write e.g. "
                                 f"{{{wrong[0]!r}: ((32, 64), (\"embed\", \"mlp\"))}}")
    faults = [f"{name}: shape {tuple(shape)} has {len(shape)} dims, but {tuple(axes)} names {len(axes)}"
              for name, (shape, axes) in parameters.items() if len(shape) != len(axes)]
    faults += [f"{name}: there is no logical axis {axis!r}{nearest(axis, known)}; use {', '.join(sorted(known))} or "
               f"None, or declare it in [names] of a rule file"
               for name, (_, axes) in parameters.items() for axis in axes if axis and axis not in known]
    if faults:
        raise config.ConfigError(*faults)
    width = next((n for shape, axes in parameters.values() for n, axis in zip(shape, axes) if axis == "embed"), D)
    rng = np.random.default_rng(0)

    def draw(shape: Sequence[int], scale: float) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)
    values = {name: draw(shape, 0.2) for name, (shape, _) in parameters.items()}
    return _DrawnLayer(function, parameters, values, draw((B, T, width), 1.0), draw((B, T, width), 1.0))


def choose_layouts(tensors: Sequence[rules_of.Tensor], loaded: Sequence[rules_of.Rules], num_devices: int,
                   axes: Sequence[str] = ("data", "fsdp", "tensor", "context")) -> list[rules_of.Layout]:
    """Return the layouts of the rule files that split the tensors differently, on meshes of these axes.

    The meshes have one axis, or three (with fewer than 8 devices: two). Every axis splits a tensor, or is `stage`.
    """
    together = [dict.fromkeys(some, 2) for some in itertools.combinations(axes, 3 if num_devices >= 8 else 2)]
    by_placement: dict[tuple, rules_of.Layout] = {}
    for sizes in [{axis: 2} for axis in axes] + together + [{axis: 4} for axis in axes]:
        spec = MeshSpec(sizes)
        for file in loaded if spec.num_devices <= num_devices else ():
            layout = rules_of.Layout(file, spec.sizes)
            placed = tuple(tuple(layout.all_axes(one.table, name) for name in one.axes) for one in tensors)
            split = {axis for one in placed for axes_of_dim in one for axis in axes_of_dim}
            if split | {"stage"} >= set(sizes) and not _find_faults(file, spec.sizes, tensors):
                by_placement.setdefault((tuple(sizes.items()), placed), layout)
    return list(by_placement.values())


def _find_faults(file: rules_of.Rules, sizes, tensors) -> list[str]:
    """Return the faults of `rules.problems` that a single layer can have: a dim that does not divide, and an axis that
    shards two dims. Its other faults compare [params] with [activations] between projections.
    """
    return [fault for fault in rules_of.problems(file, sizes, tensors) if "does not divide" in fault or "both" in fault]


def compare_layout(layout: rules_of.Layout, compute: Callable[[], Mapping[str, np.ndarray]],
                   expected: Mapping[str, np.ndarray], first: str, how: str = "") -> proof.CellResult:
    """Compare what `compute` returns with what one device computes. An exception counts as a difference.

    first: the key of the entry that is no gradient: "y", an output, or "loss". how: a text that is added to the title,
    e.g. a schedule.
    """
    began, tolerance = time.monotonic(), proof.TOLERANCE
    loss: float | None = None
    leaves: dict[str, float] = {}
    try:
        values = dict(compute())
        outputs, wanted = ({first: found[first]} for found in (values, expected))
        (loss,) = compare.leaf_differences(outputs, wanted, tolerance.floor).values()
        grads, wanted = ({name: x for name, x in found.items() if name != first} for found in (values, expected))
        leaves = {path.strip("[]'"): off for path, off in compare.leaf_differences(
            grads, wanted, tolerance.floor).items()}
        rows = [("the output", loss, tolerance.state) if first == "y" else (first, loss, tolerance.loss),
                *((f"gradient of {name}", off, tolerance.state) for name, off in leaves.items())]
        wrong = [f"{name}: {off:.1e}" for name, off, most in rows if not off <= most]
    except Exception as error:      # the user's function may raise anything
        wrong = [f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"]
    spec, name = MeshSpec(layout.sizes), cells_of.rules_name(layout.rules.path)
    settings: dict[str, object] = {f"mesh.{axis}": n for axis, n in layout.sizes.items() if n > 1}
    settings["sharding.rules"] = name
    losses = () if first == "y" or loss is None else (loss,)
    return proof.CellResult(f"{Path(name).stem} · {spec}{how}", settings, loss, None, leaves, losses, tuple(wrong),
                            time.monotonic() - began, None)
