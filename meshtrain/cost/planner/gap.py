"""Explains why a requested layout is slower than the planner's best: subtracts the two cost breakdowns term by term.

The largest differences are reported with their causes: recomputation, the links that a collective uses, or time in
which the compute stream waits.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtrain.cost.formulas.sizes import GATHER, SCATTER
from meshtrain.cost.formulas.placed import RECOMPUTED
from meshtrain.cost.formulas.price import Links
from meshtrain.cost.planner.search import Answer, Plan, Question
from meshtrain.names import AXES
from meshtrain.units import amount, seconds

EXPLAINED, MOST = 0.8, 3        # stop at reasons for this fraction of the gap, or at this number of reasons


@dataclasses.dataclass(frozen=True, eq=False)
class Gap:
    """Compares a plan that has fixed sizes or options with the best plan that has nothing fixed.

    rank: 1 + the number of faster pairs of mesh and rule file; count: how many such pairs fit into memory. share: the
    plan's step time over the best plan's, minus 1. reasons: why the plan is slower, largest first; empty if no plan is
    faster.
    """
    fixed: Mapping[str, object]
    best: Plan
    rank: int
    count: int
    share: float
    reasons: tuple[str, ...]

    def as_json(self) -> dict:
        return {"fixed": dict(self.fixed), "best": self.best.as_json(), "rank": self.rank, "of": self.count,
                "behind": self.share, "reasons": list(self.reasons)}


def of(question: Question, plan: Plan, free: Answer) -> Gap:
    """Compare a plan with the best plan and explain the difference.

    question: the question with fixed sizes or options; plan: its best plan; free: the answer to the question with
    nothing fixed.
    """
    best = min([free.plans[0], plan] if free.plans else [plan], key=lambda one: one.price.step_s)
    share = plan.price.step_s / best.price.step_s - 1
    faster = sum(one.price.step_s < plan.price.step_s for one in free.plans)
    return Gap(question.fixed, best, 1 + faster, max(1, len(free.plans)), share,
                  tuple(reasons(question, plan, best)) if faster else ())


def reasons(question: Question, plan: Plan, best: Plan) -> list[str]:
    """List up to three reasons why `plan` is slower than `best`, each with its seconds. Stop when they cover 80% of the
    gap."""
    mine, other = _losses_s(plan), _losses_s(best)
    lost = sorted(((mine[name] - other.get(name, 0.0), name) for name in mine), reverse=True)
    lines, explained, distance = [], 0.0, plan.price.step_s - best.price.step_s
    for more, name in lost[:MOST]:
        if more <= 0 or explained >= EXPLAINED * distance:
            break
        explained += more
        lines.append(f"{_cause(question, plan, best, name)} ({seconds(more)} more than the best)")
    return lines


def link(question: Question, plan: Plan, axes: tuple[str, ...]) -> str:
    """Return which links (NVLink or NICs) the collectives over these axes use, as text for a message."""
    of = Links(question.rated, plan.placed.mesh).group(axes)
    if of.domains == 1:
        return "over NVLink"
    return f"{amount(of.per_domain, 'NIC')} on each of {of.domains:,} hosts"


def _losses_s(plan: Plan) -> dict[str, float]:
    """Return seconds of a step by name: kinds of compute, exposed collectives, bubble, update. Recomputation is
    subtracted from its kinds and has its own name."""
    one, again = plan.price, RECOMPUTED[plan.options.remat]
    # Matmuls: the backward is twice the forward, its recomputation once more. Others: the forward is two in seven.
    repeated = {"matmul": again.products / (3 + again.products),
                "attention": again.attention * 2 / (7 + 2 * again.attention),
                "recurrence": again.attention / (3 + again.attention),
                "elementwise": again.elementwise * 2 / (5 + 2 * again.elementwise)}
    if plan.sizes["context"] > 1:       # context parallelism never recomputes attention
        repeated["attention"] = repeated["recurrence"] = 0.0
    repeated_s = {name: one.parts[name] * share for name, share in repeated.items() if name in one.parts}
    return {**{name: one.parts[name] - repeated_s.get(name, 0.0) for name in one.parts},
            "recomputed": sum(repeated_s.values()), **one.exposed, "bubble": one.bubble_s, "update": one.update_s}


def _cause(question: Question, plan: Plan, best: Plan, name: str) -> str:
    sizes, options = plan.sizes, plan.options
    axes = tuple(a for a in AXES if sizes[a] > 1)
    if name == "recomputed":
        return (f"remat {options.remat} recomputes the forward; the best plan has memory for remat "
                f"{best.options.remat}")
    if name == "tensor":
        each, products = plan.price.exposed["tensor"] / _runs(plan), 3 * _products_s(question, plan)
        return (f"tensor {sizes['tensor']}: a layer's collectives take {_ms(each)} and do not overlap with its "
                f"{_ms(products)} of matmuls, {_runs(plan):,.0f} times a step; {link(question, plan, ('tensor',))}")
    if name == "fsdp":
        gathered, scattered = plan.placed.moving(GATHER, "layers"), plan.placed.moving(SCATTER, "layers")
        over = tuple(a for a in axes if any(a in group_axes for group_axes in gathered or scattered))
        gather_s = _each_s(question, plan, gathered, "all-gather")
        reduce_s = _each_s(question, plan, scattered, "reduce-scatter")
        forward_s, runs = _products_s(question, plan), _runs(plan)
        what = [f"a layer's gradients take {_ms(reduce_s)} to reduce"]
        if gathered:
            what = [f"a layer's weights take {_ms(gather_s)} to gather during {_ms(forward_s)} of forward "
                    "matmuls",
                    f"its gradients {_ms(reduce_s)} to reduce"]
        slowed = question.rated.assumed["link.contend"] if gather_s < forward_s else 0
        slows = f"; hidden collectives slow the matmuls by {slowed:.0%} of the collectives' time" if slowed else ""
        return (f"{_format_sizes(plan, over)}: {link(question, plan, over)} for each group; {' and '.join(what)} "
                f"during {_ms(2 * forward_s)} of backward matmuls, {runs:,.0f} times a step{slows}")
    if name == "context":
        waits_s = plan.price.exposed[name] / _runs(plan)
        return (f"context {sizes['context']} by {options.method}: a layer waits {_ms(waits_s)} for keys and values, "
                f"{_runs(plan):,.0f} times a step; {link(question, plan, ('context',))}")
    if name == "bubble":
        return (f"stage {sizes['stage']}: {options.schedule} of {amount(options.microbatches, 'microbatch')} in "
                f"{amount(options.chunks, 'chunk')} leaves {plan.price.bubble:.0%} of the step idle")
    if name == "offload":
        return "remat offload: copying layers' inputs to the host and back takes longer than the layers' compute"
    if name == "scales":
        return f"float8: all-reduces of the largest values for the scales, in {_runs(plan):,.0f} layers a step"
    if name == "stage":
        return f"stage {sizes['stage']}: activations are sent between stages, {link(question, plan, ('stage',))}"
    if name == "once a step":
        over = tuple(a for a in axes if a in ("data", "fsdp", "context"))
        return (f"gradients and new weights are exchanged once a step over {_format_sizes(plan, over)}, "
                f"{link(question, plan, over)}")
    if name in ("matmul", "attention", "recurrence", "elementwise"):
        return (f"{name} is less efficient: {_tokens(plan):,.0f} tokens of a microbatch on a GPU, the best plan "
                f"{_tokens(best):,.0f}; tensor {sizes['tensor']}, the best plan {best.sizes['tensor']}")
    if name == "teacher":
        return "the forward of the teacher takes longer in this layout"
    return "the optimizer's update: its states are sharded over fewer GPUs" if name == "update" else f"exposed {name}"


# ---- one layer and microbatch ----------------------------------------------------------------------------------------


def _tokens(plan: Plan) -> float:
    return plan.placed.tokens(plan.options)


def _runs(plan: Plan) -> float:
    """Return how often one device passes through a layer in a step."""
    return plan.options.microbatches * plan.placed.layers(plan.options)


def _products_s(question: Question, plan: Plan) -> float:
    """Return the seconds of one layer's forward matmuls for one microbatch."""
    return sum(question.rated.product_s(_tokens(plan), w.n, w.k, question.cfg.compute_dtype, plan.placed.itemsize)
               for w in plan.placed.layer.products)


def _each_s(question: Question, plan: Plan, elements: Mapping[tuple[str, ...], float], kind: str) -> float:
    """Return the seconds to all-gather one layer's weights, or to reduce-scatter its gradients."""
    read = 4 if question.cfg.compute_dtype == "float32" else 2
    itemsize = plan.placed.reduction_dtype[1] if kind == "reduce-scatter" else read
    links = Links(question.rated, plan.placed.mesh)
    return sum(question.rated.collective_s(kind, n * itemsize, links.group(axes)) for axes, n in elements.items())


def _format_sizes(plan: Plan, axes: tuple[str, ...]) -> str:
    return " × ".join(f"{axis} {plan.sizes[axis]}" for axis in axes)


def _ms(value: float) -> str:
    return f"{1e3 * value:.1f} ms"
