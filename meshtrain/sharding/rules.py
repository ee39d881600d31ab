"""Rule files: a parallelism strategy as text, logical axes -> mesh axes, in four tables.

The tables are `[params]`, `[grads]` (inherits params), `[optimizer]` (inherits grads) and `[activations]`. Inheritance
is line by line: a line replaces the inherited one, and `embed = []` removes it. `extends = "ddp"` inherits the tables
of another file in the same way. So ZeRO-1 is ddp with `embed = ["data", "fsdp"]` in [optimizer], ZeRO-2 has this line
in [grads], ZeRO-3 in [params]. Megatron's sequence parallelism is `residual_seq = "tensor"`. Mesh axes of size 1 have
no effect, so a file may name all five. A fifth table, `[names]`, declares further logical axes. Mistakes that jax
accepts silently (a dim that does not divide, an axis that splits no work) are refused. This module knows no model and
no step.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, get_abstract_mesh

from meshtrain import files, shipped
from meshtrain.sharding import logical as logical_axes
from meshtrain.sharding.logical import LOGICAL, NAMES, REDUCE, REDUCE_DTYPES, nearest

TABLES = ("params", "grads", "optimizer", "activations")
GATHERED = "gathered"       # the state of a weight in a matmul, see `Layout`
NEVER_GATHERED = ("expert", "expert_mlp")      # tokens are dispatched to experts instead
EXTENDS, BOM = "extends", "\ufeff"      # BOM: some editors on Windows write it before the text
# A table without rules for expert axes shards the matrices of experts like other matrices.
AS_OTHERS = {"expert_embed": "embed", "expert_mlp": "mlp"}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The four tables of one rule file, with inheritance resolved: table -> logical axis -> mesh axes.

    text: an equivalent file without `extends`. names: the logical axes that its lines may name, and their kinds.
    reduce: the dtype in which gradients are summed over devices.
    """
    tables: Mapping[str, Mapping[str, tuple[str, ...]]]
    text: str
    path: str
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: LOGICAL)
    reduce: str = REDUCE_DTYPES[0]

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The dims that both weights and activations have."""
        return tuple(name for name, kind in self.names.items() if kind == "both")

    @property
    def declared(self) -> dict[str, str]:
        """The names in [names] and their kinds, including the names of the extended files."""
        return {name: kind for name, kind in self.names.items() if name not in LOGICAL}

    def mesh_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        named = self.tables[table]
        if logical is None:
            return ()
        if logical in AS_OTHERS and table != "activations" and not {"expert", *AS_OTHERS} & set(named):
            logical = AS_OTHERS[logical]
        return named.get(logical, ())


def load(path: str | Path, key: str = "sharding.rules") -> Rules:
    """Read and check a rule file. key: the run file's key that names the file.

    Raises: ValueError that lists every fault.
    """
    return parse(_read(Path(path), f"{key}: "), str(path))


def parse(text: str, path: str = "<rules>") -> Rules:
    """Check the text of a rule file. Raises: ValueError that lists every fault."""
    given, declared, reduce = _read_tables(text, Path(path), ())
    tables = {"activations": given["activations"]}
    for name, inherited in (("params", ""), ("grads", "params"), ("optimizer", "grads")):
        tables[name] = {**tables.get(inherited, {}), **given[name]}
    extends = EXTENDS in tomllib.loads(text.removeprefix(BOM))
    merged = _format_tables(given, declared, reduce, path) if extends else text
    return Rules(tables, merged, path, {**LOGICAL, **declared}, reduce)


def text_of(tables: Mapping[str, object]) -> str:
    """Return the text of a rule file for `parse`, from a dict such as {"extends": "ddp", "params": {"embed": "fsdp"}}.

    Raises: ValueError for values that a rule file cannot have.
    """
    faults: list[str] = []
    lines: list[str] = []
    for name, table in tables.items():
        if name == EXTENDS and isinstance(table, str):
            lines.insert(0, f"{EXTENDS} = {json.dumps(table)}")
        elif name == EXTENDS:
            faults.append(f'rules: {EXTENDS}={table!r}: must name one rule file, e.g. "ddp"')
        elif not isinstance(table, Mapping):
            faults.append(f"rules[{name!r}]={table!r} is not a dict; write e.g. {{'params': {{'embed': 'fsdp'}}}}")
        else:
            lines.append(f"[{json.dumps(str(name))}]")
            for logical, axes in table.items():
                axes = list(axes) if isinstance(axes, tuple) else axes
                if (name, logical) == ("grads", REDUCE) and (fault := logical_axes.find_dtype_fault(axes)):
                    faults.append(f"rules [{name}] {fault}")
                elif isinstance(axes, str) or isinstance(axes, list) and all(isinstance(axis, str) for axis in axes):
                    lines.append(f"{json.dumps(str(logical))} = {json.dumps(axes)}")
                else:
                    known = {logical: LOGICAL.get(logical, "both")}
                    wrong = (logical_axes.find_name_faults({logical: axes}, {}) if name == NAMES else
                             logical_axes.find_line_faults(name, logical, axes, known))
                    faults += [f"rules [{name}] {fault}" for fault in wrong]
    if faults:
        raise ValueError("\n".join(faults))
    return "\n".join(lines) + "\n"


def _read(path: Path, prefix: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{prefix}cannot read {path}: byte {error.start} is not UTF-8; a rule file is TOML in "
                         f"UTF-8") from None
    except (OSError, ValueError) as error:      # ValueError: a null character in the name
        known = shipped.names("sharding_rules") if isinstance(error, FileNotFoundError) else ()
        remedy = f"{nearest(path.stem, known)}; shipped are {', '.join(known)}" if known else ""
        raise ValueError(f"{prefix}cannot read {path}: {getattr(error, 'strerror', None) or error}{remedy}") from None


def _read_tables(text: str, path: Path, extending: tuple[Path, ...]
                 ) -> tuple[dict[str, dict[str, tuple[str, ...]]], dict[str, str], str]:
    """Return (the lines of all TABLES of a file, merged with those of the file that it extends; the names that they
    declare, with their kinds; the dtype in which gradients are sent).

    extending: the chain of files that extend this one. Raises: ValueError.
    """
    try:
        raw = tomllib.loads(text.removeprefix(BOM))
    except (ValueError, RecursionError) as error:  # bad TOML, numbers of thousands of digits, deep brackets
        quotes = "; put names in quotes, e.g. embed = \"fsdp\"" if "Invalid value" in str(error) else ""
        raise ValueError(f"{path}: not valid TOML: {error}{quotes}") from None
    base = raw.pop(EXTENDS, None)
    inherited: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in TABLES}
    names, reduce = dict[str, str](), REDUCE_DTYPES[0]
    if base is not None:        # first: the lines of this file may have its names
        base_path = _find_base(base, path, (*extending, path))
        inherited, names, reduce = _read_tables(_read(base_path, f"{path}: "), base_path, (*extending, path))
    faults = []
    for name, table in raw.items():
        if name not in (*TABLES, NAMES):
            faults.append(f"{path}: unknown table [{name}]{nearest(name, (*TABLES, NAMES, EXTENDS))}; the tables are "
                          f"{_brackets((*TABLES, NAMES))}")
        elif not isinstance(table, dict):
            content = "names" if name == NAMES else "rules"
            faults.append(f"{path}: {name} must be a table, write [{name}] and the {content} below it")
    own: dict = raw[NAMES] if isinstance(raw.get(NAMES), dict) else {}
    faults += [f"{path} [{NAMES}] {fault}" for fault in logical_axes.find_name_faults(own, names)]
    names = {**names, **own}
    known = {**LOGICAL, **names}
    if isinstance(raw.get("grads"), dict) and REDUCE in raw["grads"]:
        reduce = raw["grads"].pop(REDUCE)
        faults += [f"{path} [grads] {fault}"] if (fault := logical_axes.find_dtype_fault(reduce)) else []
    for name in TABLES:
        if isinstance(raw.get(name), dict):
            faults += [f"{path} [{name}] {fault}" for logical, axes in raw[name].items()
                       for fault in logical_axes.find_line_faults(name, logical, axes, known)]
    if faults:
        raise ValueError("\n".join(faults))
    given = {name: {k: (v,) if isinstance(v, str) else tuple(v) for k, v in raw.get(name, {}).items()}
             for name in TABLES}
    return {name: inherited[name] | given[name] for name in TABLES}, names, reduce


def _find_base(name, path: Path, extending: Sequence[Path]) -> Path:
    """Return the file that `path` extends: `name` in the same directory, or a shipped one.

    A file may extend the shipped file of its own name. Raises: ValueError.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f'{path}: {EXTENDS} = {name!r}: must name one rule file, e.g. {EXTENDS} = "ddp"')
    file = name if name.endswith(".toml") else f"{name}.toml"
    candidates = [path.parent / file, shipped.locate_shipped("sharding_rules") / file]
    present = [place for place in candidates if files.is_file(place)]
    for place in present:
        if not any(place.exists() and file.exists() and place.samefile(file) for file in extending):
            return place
    if present:
        raise ValueError(f"{path}: {EXTENDS} = {name!r} leads back to {present[0]}; a rule file cannot extend itself")
    known = shipped.names("sharding_rules")
    raise ValueError(f"{path}: {EXTENDS} = {name!r}: no such rule file{nearest(name, known)}; name a file in the same "
                     f"directory, or one of {', '.join(known)}")


def _format_tables(tables: Mapping[str, Mapping[str, Sequence[str]]], declared: Mapping[str, str], reduce: str,
                   path: str) -> str:
    def line(logical: str, axes: Sequence[str]) -> str:
        return f"{logical} = {json.dumps(axes[0] if len(axes) == 1 else axes)}"
    lines = {NAMES: {name: (kind,) for name, kind in declared.items()}, **tables}
    if reduce != REDUCE_DTYPES[0]:
        lines["grads"] = {REDUCE: (reduce,), **lines["grads"]}
    parts = ["\n".join([f"[{name}]", *(line(*entry) for entry in table.items())])
             for name, table in lines.items() if table]
    return "\n\n".join([f"# {path}, with all that it extends.", *parts]) + "\n"


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
    """Return messages about rules that do not fit these mesh sizes and tensors; empty if they fit.

    tensors: parameters in [params] or in all three tables, and activations. keys: logical axis -> the run file's key
    that sets its size, for the remedy. A fault of several tensors is reported once, for the first of them.
    """
    faults: dict = {}

    @functools.cache
    def split_by(table: str, logical: str) -> list[str]:
        return [a for a in rules.mesh_axes(table, logical) if sizes[a] > 1]
    # A parameter has the same faults in equal tables.
    of_weights = [rules.tables[name] for name in TABLES[:3]]
    repeated = {name for i, name in enumerate(TABLES[:3]) if of_weights[i] in of_weights[:i]}
    for tensor in tensors:
        if tensor.table in repeated:
            continue
        seen: dict[str, str] = {}
        for dim, logical in zip(tensor.shape, tensor.axes, strict=True):
            if logical is None or not (mesh_axes := split_by(tensor.table, logical)):
                continue
            for axis in mesh_axes:
                if axis in seen:
                    # [grads] and [optimizer] inherit the two rules from [params], so one message serves all three
                    both = frozenset((name, rules.mesh_axes(tensor.table, name)) for name in (seen[axis], logical))
                    faults.setdefault((tensor.table == "activations", axis, both), (
                        f"{_name(rules, tensor)}: mesh axis {axis!r} shards both {seen[axis]!r} and {logical!r}; "
                        f"remove one of the two rules or set mesh.{axis} to 1"))
                seen[axis] = logical
            num_shards = math.prod(sizes[a] for a in mesh_axes)
            if dim % num_shards:
                split = " × ".join(f"{a} {sizes[a]}" for a in mesh_axes)
                total = f" = {num_shards}" if len(mesh_axes) > 1 else ""
                key = (keys or {}).get(logical)
                faults.setdefault((logical, dim, split), (
                    f"{_name(rules, tensor)}: {logical}={dim} does not divide over {split}{total}; make "
                    f"{key or logical} a multiple of {num_shards}, e.g. {-(-dim // num_shards) * num_shards}, or use a "
                    f"mesh or rule file that splits it less"))
    return [*faults.values(), *_whole_activations(rules, sizes, tensors)]


def unsplit(layout: Layout, products: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Return (faults, notes) about mesh axes that do not split every matmul.

    An axis larger than 1 that splits none of a step's matmuls is a fault. An axis that splits only some gives a note.
    products: the weights that a step multiplies. An axis splits a matmul if it splits the tokens, or a dim of the
    weight that activations also have. An axis that splits only [params], [grads] or [optimizer] saves memory, but all
    devices along it repeat the same matmul. `stage` is skipped, because a pipeline splits the layers.
    """
    file, faults, notes = layout.rules.path, [], []
    split_by = _split_by(layout, products)
    for axis, size in layout.sizes.items():
        repeated = [name for name, axes in split_by.items() if axis not in axes]
        if size == 1 or axis == "stage" or not repeated:
            continue
        named = [table for table in TABLES if any(axis in axes for axes in layout.rules.tables[table].values())]
        if len(repeated) < len(split_by):
            names = ", ".join(repeated[:3]) + f" and {len(repeated) - 3} more" * (len(repeated) > 3)
            notes.append(f"layout: {file} does not split {names} over {axis} {size}: every device along it repeats "
                         f"that work")
        elif not named:
            faults.append(f"mesh.{axis}={size}, but no rule of {file} that applies to this model uses {axis!r}: every "
                          f"device along it would repeat the same work; set mesh.{axis} to 1 or use a rule file that "
                          f"names it")
        else:
            dim = "seq" if axis == "context" else "batch"
            line = ", ".join(f'"{name}"' for name in (*layout.rules.tables["activations"].get(dim, ()), axis))
            shared = [dim for dim in layout.rules.shared if any(dim in product.axes for product in products)]
            dims = "heads, kv_heads and mlp" if {"heads", "mlp"} & {*shared} or not shared else " and ".join(shared)
            remedy = (f'{dims} = "tensor" in [params] and [activations]' if axis == "tensor" else
                      f"{dim} = [{line}] in [activations]")
            faults.append(f"mesh.{axis}={size}: {file} names {axis!r} in {_brackets(named)}, where it splits no matmul "
                          f"of this model: every device along it would repeat the same work; write {remedy}, "
                          f"or set mesh.{axis} to 1")
    for logical in layout.rules.shared:
        activation_axes = [axis for axis in layout.mesh_axes("activations", logical)
                           if axis not in layout.mesh_axes("params", logical)]
        if activation_axes and any(logical in product.axes for product in products):
            notes.append(f"layout: {file} splits {logical} over {', '.join(activation_axes)} in [activations] but not "
                         f"in [params]: each device along it holds all of these weights, and their gradients are "
                         f"summed in every layer; write the same line in both tables")
    return faults, notes


def _split_by(layout: Layout, products: Sequence[Tensor]) -> dict[str, set[str]]:
    """Return, for each matmul by name, the mesh axes that split it."""
    def acts(*names: str) -> set[str]:
        return {axis for name in names for axis in layout.mesh_axes("activations", name)}
    tokens = set(layout.token_axes)
    has_heads = any("heads" in product.axes for product in products)
    axes_of = {"attention": tokens | acts("heads")} if has_heads else {}
    for product in products:
        axes_of[product.name] = tokens | acts(*(name for name in product.axes if name in layout.rules.shared))
        if "expert" in product.axes:
            axes_of[product.name] |= acts("residual_seq") | {
                a for name in NEVER_GATHERED for a in layout.mesh_axes("params", name)}
    return axes_of


def _whole_activations(rules: Rules, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> list[str]:
    """Return faults of dims that [params] splits and [activations] does not: XLA would gather projections' outputs."""
    def axes_in(table: str) -> set[str | None]:
        return {logical for tensor in tensors if tensor.table == table for logical in tensor.axes}
    tokens = rules.mesh_axes("activations", "batch") + rules.mesh_axes("activations", "seq")
    faults = []
    for logical in [name for name in rules.shared if name in axes_in("params") & axes_in("activations")]:
        split = [a for a in rules.mesh_axes("params", logical) if sizes[a] > 1 and a not in tokens]
        if missing := [axis for axis in split if axis not in rules.mesh_axes("activations", logical)]:
            line = ", ".join(f'"{axis}"' for axis in (*rules.tables["activations"].get(logical, ()), *missing))
            faults.append(f"{rules.path} [params] splits {logical} over {', '.join(missing)}, but [activations] does "
                          f"not: outputs of projections would be gathered, and every device along "
                          f"{', '.join(missing)} would repeat the work after them; write {logical} = [{line}] in "
                          f"[activations], or remove the axis from [params]")
    return faults


def _name(rules: Rules, tensor: Tensor) -> str:
    shape = ", ".join(f"{a or '·'}={n}" for a, n in zip(tensor.axes, tensor.shape))
    return f"{rules.path} [{tensor.table}] {tensor.name} [{shape}]"


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of custom_vjp
class Layout:
    """Rules on a mesh of given sizes: which mesh axes split each dim, and the sharding constraints that follow.

    A weight has these states in a step. All but GATHERED are names of tables:

      "optimizer"  stored between steps, float32, with the optimizer's state
      "params"     copy in the compute dtype, read by the loop over microbatches (`Transformer.as_read`)
      GATHERED     operand of a matmul: [params] without the axes that split tokens. ZeRO-3 gathers layer by layer; a
                   pipeline gathers a whole stage before its loop. Experts are not gathered: tokens are sent to them.
      "grads"      gradient accumulator over microbatches

    Axes of size 1 are dropped. Axes that are manual at the call (inside a shard_map) are dropped, too, so that model
    code runs there unchanged. tokens_first: activations given to `act` are [T, B, …], not [B, T, …].
    """
    rules: Rules
    sizes: Mapping[str, int]
    tokens_first: bool = False

    def mesh_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which XLA splits this dim here, without manual axes."""
        axes, manual = self.all_axes(table, logical), get_abstract_mesh().manual_axes
        return tuple(a for a in axes if a not in manual) if manual else axes

    def manual_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        """Return the manual axes that split this dim. Its size here is local; the caller must sum over these axes."""
        manual = get_abstract_mesh().manual_axes
        return tuple(a for a in self.all_axes(table, logical) if a in manual)

    def all_axes(self, table: str, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes that split this dim, manual or not. table: one of TABLES, or GATHERED."""
        key = table, logical
        if key not in self._all_axes:
            gathered = self.token_axes if table == GATHERED and logical not in NEVER_GATHERED else ()
            named = self.rules.mesh_axes("params" if table == GATHERED else table, logical)
            self._all_axes[key] = tuple(a for a in named if self.sizes[a] > 1 and a not in gathered)
        return self._all_axes[key]

    @functools.cached_property
    def _all_axes(self) -> dict[tuple[str, str | None], tuple[str, ...]]:
        return {}       # a cache: a search over layouts of 16,384 GPUs reads these a million times

    def spec(self, table: str, axes: Sequence[str | None], drop: Sequence[str] = ()) -> P:
        """Return the PartitionSpec of a tensor with these logical axes, without the mesh axes in `drop`."""
        return P(*(_entry([a for a in self.mesh_axes(table, logical) if a not in drop]) for logical in axes))

    def constrain(self, table: str, x: jax.Array, axes: Sequence[str | None], drop: Sequence[str] = ()) -> jax.Array:
        """Constrain `x` to its `spec`; GATHERED: all-gather a weight in [params]. Needs a mesh in context."""
        if all(n == 1 for n in self.sizes.values()):
            return x
        return jax.lax.with_sharding_constraint(x, self.spec(table, axes, drop))

    def act(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain an activation: `layout.act(q_BTNH, "batch", "seq", "heads", "head_dim")`."""
        return self.constrain("activations", x, self.in_order(*axes))

    def in_order(self, *axes: str | None) -> tuple[str | None, ...]:
        """Return the logical axes of an activation, given batch and seq first, in the order of its dims."""
        return (axes[1], axes[0], *axes[2:]) if self.tokens_first else axes

    @property
    def sequence_parallel(self) -> bool:
        """Whether the axes that split the residual stream's tokens differ from those inside attention and MLP."""
        return self.mesh_axes("activations", "residual_seq") != self.mesh_axes("activations", "seq")

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split a batch. Every weight gradient is summed over them."""
        return self.mesh_axes("activations", "batch")

    @functools.cached_property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch or the sequence, manual or not."""
        names = self.rules.mesh_axes("activations", "batch") + self.rules.mesh_axes("activations", "seq")
        return tuple(a for a in dict.fromkeys(names) if self.sizes[a] > 1)

    def find_deferred_axes(self, weights: Iterable[Sequence[str | None]]) -> tuple[str, ...]:
        """Return the batch axes over which gradients are reduced once a step instead of once a microbatch.

        These axes split neither these weights nor their gradients. weights: logical axes of the weights."""
        logical = {name for axes in weights for name in axes}
        split = {axis for table in ("params", "grads") for name in logical for axis in self.all_axes(table, name)}
        return tuple(axis for axis in self.batch_axes if axis not in split)

    def num_shards(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of shards of a dim that these mesh axes split."""
        return math.prod([self.sizes[axis] for axis in mesh_axes])      # a generator takes twice as long


def _entry(names: Sequence[str]):
    """Return one dim's entry in a PartitionSpec."""
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def shardings(layout: Layout, mesh: Mesh | AbstractMesh, table: str, axes_tree):
    """Return a tree of NamedShardings for a tree of logical-axes tuples."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, layout.spec(table, axes)), axes_tree, is_leaf=is_axes)


def is_axes(x) -> bool:
    """Return whether x is a leaf of a logical-axes tree: a plain tuple of names, unlike optax's empty states."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)
