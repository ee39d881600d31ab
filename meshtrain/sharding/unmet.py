"""Names and lines of a rule file that no parameter has. The layout would keep arrays whole that the file splits."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshtrain.sharding.logical import NAMES, nearest
from meshtrain.sharding.rules import Rules, Tensor


def find_unmet_names(rules: Rules, parameters: Sequence[Tensor]) -> list[str]:
    """Return a fault for each name of weights that [names] declares and no parameter has."""
    present = {logical for tensor in parameters for logical in tensor.axes if logical}
    return [f"{rules.path} [{NAMES}] {name}: no parameter has this axis{nearest(name, present)}; name a dim of a "
            f"parameter {name}, or remove the line" for name, kind in rules.declared.items()
            if kind != "activation" and name not in present]


def find_unmet_lines(rules: Rules, sizes: Mapping[str, int], parameters: Sequence[Tensor]) -> list[str]:
    """Return a fault for each mesh axis that a table gives to weights, but to no dim that a parameter has.

    Such a table shards nothing over the axis: if a model's names differ from the file's, ZeRO-3 is a replica on every
    device. Tables that inherit the lines are not reported again.
    """
    present = list(dict.fromkeys(logical for tensor in parameters for logical in tensor.axes if logical))
    faults: dict[str, str] = {}
    for table in ("params", "grads", "optimizer"):
        split = {axis for logical in present for axis in rules.mesh_axes(table, logical)}
        for axis, size in sizes.items():
            named = [logical for logical, axes in rules.tables[table].items() if axis in axes]
            if size > 1 and named and axis not in split:
                faults.setdefault(axis, (
                    f"{rules.path} [{table}] splits {' and '.join(named)} over {axis}, but no parameter has such a dim "
                    f"(yours have {', '.join(present) or 'none'}): nothing would be split over {axis} {size}; write "
                    f"e.g. {(present or named)[0]} = \"{axis}\" in [{table}], or name your dims {' or '.join(named)}"))
    return [*faults.values()]
