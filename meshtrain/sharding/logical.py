"""The logical axes: names of the dims of weights and activations, and the lines of rule files that place them.

LOGICAL has the names of the trainer's model. A rule file declares the names of another model in its table `[names]`."""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from meshtrain.names import AXES

NAMES = "names"             # the table of a rule file that declares names
REDUCE, REDUCE_DTYPES = "reduce", ("float32", "bfloat16")      # a line of [grads], and what it may say
# What a name may stand for. weight: a dim of weights that a matmul sums over, or of independent weights (layers). A
# line of [activations] may have it, too. activation: only activations have it. both: a dim of weights and of their
# outputs, so that a split of it in both splits the matmul.
KINDS = ("weight", "activation", "both")
LOGICAL: Mapping[str, str] = {
    "batch": "activation", "seq": "activation", "residual_seq": "activation", "embed": "weight", "heads": "both",
    "kv_heads": "both", "head_dim": "weight", "mlp": "both", "vocab": "both", "layers": "weight", "expert": "weight",
    "expert_embed": "weight", "expert_mlp": "weight"}

OTHERS_AXES = {"dp": "data", "tp": "tensor", "pp": "stage", "cp": "context"}     # words of other trainers, for messages


def find_name_faults(declared: Mapping[str, object], inherited: Mapping[str, str]) -> list[str]:
    """Return the faults of a table [names]. inherited: the names and kinds from the file that this file extends."""
    faults = []
    for name, kind in declared.items():
        if kind not in KINDS:
            near = nearest(kind, KINDS) if isinstance(kind, str) else ""
            faults.append(f'{name} = {kind!r} is not a kind{near}; write {name} = "weight" for a dim of weights, '
                          '"activation" for one of activations, "both" for one of weights and of their outputs')
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            faults.append(f"{name!r} is not a name for a dim; use letters, digits and _, e.g. state_dim")
        elif name in LOGICAL or name == REDUCE:
            kind = LOGICAL.get(name, "a line of [grads]")
            faults.append(f"{name}: every rule file has this name already ({kind}); remove the line")
        elif inherited.get(name, kind) != kind:
            faults.append(f"{name} = {kind!r}: the extended file declares it as {inherited[name]!r}; remove the line "
                          f"or choose another name")
    return faults


def find_line_faults(table: str, logical: str, axes: object, known: Mapping[str, str]) -> list[str]:
    """Return the faults of a line of a rule file. known: the names that the line may have, and their kinds."""
    if logical not in known:
        return [f"{logical}: unknown logical axis{nearest(logical, known)}; known: {', '.join(known)}; a rule file "
                f"declares others in [{NAMES}]"]
    if table != "activations" and known[logical] == "activation":
        return [f"{logical}: only activations have this axis; move the line to [activations]"]
    axes = [axes] if isinstance(axes, str) else axes
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        return [f"{logical} = {axes!r}: must be a mesh axis or a list of them, e.g. \"tensor\" or [\"data\", \"fsdp\"]"]
    faults = [f"{logical}: unknown mesh axis {axis!r}{_suggest(logical, axis)}; the axes are {', '.join(AXES)}"
              for axis in axes if axis not in AXES]
    faults += [f"{logical}: mesh axis {axis!r} is listed twice; list it once" for axis in sorted(set(axes))
               if axes.count(axis) > 1]
    return faults


def find_dtype_fault(dtype: object) -> str:
    """Return the fault of the line `reduce` in [grads], or ""."""
    if dtype in REDUCE_DTYPES:
        return ""
    return (f"{REDUCE} = {dtype!r} is not a dtype in which gradients are sent; write "
            + " or ".join(f'{REDUCE} = "{known}"' for known in REDUCE_DTYPES))


def _suggest(logical: str, axis: str) -> str:
    """Return a hint with the right name of the mesh axis if `axis` is misspelt or another trainer's word; else ""."""
    if axis.lower() in ("none", "null", ""):
        return f" (did you mean no axis? write {logical} = [])"
    if axis in OTHERS_AXES:
        return f" (did you mean {OTHERS_AXES[axis]!r}?)"
    if axis in ("ep", "expert", "experts", "expert_parallel"):
        return " (experts have no axis of their own; split them over data, fsdp or tensor)"
    return nearest(axis, AXES)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known name that is most similar to `name`; "" if no name is similar."""
    names = list(known)
    near = next(filter(None, (difflib.get_close_matches(word, names, 1, 0.7) for word in (name, name.lower()))), ())
    return f" (did you mean {near[0]!r}?)" if near else ""
