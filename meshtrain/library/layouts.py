"""A mesh and a rule file for any tree of arrays: where each array is stored, and the constraints inside a step.

The placement of an array depends only on the logical axes of its dims. One ConfigError lists all mistakes of a tree,
including mistakes that jax accepts silently: an array of two or more dims without axes, a dim that does not divide
evenly, a mesh axis that splits no work, a line of the rule file that no parameter has. This module knows no model and
no step.
"""
from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, get_abstract_mesh

from meshtrain import config, shipped
from meshtrain.config import ConfigError
from meshtrain.inspection import report
from meshtrain.library import axes as axes_of
from meshtrain.library import gradients
from meshtrain.library.axes import Axes
from meshtrain.library.staged import GivenSchedule
from meshtrain.library.unpack import unpack
from meshtrain.names import AXES
from meshtrain.sharding import rules as rule_files
from meshtrain.sharding import states, unmet
from meshtrain.sharding.logical import KINDS, NAMES, OTHERS_AXES, nearest
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import GATHERED, Rules, Tensor
from meshtrain.shown import Rows
from meshtrain.units import size

GIANT = 1 << 20         # bytes from which `explain` names an array that a mesh axis does not split
WEIGHTS = ("params", "grads", "optimizer")


class TreeLayout:
    """`mt.Layout`: rules on a mesh, for any tree of arrays.

    rules: a shipped name, a path, the text of a rule file, a dict of its tables, or `mt.Rules`. mesh: sizes of axes;
    other axes have size 1, and one size may be -1 for the remaining devices. devices: the devices, all used; default:
    the devices of this process, of which the mesh may use only the first ones if there are no other processes. Raises:
    ConfigError.

    In the methods, params is a tree of arrays or ShapeDtypeStructs. axes is a tree like params with a tuple for each
    array (a name or None for each dim), or {"glob of a path": tuple}. If axes is None, params is a model whose metadata
    has the axes, see `unpack`.

    >>> layout = mt.Layout("zero3", mesh={"fsdp": 4, "tensor": 2})
    >>> layout
    Layout(zero3, fsdp 4 × tensor 2)
    >>> stored = layout.place({"up": np.ones((32, 64))}, {"up": ("embed", "mlp")})
    >>> stored["up"].sharding.spec == jax.P("fsdp", "tensor")
    True
    """

    def __init__(self, rules: Rules | Mapping[str, object] | str | Path, mesh: Mapping[str, int] | None = None,
                 devices: Sequence[jax.Device] | None = None):
        self.rules = load_rules(rules)
        self.spec = _size_mesh(mesh or {}, devices)
        self.inner = rule_files.Layout(self.rules, self.spec.sizes)
        self.mesh: Mesh = self.spec.build(jax.devices() if devices is None else devices)
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"Layout({Path(self.rules.path).stem}, {self.spec})"

    # ---- where arrays are stored -------------------------------------------------------------------------------------

    def place(self, params: Any, axes: Any = None) -> Any:
        """Return params stored as in [optimizer]: arrays on the devices, or ShapeDtypeStructs with shardings."""
        params, named = self.name(params, axes)
        shardings = rule_files.shardings(self.inner, self.mesh, "optimizer", named)
        return jax.tree.map(functools.partial(_put, jax.device_put), params, shardings)

    def shardings(self, params: Any, axes: Any = None, table: str = "optimizer") -> Any:
        """Return a tree of NamedShardings. table: "params", "grads" or "optimizer"."""
        if table not in WEIGHTS:
            raise ConfigError(f"table={table!r}: no table of weights has this name{nearest(str(table), WEIGHTS)}; use "
                              f"{', '.join(WEIGHTS)}")
        return rule_files.shardings(self.inner, self.mesh, table, self.name(params, axes)[1])

    def states(self, tx: optax.GradientTransformation, params: Any, axes: Any = None) -> Any:
        """Return the shardings of `tx.init(params)` as in [optimizer]. Each leaf has the axes of its parameter."""
        params, named = self.name(params, axes)
        with config.user_errors():
            found = states.state_axes(tx, jax.eval_shape(lambda: params), named)
        # mapped over the state first: it contains tuples itself
        return jax.tree.map(lambda _, one: self._sharding("optimizer", one), jax.eval_shape(tx.init, params), found)

    def batch(self, rows: Any, *names: str | None) -> Any:
        """Return host arrays [B, …] on the devices: rows split over the batch axes, the next dim over the axes of
        `seq`.

        Every process passes all rows, and puts its own rows on its devices. names: logical axes of the first dims;
        default: "batch" and "seq". ShapeDtypeStructs are returned with shardings. Raises: ConfigError.
        """
        names = names or ("batch", "seq")
        faults = self._find_unknown("batch", names)
        placed = {}
        for name, leaf in axes_of.list_leaves(rows).items() if not faults else ():
            if not np.ndim(leaf):
                faults.append(f"rows: {name or 'it'} has no dims; give arrays [B, …] with a row for each example")
                continue
            placed[name] = (*names, *[None] * np.ndim(leaf))[:np.ndim(leaf)]
            faults += rule_files.problems(self.rules, self.spec.sizes, [
                Tensor("activations", f"rows {name}".strip(), np.shape(leaf), placed[name])])
        if faults:
            raise ConfigError(*dict.fromkeys(faults))
        shardings = [self._sharding("activations", one) for one in placed.values()]
        leaves, tree = jax.tree.flatten(rows)
        return jax.tree.unflatten(tree, list(map(functools.partial(_put, _put_rows), leaves, shardings)))

    # ---- inside a step -----------------------------------------------------------------------------------------------

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Constrain an activation by [activations]: `layout.constrain(h_BTF, "batch", "seq", "mlp")`. Axes that are
        manual at the call (in a shard_map, in `gradients`, in a pipeline) have no effect."""
        faults = self._find_unknown("constrain", names) + axes_of.find_shape_faults({"constrain": x}, {
            "constrain": names})
        if not faults:
            sizes = {**self.spec.sizes, **dict.fromkeys(get_abstract_mesh().manual_axes, 1)}
            faults = rule_files.problems(self.rules, sizes, [Tensor("activations", "constrain", x.shape, tuple(names))])
        if faults:
            more = ["constrain: if a call initializes the model, call it with a number of rows that divides"] * (
                "batch" in names and any("does not divide" in fault for fault in faults))
            raise ConfigError(*faults, *more)
        return self._constrain(x, "activations", names)

    def gathered(self, weights: Any, axes: Any) -> Any:
        """Return weights as a matmul takes them: [params] without the axes that split tokens. If this is called inside
        a layer, ZeRO-3 gathers layer by layer. weights: an array or a tree. axes: as for `place`."""
        leaves = axes_of.list_leaves(weights)
        named = self._match(leaves, axes, "gathered")
        return jax.tree.unflatten(jax.tree.structure(weights), [
            self._constrain(leaf, GATHERED, named[name]) for name, leaf in leaves.items()])

    def gradients(self, loss: Callable, axes: Any, microbatches: int = 1, compute: str | None = None,
                  schedule: GivenSchedule | None = None, chunks: int | None = None) -> Callable:
        """Return f(params, rows, key=None) -> (mean loss, gradients stored as in [optimizer]), for a jitted step.

        loss: a function loss(params, rows) -> (sum, count) over its rows, or an `mt.Stack`, which supports stages with
        a schedule. f reduces over each batch axis as [grads] says: once a microbatch if [grads] splits over the axis,
        else once a step. See `library.gradients`.

        >>> layout, axes = mt.Layout("zero1", {"data": 4}), {"w": ("embed", None)}
        >>> f = layout.gradients(lambda p, rows: ((rows @ p["w"]).sum(), rows.shape[0]), axes)
        >>> mean, grads = jax.jit(f)(layout.place({"w": np.ones((8, 2))}, axes), np.ones((4, 8)))
        >>> float(mean), grads["w"].sharding.spec == jax.P("data", None)
        (16.0, True)
        """
        gradients.check_options(loss, microbatches, compute, chunks)
        made = gradients.choose_schedule(self.spec.sizes["stage"], loss, microbatches, schedule, chunks)

        def compute_gradients(params: Any, rows: Any, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
            named = self.name(params, axes)[1]
            gradients.check_trained(params)
            return gradients.gradients(self, loss, named, microbatches, compute, made)(params, rows, key)
        return compute_gradients

    def _constrain(self, x: jax.Array, table: str, names: Sequence[str | None]) -> jax.Array:
        if self.mesh.size == 1:
            return x
        context, spec = get_abstract_mesh(), self.inner.spec(table, names)
        if context.empty:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        if dict(context.shape) != dict(self.mesh.shape):
            raise ConfigError(f"the mesh in context has the axes {dict(context.shape)}, and this layout's has "
                              f"{dict(self.mesh.shape)}; use `with jax.set_mesh(layout.mesh):`")
        return jax.lax.with_sharding_constraint(x, spec)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def name(self, params: Any, axes: Any = None) -> tuple[Any, Any]:
        """Return (params, a tree of their axes), checked against rules and mesh. Warn once about each mesh axis that
        splits only some of the matmuls. Raises: ConfigError with every fault."""
        if axes is None:
            parts = unpack(params)
            params, axes = parts.params, parts.axes
        leaves = axes_of.list_leaves(params)
        named = self._match(leaves, axes, "")
        faults, notes = self._check(leaves, named)
        if faults:
            raise ConfigError(*dict.fromkeys(faults))
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                warnings.warn(note, stacklevel=3)
        return params, jax.tree.unflatten(jax.tree.structure(params), [named[name] for name in leaves])

    def _match(self, leaves: Mapping[str, Any], axes: Any, where: str) -> dict[str, Axes]:
        """Return the axes of every leaf. where: the call, for messages. Raises: ConfigError."""
        with config.user_errors():
            matched, faults = axes_of.match(leaves, axes)
        faults += axes_of.find_shape_faults(leaves, matched)
        kinds = {(axes_of.fold_layers(name or where), found): None for name, found in matched.items()}
        told: set[str | None] = set()
        for name, found in kinds:
            faults += self._find_unknown(name, [axis for axis in found if axis not in told], weights=True)
            told |= {*found} - {*self.rules.names}      # a name without a rule is one fault, not one an array
        if faults:
            raise ConfigError(*dict.fromkeys(f"{where}: {fault}" if where else fault for fault in faults))
        return {name: matched.get(name, (None,) * np.ndim(leaf)) for name, leaf in leaves.items()}

    def _find_unknown(self, where: str, names: Sequence[str | None], weights: bool = False) -> list[str]:
        """Return faults for names that no rule file knows, and for names of activations if `weights` is true."""
        known, faults = self.rules.names, []
        for name in names:
            if name is not None and name not in known:
                path = Path(self.rules.path)
                file = (f"a rule file of your own with extends = \"{path.stem}\"" if path.resolve() ==
                        shipped.locate_shipped(f"sharding_rules/{path.name}") else path)
                faults.append(f"{where}: no rule knows the axis {name!r}{nearest(str(name), known)}; declare it in "
                              f"[{NAMES}] of {file}, e.g. {name} = \"{KINDS[not weights]}\"")
            elif name is not None and weights and known[name] == "activation":
                faults.append(f"{where}: only activations have the axis {name!r}; give this dim another name, or None")
        return faults

    def _check(self, leaves: Mapping[str, Any], named: Mapping[str, Axes]) -> tuple[list[str], list[str]]:
        """Return (faults, notes) of rules, mesh and parameters. Leaves without axes are whole, and not checked."""
        of = {table: [Tensor(table, name, np.shape(leaf), named[name]) for name, leaf in leaves.items()]
              for table in WEIGHTS}
        products = [one for one in of["params"] if len({*one.axes} - {None, "layers"}) > 1]
        faults = rule_files.problems(self.rules, self.spec.sizes, [one for table in WEIGHTS for one in of[table]])
        faults += unmet.find_unmet_names(self.rules, of["params"])
        faults += unmet.find_unmet_lines(self.rules, self.spec.sizes, of["params"])
        if any("does not divide" in fault for fault in faults):
            faults += axes_of.find_sizes(leaves, named)
        idle, notes = rule_files.unsplit(self.inner, products)
        return faults + idle, notes

    # ---- telling -----------------------------------------------------------------------------------------------------

    def explain(self, params: Any, axes: Any = None, giant: int = GIANT) -> Rows:
        """Return a row for each array: name, shape, axes, the mesh axes that split each dim by table, bytes per device
        by table, and whole_on. whole_on: for an array of `giant` bytes or more, the mesh axes along which each device
        holds the same part.

        >>> mt.Layout("zero1", {"data": 4}).explain({"up": np.ones((32, 64))}, {"up": ("embed", "mlp")})[0]["bytes"]
        {'params': 16384, 'grads': 16384, 'optimizer': 4096}
        """
        params, named = self.name(params, axes)
        leaves, axes_by_name = axes_of.list_leaves(params), axes_of.list_leaves(named, rule_files.is_axes)
        notes = axes_of.find_sizes(leaves, axes_by_name)
        rows = []
        for name, leaf in leaves.items():
            one = axes_by_name[name]
            shape, itemsize = np.shape(leaf), np.dtype(leaf.dtype).itemsize
            split = {table: [list(self.inner.all_axes(table, axis)) for axis in one] for table in WEIGHTS}
            held = {table: math.prod(self._sharding(table, one).shard_shape(shape)) * itemsize for table in WEIGHTS}
            used = {axis for dims in split["optimizer"] for axis in dims}
            idle = [axis for axis in AXES if self.spec.sizes[axis] > 1 and axis not in used]
            rows.append({"name": name, "shape": list(shape), "axes": list(one), "split": split, "bytes": held,
                         "whole_on": idle if math.prod(shape) * itemsize >= giant else []})
        return Rows(rows, self._format(rows, notes))

    def _format(self, rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        """Return the table as text, with one line for equal layers of a list, and the notes."""
        header = "array", "logical axes", *(f"[{table}]" for table in WEIGHTS), "bytes per device"
        alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for row in rows:
            alike.setdefault((
                axes_of.fold_layers(row["name"]), " ".join(f"{axis or '·'}={n}" for axis, n in zip(
                    row["axes"], row["shape"])),
                *("(" + ", ".join("+".join(dim) or "·" for dim in row["split"][table]) + ")" for table in WEIGHTS),
                " / ".join(size(row["bytes"][table]) for table in WEIGHTS)), []).append(row)
        lines = [(f"{key[0]} × {len(same)}" if len(same) > 1 else same[0]["name"], *key[1:])
                 for key, same in alike.items()]
        totals = [size(sum(row["bytes"][table] for row in rows)) for table in WEIGHTS]
        total = "total", "", "", "", "", " / ".join(totals)
        giants = [f"note: {row['name']} ({size(row['bytes']['optimizer'])}) is the same on all devices along "
                  f"{', '.join(row['whole_on'])}; a line for one of its axes in [optimizer] would split it"
                  for row in rows if row["whole_on"]]
        sent = [f"gradients are reduced in {self.rules.reduce}, vectors in float32"] * (self.rules.reduce != "float32")
        return "\n".join([repr(self), report.columns([header, *lines, total]), *sent, *giants, *(
            f"note: {note}" for note in notes)])

    # ---- shardings ---------------------------------------------------------------------------------------------------

    def _sharding(self, table: str, names: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(self.mesh, self.inner.spec(table, names))


Layout = TreeLayout     # its name in `mt`; sharding.rules has a class Layout without devices


def load_rules(given: Rules | Mapping[str, object] | str | Path) -> Rules:
    """Return checked rules. given: rules, a shipped name, a path, a text or a dict of tables. Raises: ConfigError."""
    if isinstance(given, Rules):
        return given
    if not isinstance(given, (Mapping, str, Path)):
        raise ConfigError(f'rules={given!r} has the wrong type; give a shipped name ("zero3"), a path, the text of a '
                          f'rule file, or a dict, {{"params": {{"embed": "fsdp"}}}}')
    with config.user_errors():
        if isinstance(given, Mapping):
            return rule_files.parse(rule_files.text_of(given), "rules")
        if isinstance(given, str) and ("\n" in given or "=" in given):
            return rule_files.parse(given, "rules")
        return rule_files.load(shipped.rule_file(given), "rules")


def _size_mesh(mesh: Mapping[str, int], devices: Sequence[jax.Device] | None) -> MeshSpec:
    """Return the mesh of these sizes, with -1 replaced. Raises: ConfigError."""
    if not isinstance(mesh, Mapping):
        raise ConfigError(f'mesh={mesh!r} is not a dict; write e.g. mesh={{"fsdp": 8}}')
    hints = {axis: f" (did you mean {OTHERS_AXES[axis]!r}?)" if axis in OTHERS_AXES else nearest(str(axis), AXES)
             for axis in mesh if axis not in AXES}
    faults = [f"mesh has no axis {axis!r}{hint}; the axes are {', '.join(AXES)}" for axis, hint in hints.items()]
    faults += [f"mesh[{axis!r}]={n!r} is neither a whole number of at least 1 nor -1" for axis, n in mesh.items()
               if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 and n != -1]
    if [*mesh.values()].count(-1) > 1:
        faults.append(f"mesh={dict(mesh)}: only one axis may be -1")
    if faults:
        raise ConfigError(*faults)
    count = jax.device_count() if devices is None else len(devices)
    fixed = math.prod(n for n in mesh.values() if n != -1)
    spec = MeshSpec({axis: max(1, count // fixed) if n == -1 else int(n) for axis, n in mesh.items()})
    whole = devices is not None or jax.process_count() > 1 or -1 in mesh.values()
    if spec.num_devices > count or whole and spec.num_devices != count:
        raise ConfigError(f"mesh: {spec} is {spec.num_devices} devices, and there are {count}; give sizes whose "
                          f"product is {count}, or other devices")
    return spec


def _put(place: Callable, x: Any, sharding: NamedSharding) -> jax.Array | jax.ShapeDtypeStruct:
    """Return x on the devices, by place(x, sharding), or a ShapeDtypeStruct with the sharding. Raises: ConfigError."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    try:
        return place(x, sharding)
    except jax.errors.JaxRuntimeError as error:
        if "compile-only" not in str(error):
            raise
        raise ConfigError("the devices of this layout are absent and hold no arrays; give ShapeDtypeStructs, e.g. "
                          "jax.eval_shape(lambda: rows)") from None


def _put_rows(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, functools.partial(operator.getitem, x))
