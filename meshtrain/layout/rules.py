"""A parallelism strategy as a text file: logical axes -> mesh axes, in four tables.

`[params]`, `[grads]` (inherits params), `[optimizer]` (inherits grads), `[activations]`. A table that stands in the file
replaces the inherited one whole. ZeRO-1 adds `embed = ["data", "fsdp"]` to [optimizer], ZeRO-2 to [grads], ZeRO-3 to
[params]; Megatron's sequence parallelism is `residual_seq = "tensor"`. Mistakes that jax would accept in silence (a
dimension that does not divide, an axis nobody uses) are refused at load. This module knows no model and no step.
"""
from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, get_abstract_mesh

from meshtrain.layout.mesh import pmax
from meshtrain.names import AXES

TABLES = ("params", "grads", "optimizer", "activations")
LOGICAL = ("batch", "seq", "residual_seq", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers", "expert",
           "expert_embed", "expert_mlp")
ACTIVATION_ONLY = ("batch", "seq", "residual_seq")
NEVER_GATHERED = ("expert", "expert_mlp")      # tokens are sent to experts
# A table that names no axis of experts treats their matrices like others.
AS_OTHERS = {"expert_embed": "embed", "expert_mlp": "mlp"}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The four tables of one rule file, inheritance resolved: table -> logical axis -> mesh axes."""
    tables: Mapping[str, Mapping[str, tuple[str, ...]]]
    text: str
    path: str

    def mesh_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        named = self.tables[table]
        if logical in AS_OTHERS and table != "activations" and not {"expert", *AS_OTHERS} & set(named):
            logical = AS_OTHERS[logical]
        return named.get(logical, ())


def load(path: str | Path) -> Rules:
    """Reads and checks a rule file. Raises: ValueError that lists every fault of the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:      # not there, not UTF-8, a name with a null
        raise ValueError(f"sharding.rules: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return parse(text, str(path))


def parse(text: str, path: str = "<rules>") -> Rules:
    """Checks the text of a rule file. Raises: ValueError that lists every fault."""
    try:
        raw = tomllib.loads(text.removeprefix("\ufeff"))       # Windows puts a byte order mark before it
    except (ValueError, RecursionError) as error:      # bad TOML, a number of thousands of digits, thousands of brackets
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    faults = []
    for name, table in raw.items():
        if name not in TABLES:
            faults.append(f"{path}: unknown table [{name}]{_nearest(name, TABLES)}; the tables are {_brackets(TABLES)}")
        elif not isinstance(table, dict):
            faults.append(f"{path}: {name} must be a table, write [{name}] and the rules below it")
        else:
            for logical, axes in table.items():
                faults += [f"{path} [{name}] {fault}" for fault in _entry_faults(name, logical, axes)]
    if faults:
        raise ValueError("\n".join(faults))
    tables = {name: {k: (v,) if isinstance(v, str) else tuple(v) for k, v in t.items()} for name, t in raw.items()}
    tables.setdefault("params", {})
    tables.setdefault("grads", tables["params"])
    tables.setdefault("optimizer", tables["grads"])
    tables.setdefault("activations", {})
    return Rules(tables, text, path)


def _entry_faults(table: str, logical: str, axes) -> list[str]:
    if logical not in LOGICAL:
        return [f"{logical}: unknown logical axis{_nearest(logical, LOGICAL)}; known: {', '.join(LOGICAL)}"]
    if table != "activations" and logical in ACTIVATION_ONLY:
        return [f"{logical}: only activations have this axis; move the line to [activations]"]
    axes = [axes] if isinstance(axes, str) else axes
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        return [f"{logical} = {axes!r}: must be a mesh axis or a list of them, e.g. \"tensor\" or [\"data\", \"fsdp\"]"]
    faults = [f"{logical}: unknown mesh axis {axis!r}{_nearest(axis, AXES)}; the axes are {', '.join(AXES)}"
              for axis in axes if axis not in AXES]
    faults += [f"{logical}: mesh axis {axis!r} stands twice; list it once" for axis in sorted(set(axes))
               if axes.count(axis) > 1]
    return faults


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _brackets(names: Iterable[str]) -> str:
    return " ".join(f"[{name}]" for name in names)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A named tensor for the checks: its table in the rules, shape and logical axes (None: never sharded)."""
    table: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def problems(rules: Rules, sizes: Mapping[str, int], tensors: Sequence[Tensor],
             keys: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with these rules on a mesh of these sizes for these tensors; empty if nothing is.

    keys: logical axis -> the run file's key that sets its size, for the remedy. A fault that several tensors share is
    told once, with the first of them.
    """
    faults, used = {}, set()
    for tensor in tensors:
        seen: dict[str, str] = {}
        for dim, logical in zip(tensor.shape, tensor.axes, strict=True):
            mesh_axes = [a for a in rules.mesh_axes(tensor.table, logical) if sizes[a] > 1]
            used |= set(_splits_work(rules, tensor.table, logical))
            where = f"{rules.path} [{tensor.table}] {tensor.name} {_shape(tensor)}"
            for axis in mesh_axes:
                if axis in seen:
                    faults.setdefault((tensor.table, axis, seen[axis], logical), (
                        f"{where}: mesh axis {axis!r} shards both {seen[axis]!r} and {logical!r}; "
                        f"drop one of the two rules or set mesh.{axis} to 1"))
                seen[axis] = logical
            ways = math.prod(sizes[a] for a in mesh_axes)
            if dim % ways:
                split = " × ".join(f"{a} {sizes[a]}" for a in mesh_axes)
                key = (keys or {}).get(logical)
                faults.setdefault((logical, dim, split), (
                    f"{where}: {logical}={dim} does not divide over {split} = {ways}; make {key or logical} a "
                    f"multiple of {ways}, e.g. {-(-dim // ways) * ways}, or take a mesh or rule file that splits it less"))
    for axis in AXES:
        if sizes[axis] > 1 and axis not in used:
            where = [table for table in TABLES if any(axis in axes for axes in rules.tables[table].values())]
            faults[axis] = _repeated(rules, axis, sizes[axis], where)
    return [*faults.values(), *_whole_activations(rules, sizes, tensors)]


def _splits_work(rules: Rules, table: str, logical: str | None) -> tuple[str, ...]:
    """The mesh axes over which devices share the work on this dim: of an activation, or of a weight as it is used. A weight that is
    gathered for its use, a gradient and an optimizer state are only stored in parts."""
    axes = rules.mesh_axes(table, logical)
    if table == "activations":
        return axes
    gathered = () if logical in NEVER_GATHERED else rules.mesh_axes("activations", "batch") + rules.mesh_axes("activations", "seq")
    return tuple(axis for axis in axes if axis not in gathered) if table == "params" else ()


def _repeated(rules: Rules, axis: str, size: int, named: list[str]) -> str:
    """The fault of a mesh axis that splits no work. named: the tables that name it."""
    repeat = "every device along it would repeat the same work"
    if not named:
        return (f"mesh.{axis}={size}, but no rule of {rules.path} that applies to this model uses {axis!r}: {repeat}; set mesh.{axis} "
                f"to 1 or take a rule file that names it")
    dim = "seq" if axis == "context" else "batch"
    line = ", ".join(f'"{name}"' for name in (*rules.tables["activations"].get(dim, ()), axis))
    return (f"mesh.{axis}={size}: {rules.path} names {axis!r} in {_brackets(named)}, where it splits neither an activation nor a weight "
            f"of this model as it is used: {repeat}; write {dim} = [{line}] in [activations], or set mesh.{axis} to 1")


def _whole_activations(rules: Rules, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> list[str]:
    """The faults of weights that are used in parts, where what they make is gathered at once for want of a line in [activations]."""
    of = lambda table: {logical for tensor in tensors if tensor.table == table for logical in tensor.axes}
    faults = []
    for logical in [name for name in ("heads", "kv_heads", "mlp") if name in of("params") & of("activations")]:
        split = [a for a in _splits_work(rules, "params", logical) if sizes[a] > 1]
        if missing := [axis for axis in split if axis not in rules.mesh_axes("activations", logical)]:
            line = ", ".join(f'"{axis}"' for axis in (*rules.tables["activations"].get(logical, ()), *missing))
            faults.append(f"{rules.path} [params] splits {logical} over {', '.join(missing)}, and [activations] does not: what the "
                          f"projections make would be gathered, and every device along {', '.join(missing)} repeat what follows; "
                          f"write {logical} = [{line}] in [activations], or take the axis out of [params]")
    return faults


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(f"{a or '·'}={n}" for a, n in zip(tensor.axes, tensor.shape)) + "]"


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of custom_vjp
class Layout:
    """Rules on a mesh of given sizes: what the model and the step ask for specs and constraints.

    Axes of size 1 vanish, and so do axes that are manual where the constraint stands (inside a shard_map), so that
    model code runs unchanged there.
    tokens_first: `act` is given activations [T, B, …] in place of [B, T, …].
    """
    rules: Rules
    sizes: Mapping[str, int]
    tokens_first: bool = False

    def mesh_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        manual = get_abstract_mesh().manual_axes
        return tuple(a for a in self.every_axis(table, logical) if a not in manual)

    def by_hand(self, table: str, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that split this dim and are manual here: its size is local, sums over it are the caller's."""
        manual = get_abstract_mesh().manual_axes
        return tuple(a for a in self.every_axis(table, logical) if a in manual)

    def every_axis(self, table: str, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that split this dim, whether they are manual here or not."""
        return tuple(a for a in self.rules.mesh_axes(table, logical) if self.sizes[a] > 1)

    def spec(self, table: str, axes: Sequence[str | None], drop: Sequence[str] = ()) -> P:
        """The PartitionSpec of a tensor with these logical axes; mesh axes in `drop` are left out."""
        return P(*(_entry([a for a in self.mesh_axes(table, logical) if a not in drop]) for logical in axes))

    def constrain(self, table: str, x: jax.Array, axes: Sequence[str | None], drop: Sequence[str] = ()) -> jax.Array:
        """`x` pinned to the layout that `table` gives tensors with these logical axes. Needs a mesh in context."""
        if all(n == 1 for n in self.sizes.values()):
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(table, axes, drop))

    def act(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x` pinned as an activation: `layout.act(q_BTNH, "batch", "seq", "heads", "head_dim")`."""
        return self.constrain("activations", x, (axes[1], axes[0], *axes[2:]) if self.tokens_first else axes)

    @property
    def splits_stream(self) -> bool:
        """Whether the residual stream has its tokens over more axes than what layers compute of it (sequence parallelism)."""
        return self.mesh_axes("activations", "residual_seq") != self.mesh_axes("activations", "seq")

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a batch is split (and with it the sum of every weight gradient)."""
        return self.mesh_axes("activations", "batch")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens, whether over the batch or over the sequence."""
        names = self.rules.mesh_axes("activations", "batch") + self.rules.mesh_axes("activations", "seq")
        return tuple(a for a in dict.fromkeys(names) if self.sizes[a] > 1)

    def over_tokens(self, largest: jax.Array) -> jax.Array:
        """The largest of a number over all devices that hold tokens, where it is one device's: over manual axes.

        Elsewhere it is already. An all-reduce of the number.
        """
        manual = tuple(a for a in self.token_axes if a in get_abstract_mesh().manual_axes)
        return pmax(largest, manual) if manual else largest

    def axes_in_use(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that still split this dim of a weight where it is used.

        Where [params] splits it over an axis that splits tokens as well, the weight is gathered (ZeRO-3); only experts stay
        on their devices, and tokens are sent to them.
        """
        gathered = () if logical in NEVER_GATHERED else self.token_axes
        return tuple(a for a in self.mesh_axes("params", logical) if a not in gathered)

    def spec_in_use(self, axes: Sequence[str | None]) -> P:
        """The PartitionSpec of a weight with these logical axes as it is used: as [params] has it, then gathered."""
        return P(*(_entry(self.axes_in_use(logical)) for logical in axes))

    def in_use(self, w: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """A weight, or its gradient, pinned to `spec_in_use`: an all-gather of a weight that lies as [params] has it."""
        if all(n == 1 for n in self.sizes.values()):
            return w
        return jax.lax.with_sharding_constraint(w, self.spec_in_use(axes))

    def ways(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in mesh_axes)


def _entry(names: Sequence[str]):
    """One dim's entry in a PartitionSpec."""
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def shardings(layout: Layout, mesh, table: str, axes_tree):
    """A tree of NamedShardings for a tree of logical-axes tuples."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, layout.spec(table, axes)), axes_tree, is_leaf=is_axes)


def is_axes(x) -> bool:
    """A leaf of a logical-axes tree: a plain tuple of names (optax's empty states are named tuples, and no leaves)."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)
