"""Finds collectives in a compiled step that the sharding does not call for: weights all-gathered inside a loop, and
tensors that XLA fully replicates to reshard. Both give correct results and are slow. XLA reports the second only in its
log.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from meshtrain.assembly import Assembly
from meshtrain.cost.program import audit
from meshtrain.inspection import expect
from meshtrain.units import size

# XLA's log line if its partitioner can only replicate a tensor to change its sharding.
REPLICATED = re.compile(r"Involuntary full rematerialization.*?from sharding (\{.*?\}) to (\{.*?\}) efficiently "
                        r"for HLO operation %\S+ = (\w+\[[\d,]*\])")


def warnings(made: Assembly, program: audit.ProgramAudit, logged: Iterable[str]) -> list[str]:
    """Return a line for each unexpected collective. logged: XLA's log lines from the compilation of `program`."""
    return find_gathers_in_loops(made, program) + find_replicated(logged, expect.tensors(made))


def find_gathers_in_loops(made: Assembly, program: audit.ProgramAudit) -> list[str]:
    """Find all-gathers of a parameter in a loop, over axes of sequences or tokens that [params] does not name."""
    layout, named = made.layout, expect.tensors(made)
    infos = {info.name: info for info in made.model.parameters()}

    def axes_in_params(name: str) -> set[str]:
        """Return the axes over which each layer gathers a parameter by [params]; none in a pipeline's loop."""
        axes = infos[name].axes
        return set() if made.choice else {a for axis in axes for a in layout.mesh_axes("params", axis)}

    tokens = set(layout.token_axes)
    sent_bytes: Counter = Counter()
    for row in program.collectives:
        if row.kind != "all-gather" or row.trips == 1 or not set(row.axes) <= tokens:
            continue
        for dims in row.arrays:
            names = [name for name in named(dims) if infos[name].role not in ("norm", "bias")]
            if names and not any(set(row.axes) <= axes_in_params(name) for name in names):
                sent_bytes[" or ".join(names), row.axes, row.trips] += row.bytes // len(row.arrays)
    return [f"{name} is all-gathered over {' × '.join(axes)} {trips:,} times a step inside a loop, {size(sent)}: "
            f"[params] of {layout.rules.path} does not split it over them, so once per step would be enough"
            for (name, axes, trips), sent in sent_bytes.items()]


def find_replicated(logged: Iterable[str], named: Callable[[tuple[int, ...]], list[str]]) -> list[str]:
    """Find tensors that XLA replicates fully to reshard them. Equal log lines count once: a step that is compiled twice
    logs each twice. named: dims of an array -> the names of parameters that have them."""
    seen = set[str]()
    counts: Counter = Counter()
    for line in logged:
        if (match := REPLICATED.search(line)) and match.group() not in seen:
            seen.add(match.group())
            before, after, array = match.groups()
            source = re.search(r'op_name="([^"]*)"', line)
            dims = tuple(int(n) for n in re.findall(r"\d+", array.partition("[")[2]))
            where = ", ".join(named(dims)) or audit.short_source(source.group(1) if source else "")
            where = where or "an operation without a name"
            counts[f"{array} of {where}", before, after] += 1
    return [f"XLA replicates {what} on every device to change its sharding from {before} to {after}"
            + (f", {count} times in the program" if count > 1 else "")
            + "; a rule or constraint that gives both the same sharding avoids it"
            for (what, before, after), count in counts.items()]
