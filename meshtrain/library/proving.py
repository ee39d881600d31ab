"""Tests whether any loss computes the same on every layout as on one device: `mt.prove(loss, params, axes, …)`.

Layouts, tolerances and the comparison come from `parity`. One device differentiates the loss itself, by jax alone; each
layout uses `Layout.gradients`. A loss must be a sum over rows that do not depend on one another. This requirement is
also tested on one device, because equal rows would hide a violation.
"""
from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from meshtrain import config, parity
from meshtrain.config import ConfigError
from meshtrain.library import gradients
from meshtrain.library.axes import list_leaves
from meshtrain.library.layouts import Layout
from meshtrain.library.rows import count_rows
from meshtrain.library.stack import Stack, check_sums
from meshtrain.parallel.pipeline import schedules
from meshtrain.parity import cells as cells_of
from meshtrain.parity import proof
from meshtrain.sharding import rules as rule_files
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Tensor
from meshtrain.shipped import find_file
from meshtrain.training import accumulators

MICROBATCHES = 2


def prove_loss(loss: Callable, params: Any, axes: Any, rows: Any, rules: Sequence[str], *,
               cells: int | None) -> parity.Proof:
    """Compare the mean loss and its gradients on many layouts with those on one device.

    loss: a function loss(params, rows) -> (sum, count), or loss(params, rows, keys) with a key for each row, see
    `gradients`; or a `Stack`, which is also tested with stages; or make(layout) -> a loss, for a loss that constrains
    activations or splits sequences. params, axes: as for `Layout.place`. rows: a tree of arrays [B, …]. rules: rule
    files; empty: the shipped rule files that differ for these params. cells: largest number of layouts; None: all.
    Raises: ConfigError.
    """
    if rows is None:
        raise ConfigError("prove: a loss needs rows, arrays [B, …] that it takes; give rows=")
    began, devices = time.monotonic(), jax.devices()
    with config.user_errors():
        loaded = [rule_files.load(find_file(path)) for path in dict.fromkeys(rules or cells_of.list_shipped_rules())]
        num_rows = count_rows(rows)
    alone = Layout(loaded[0], {}, devices[:1])
    params, named = alone.name(params, axes)
    gradients.check_trained(params)
    is_made = not isinstance(loss, Stack) and _count_arguments(loss) == 1
    make = loss if is_made else (lambda layout: loss)
    # Only a loss that knows its layout can split sequences.
    dims = ("batch", "seq") if is_made else ("batch",)
    usable = ["data", "fsdp", "tensor"] + ["context"] * is_made + ["stage"] * isinstance(loss, Stack)
    distinct = cells_of.distinct(loaded, jax.tree.leaves(named, is_leaf=rule_files.is_axes))
    chosen = parity.choose_layouts(_list_tensors(params, named, rows, dims), distinct, len(devices), usable)
    chosen = [one for one in chosen if num_rows % one.num_shards(one.batch_axes) == 0][:cells]
    if not chosen:
        raise ConfigError("prove: no rule file splits these params and rows on these devices; see Layout.explain")
    of_one = make(alone)
    key = jax.random.key(0) if not isinstance(of_one, Stack) and _count_arguments(of_one) == 3 else None
    expected, findings = _on_one_device(of_one, params, rows, key)
    parity.check_finite(expected, "prove")
    names, results, notes = itertools.cycle(schedules.NAMES), [], []
    for inner in chosen:
        schedule = next(names) if inner.sizes["stage"] > 1 else ""
        try:
            layout = Layout(inner.rules, inner.sizes, devices[:math.prod(inner.sizes.values())])
            stored, placed = layout.place(params, axes), layout.batch(rows, *dims)
        except ConfigError as error:
            notes.append(f"{cells_of.rules_name(inner.rules.path)} on {MeshSpec(inner.sizes)} was not tested: {error}")
            continue
        compute = partial(_compute, make, layout, named, stored, placed, schedule, key)
        results.append(parity.compare_layout(inner, compute, expected, "loss", f" · {schedule}" * bool(schedule)))
    name = getattr(loss, "__name__", type(loss).__name__)
    return parity.Proof(name, None, len(devices), tuple(results), tuple(findings), tuple(notes),
                        time.monotonic() - began)


def _list_tensors(params: Any, named: Any, rows: Any, dims: tuple[str, ...]) -> list[Tensor]:
    """Return the weights in each table, and the rows. dims: the logical axes of the first dims of the rows."""
    of_leaves = jax.tree.leaves(named, is_leaf=rule_files.is_axes)
    tensors = [Tensor(table, name, np.shape(leaf), names) for table in ("params", "grads", "optimizer")
               for (name, leaf), names in zip(list_leaves(params).items(), of_leaves, strict=True)]
    return tensors + [Tensor("activations", f"rows {name}", np.shape(x), (*dims, *[None] * np.ndim(x))[:np.ndim(x)])
                      for name, x in list_leaves(rows).items()]


def _count_arguments(loss: Callable) -> int:
    """Return the number of arguments that must be given by position."""
    return sum(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
               for one in inspect.signature(loss).parameters.values())


def _on_one_device(loss: Callable, params: Any, rows: Any,
                   key: jax.Array | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return (the mean loss and its gradients by name, findings about the loss). key: see `gradients`. Raises:
    ValueError if the loss does not return (sum, count)."""
    numbers = np.arange(count_rows(rows), dtype=np.uint32)

    @jax.jit
    def add_up(params, rows, numbers):
        keys = () if key is None else (jax.vmap(jax.random.fold_in, (None, 0))(key, numbers),)
        return check_sums(loss(params, rows, *keys), "the loss")

    def mean(params):
        total, count = add_up(params, rows, numbers)
        return total / accumulators.divisor(count)
    device = jax.devices()[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        params, rows = jax.device_get((params, rows))
        value, grads = jax.value_and_grad(mean)(params)
        order = np.random.default_rng(0).permutation(count_rows(rows))
        halves = [order[:len(order) // 2], order[len(order) // 2:]]
        given = rows, numbers
        whole, moved, *parts = (np.array(jax.device_get(add_up(params, *jax.tree.map(lambda x: x[at], given))))
                                for at in (np.sort(order), order, *halves))
    remedy = "give a row's number in rows" if key is None else "draw by each row's own key, jax.vmap(draw)(keys)"
    findings, tolerance = [], proof.TOLERANCE.loss
    if not np.allclose(moved, whole, rtol=tolerance):
        findings.append(f"the loss of the same rows in another order is {_tell(moved)}, not {_tell(whole)}: it depends "
                        f"on the order of rows, which layouts change; {remedy}")
    if not np.allclose(sum(parts), moved, rtol=tolerance):
        findings.append(f"the losses of two halves of the rows add up to {_tell(sum(parts))}, not to {_tell(moved)} of "
                        f"all rows: the loss is a mean, or a row depends on other rows; return sums over rows and the "
                        f"count by which they are divided")
    return jax.device_get({"loss": value} | list_leaves(grads)), findings


def _tell(sums: np.ndarray) -> str:
    return "({:.6g}, {:.6g})".format(*sums)


def _compute(make: Callable, layout: Layout, named: Any, params: Any, rows: Any,
             schedule: str, key: jax.Array | None) -> dict[str, np.ndarray]:
    """Return the mean loss ("loss") and its gradients by name on a layout."""
    loss = make(layout)
    each = count_rows(rows) // layout.inner.num_shards(layout.inner.batch_axes)
    microbatches = MICROBATCHES if each % MICROBATCHES == 0 else 1
    stages, chunks = layout.spec.sizes["stage"], None
    if schedule in schedules.INTERLEAVED:
        num_layers = jax.tree.leaves(loss.divide(params)[1])[0].shape[0]
        chunks = 1 + (num_layers % (2 * stages) == 0 and microbatches % stages == 0)
    of_loss = layout.gradients(loss, named, microbatches, schedule=schedule or None, chunks=chunks)
    with jax.set_mesh(layout.mesh), jax.default_matmul_precision("highest"):
        value, grads = jax.jit(of_loss)(params, rows, key)
        return jax.device_get({"loss": value} | list_leaves(grads))
