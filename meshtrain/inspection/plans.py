"""Formats the result of a search for layouts: a table of ranked plans, the assumptions, and three sentences about the
first plan.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from meshtrain.cost.planner.gap import Gap, link
from meshtrain.cost.formulas import traffic
from meshtrain.cost.formulas.assumptions import MEDIAN_ERROR
from meshtrain.cost.planner import search
from meshtrain.cost.formulas.placed import RECOMPUTED
from meshtrain.cost.formulas.options import Attended
from meshtrain.inspection.report import columns
from meshtrain.cost.planner.search import Answer, Plan, Question
from meshtrain.inspection import summary
from meshtrain.names import AXES
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.units import amount, many, seconds, size

FIRST = ("matmul.sustained", "link.contend", "attention")      # the assumptions with the largest effect on prices
ALIKE = 1e-3            # share of a step's time within which plans are alike, far below the error of the formulas


@dataclasses.dataclass(frozen=True)
class Length:
    """The length of a training run: tokens to train on, GPU hours to spend; None: not requested."""
    tokens: float | None = None
    hours: float | None = None

    def header(self) -> tuple[str, ...]:
        return (*(("days", "GPU hours") if self.tokens else ()), *(("tokens for it",) if self.hours else ()))

    def cells(self, question: Question, plan: Plan) -> tuple[str, ...]:
        numbers = self.as_json(question, plan)
        return (*((f"{numbers['days']:,.1f}", f"{numbers['gpu_hours']:,.0f}") if self.tokens else ()),
                *((f"{numbers['tokens_for_budget'] / 1e9:,.1f}B",) if self.hours else ()))

    def as_json(self, question: Question, plan: Plan) -> dict[str, float]:
        """Return the requested numbers, without restarts, validation and other pauses."""
        per_hour = 3600 * plan.price.tokens_per_s_per_gpu
        numbers: dict[str, float] = {}
        if self.tokens:
            numbers |= {"days": self.tokens / per_hour / question.num_gpus / 24, "gpu_hours": self.tokens / per_hour}
        if self.hours:
            numbers["tokens_for_budget"] = self.hours * per_hour
        return numbers


def scaling(answers: list[tuple[Question, Answer]], length: Length) -> str:
    """Return a table of the best plan for each number of GPUs, with its speed per GPU relative to the first."""
    question = answers[0][0]
    count = sum(info.size for info in question.rows)
    lines = [f"{many(count)} parameters, {question.options.global_batch:,} × {question.options.seq_len:,} tokens a "
             f"step on {question.rated.gpu.name}, {size(question.usable_bytes)} usable on each; "
             "the best plan for each number of GPUs", ""]
    header = ("GPUs", "mesh", "rules", "microbatches", "remat", "memory", "step", "tokens/s",
              "tokens/s a GPU", "kept", "MFU", *length.header())
    rows, first = [], None
    for asked, answer in answers:
        if not answer.plans:
            rows.append((f"{asked.num_gpus:,}", "nothing fits", *[""] * (len(header) - 2)))
            continue
        plan = answer.plans[0]
        one = plan.price
        first = first or one.tokens_per_s_per_gpu
        speed = (seconds(one.step_s), f"{one.tokens_per_s_per_gpu * asked.num_gpus:,.0f}",
                 f"{one.tokens_per_s_per_gpu:,.0f}",
                 f"{one.tokens_per_s_per_gpu / first:.0%}", f"{one.mfu:.1%}", *length.cells(asked, plan))
        rows.append((f"{asked.num_gpus:,}", _short(plan), _stem(plan), str(plan.options.microbatches),
                     plan.options.remat, size(one.memory_bytes["total"]),
                     *(no_digits(speed) if search.TOO_SHORT in plan.reason else speed)))
    lines += [columns([header, *rows]), "",
              "kept: tokens/s a GPU as a share of those of the first row, with the same global batch. All numbers are "
              "from formulas; nothing is compiled or measured." + (
                  f" {BELOW}: {search.TOO_SHORT}." if any(BELOW in row for row in rows) else "")]
    return "\n".join(lines)


BELOW = f"< {search.SHORT_S} s"


def no_digits(speed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cells of a step that is too short for the formulas, without digits. speed: cells with digits."""
    return BELOW, *["–"] * (len(speed) - 1)


def page(question: Question, answer: Answer, most: int, length: Length = Length(), gap: Gap | None = None) -> str:
    """Return the text that `plan` prints for one number of GPUs. most: number of plans in the table. gap: how the fixed
    choices compare with the best layout."""
    gpu, assumed = question.rated.gpu, question.rated.assumed
    count = sum(info.size for info in question.rows)
    of = first_attention(question, answer)
    documents = f", documents of {assumed['documents.mean']:,.0f} tokens on average" if of.documents else ""
    lines = [f"{many(count)} parameters, {question.options.global_batch:,} × {question.options.seq_len:,} tokens a "
             f"step on {question.num_gpus:,} × {gpu.name}, {size(question.usable_bytes)} usable on each; attention by "
             f"{of.engine}{documents}; {amount(answer.tried, 'layout')} tried", ""]
    if answer.plans:
        notes = [*filter(None, [equal(answer.plans[:most])]), *sentences(question, answer.plans),
                 *([standing(gap)] if gap else [])]
        lines += [_table(question, answer.plans[:most], length), "", *notes, ""]
    else:
        lines += ["no layout fits; use more GPUs, a larger mesh.context, or fewer tokens per microbatch",
                  ""]
    if answer.misses:
        lines += ["do not fit:", *(f"  {_short(plan)}, {plan.rules.path}: {plan.reason}" for plan in answer.misses), ""]
    return "\n".join(lines + caveats(question, answer))


def first_attention(question: Question, answer: Answer) -> Attended:
    """Return the attention of the first plan, or of the first plan that does not fit."""
    plan = (answer.plans or answer.misses)[0]
    return question.attended(plan.placed.layout, plan.options.method)


def caveats(question: Question, answer: Answer) -> list[str]:
    """Return lines about the accuracy of the numbers and the most important assumptions."""
    engine, assumed = first_attention(question, answer).engine, question.rated.assumed
    named = {name: value for name, value in assumed.as_dict(formula=True).items()
             if name.startswith(FIRST[:2]) or name.startswith(f"attention.{engine}")}
    lines = ["All numbers are from formulas; nothing is compiled or measured. For 51 published runs the median error "
             "is 4%; for a tenth of them it is above 11%. Most important assumptions (--assume NAME=VALUE changes "
             "one; reasons: meshtrain/cost/formulas/assumptions.py): "
              + ", ".join(f"{name} {value:g}" for name, value in named.items())]
    if answer.plans and search.TOO_SHORT in answer.plans[0].reason:
        lines += [f"{search.TOO_SHORT[0].upper()}{search.TOO_SHORT[1:]}; the order of the plans is a guess, "
                  "and percentages refer to the step time by the formulas."]
    return lines


def first(question: Question, answer: Answer, gap: Gap | None = None) -> dict | None:
    """Return the first plan as JSON; None if nothing fits. time_s: the parts of its step time. standing: see
    `standing`."""
    if not answer.plans:
        return None
    plan = answer.plans[0]
    one, gpu = plan.price, question.rated.gpu
    time_s = dict(one.parts) | {f"waiting for {name}" if name in AXES else f"exchanged {name}": lost_s
                                for name, lost_s in one.exposed.items()}
    time_s |= {"bubble": one.bubble_s, "optimizer": one.update_s, "host": one.host_s}
    time_s["ends of microbatches"] = max(0.0, one.step_s - sum(time_s.values()))
    return {"sentences": sentences(question, answer.plans), "standing": standing(gap) if gap else "",
            "time_s": time_s, "mesh": summary.mesh(MeshSpec(plan.sizes, plan.placed.mesh.placement), gpu, gpu.name)}


def sampling(costs: dict) -> str:
    """Return a text about the cost of sampling under the first plan. costs: the result of
    `commands.plan.price_sampling`."""
    if "file_bytes" in costs:
        fits = costs["slots_that_fit"]
        return (f"A separate sampler with the {costs['gpus']} GPUs of a host (tensor {costs['tensor']}): "
                f"{size(costs['weights_bytes'])} of weights and {size(costs['cache_bytes'])} of cache on each; "
                f"{costs['slots']:,} slots"
                + (f" ({fits:,} fit)" if fits >= costs["slots"] else f", but only {fits:,} FIT: set rl.slots")
                + f", {seconds(costs['token_s'])} a token with full slots, "
                f"{costs['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU; one sampler alone samples a batch in at most "
                f"{seconds(costs['batch_s_at_most'])}. Each version of the weights is "
                f"{size(costs['file_bytes'])}, written once and read by every sampler.")
    if not costs["slots_that_fit"]:
        return (f"Sampling under the first plan: NO slot fits next to {size(costs['weights_bytes'])} of weights and "
                f"the training state; use a larger mesh.tensor, or rl.rules that shard the weights further.")
    return (f"Sampling under the first plan, once a batch of answers: weights to the sampler "
            f"{seconds(costs['sync_s'])}; "
            f"{costs['slots']:,} slots ({costs['slots_that_fit']:,} fit), "
            f"{seconds(costs['token_s'])} a token with full "
            f"slots, {costs['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU; at most "
            f"{seconds(costs['batch_s_at_most'])} a batch, if all answers have rl.max_tokens.")


def _short(plan: Plan) -> str:
    return " × ".join(f"{axis} {plan.sizes[axis]}" for axis in AXES if plan.sizes[axis] > 1) or "one GPU"


def verification_table(question: Question, plans: list[Plan], compiled: list[dict]) -> str:
    """Return a table that compares formulas with the compiled programs of the best plans. compiled: the result of
    `commands.plan.verify`."""
    rows = [("", "memory", "compiled", "step", "roofline", "sent per GPU, by formulas", "compiled")]

    def by_axes(traffic: Mapping[str, float]) -> str:
        return ", ".join(f"{axes} {size(sent)}" for axes, sent in sorted(traffic.items()) if sent >= 2**20) or "–"
    for k, (plan, program) in enumerate(zip(plans, compiled), 1):
        one, held = plan.price, program["memory_bytes"]["total"]
        fits = "" if held <= question.usable_bytes else ", does not fit"
        rows.append((str(k), size(one.memory_bytes["total"]), size(held) + fits, seconds(one.step_s),
                     seconds(program["step_time_s"]), by_axes(one.traffic_bytes), by_axes(program["traffic_bytes"])))
    return columns(rows)


def _stem(plan: Plan) -> str:
    return plan.rules.path.removeprefix("sharding_rules/").removesuffix(".toml")


def _table(question: Question, plans: list[Plan], length: Length) -> str:
    header = ("", "mesh", "rules", "schedule", "microbatches", "remat", "memory", "step",
              "tokens/s a GPU", "MFU", "bubble", *length.header(), "")
    rows = []
    for number, group in alike(plans):
        plan = simplest(group)
        options, one = plan.options, plan.price
        method = f" {options.method}" if plan.sizes["context"] > 1 else ""
        speed = (seconds(one.step_s), f"{one.tokens_per_s_per_gpu:,.0f}", f"{one.mfu:.1%}",
                 f"{one.bubble:.1%}" if one.bubble else "–", *length.cells(question, plan))
        notes = [f"the simplest of {len(group)} alike"] * (len(group) > 1) + [
            "memory within 5% of the limit"] * (search.NEAR_LIMIT in plan.reason)
        rows.append((number, _short(plan) + method, _stem(plan), _schedule(plan),
                     str(options.microbatches), options.remat, size(one.memory_bytes["total"]),
                     *(no_digits(speed) if search.TOO_SHORT in plan.reason else speed), "; ".join(notes)))
    return columns([header, *rows])


def _schedule(plan: Plan) -> str:
    options = plan.options
    return options.schedule + f" × {options.chunks}" * (options.chunks > 1) if plan.sizes["stage"] > 1 else "–"


def alike(plans: Sequence[Plan]) -> list[tuple[str, list[Plan]]]:
    """Return groups of consecutive plans that are alike, with their numbers: [("1", [first]), ("2–4", [second, third,
    fourth]), …]. Plans are alike if they have equal schedules, remat policies and printed memory, and step times within
    ALIKE."""
    groups: list[list[Plan]] = []
    for plan in plans:
        if groups and _row(plan) == _row(groups[-1][0]) and (
                plan.price.step_s <= (1 + ALIKE) * groups[-1][0].price.step_s):
            groups[-1].append(plan)
        else:
            groups.append([plan])
    begins = itertools.accumulate(map(len, groups), initial=1)
    return [(f"{begin}–{begin + len(group) - 1}" if len(group) > 1 else str(begin), group)
            for begin, group in zip(begins, groups)]


def _row(plan: Plan) -> tuple[object, ...]:
    options = plan.options
    return (_schedule(plan), options.microbatches, options.remat, plan.sizes["context"] > 1 and options.method,
            size(plan.price.memory_bytes["total"]), plan.reason)


def simplest(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the fewest mesh axes; among equals, one without stages, then one with memory to spare, then
    the fastest."""
    return min(plans, key=lambda plan: (sum(n > 1 for n in plan.sizes.values()), plan.sizes["stage"] > 1,
                                        bool(plan.reason)))


def equal(plans: Sequence[Plan]) -> str:
    """Return a sentence about how many plans are as fast as the first within the error of the formulas; "" if no other
    plan is."""
    fast = [plan for plan in plans if plan.price.step_s <= (1 + MEDIAN_ERROR) * plans[0].price.step_s]
    if len(fast) < 2:
        return ""
    plan = simplest(fast)
    number = next(number for number, group in alike(plans) if any(one is plan for one in group))
    which = "the first is the simplest of them" if plan is plans[0] else (
        f"the simplest of them is number {number}, {_short(plan)} with {_stem(plan)}")
    return f"The first {len(fast)} plans are equal within the formulas' error of {MEDIAN_ERROR:.0%}; {which}."


def standing(gap: Gap) -> str:
    """Return a text about the rank of the first plan among all layouts, and the cost of the fixed choices."""
    fixed = ", ".join(f"{name} {value}" for name, value in gap.fixed.items())
    if gap.rank == 1:
        return f"No other layout is faster: fixing {fixed} costs nothing."
    best, options = gap.best, gap.best.options
    lines = [f"With {fixed} fixed the first plan is number {gap.rank} of {gap.count} and takes "
             f"{gap.share:.1%} longer than the best: {_short(best)}, {_stem(best)}, "
             f"{amount(options.microbatches, 'microbatch')}, remat {options.remat}, {seconds(best.price.step_s)} a "
             "step"
             + (". Why:" if gap.reasons else ".")]
    return "\n".join([*lines, *(f"  - {reason}" for reason in gap.reasons)])


# ---- three sentences -------------------------------------------------------------------------------------------------


def sentences(question: Question, plans: list[Plan]) -> list[str]:
    """Return three sentences: the bottleneck of the first plan, its memory, and the best remedy."""
    plan = plans[0]
    one = plan.price

    def share(value: float) -> str:
        return f"{value / one.step_s:.0%}"
    losses = _losses(question, plan)
    worst, lost_s, remedy = max(losses, key=lambda loss: loss[1])
    parts = ", ".join(f"{name} {share(value)}" for name, value in one.parts.items())
    bound = (f"The first plan is bound by compute: {parts} of the step" if one.compute_s > 0.5 * one.step_s
             else f"The first plan is bound by {worst}: kernels take {share(one.compute_s)} of the step ({parts})")
    longest = sorted(losses, key=lambda loss: -loss[1])
    waits = ", ".join(f"{name} {share(value)}" for name, value, _ in longest if value > 0.005 * one.step_s)
    held = one.memory_bytes
    largest = max(search.KIND_NAMES, key=lambda kind: held.get(kind, 0))
    sentences = [f"{bound}; other times: {waits or 'none above 1%'}.",
                 f"A GPU holds {size(held['total'])} of {size(question.usable_bytes)}, "
                 f"most of it {largest} ({size(held[largest])})"
                 + (", which is too close to the limit to be certain." if search.NEAR_LIMIT in plan.reason else ".")]
    if lost_s < 0.02 * one.step_s:
        return [*sentences, "Only faster matmuls or fewer tokens would help by more than 2%."]
    return [*sentences, f"What would help most: {remedy} ({share(lost_s)} of the step)."]


def _losses(question: Question, plan: Plan) -> list[tuple[str, float, str]]:
    """Return (cause, seconds, remedy) for each part of a step that is not useful compute."""
    one, sizes, losses = plan.price, plan.sizes, []
    if RECOMPUTED[plan.options.remat].products:
        losses.append(("recomputation", one.parts["matmul"] / 4,
                       "more memory for activations (more GPUs, or another layout), which would "
                       "avoid recomputing the forward"))
    for name, lost_s in one.exposed.items():
        crossed = link(question, plan, (name,)) if name in AXES and sizes[name] > 1 else "its links"
        remedy = {
            "tensor": f"a smaller tensor than {sizes['tensor']}: its collectives do not overlap "
                      "with compute",
            "fsdp": "fewer, larger microbatches: weights are gathered in each",
            "context": "a smaller context, or more tokens of a sequence per GPU",
            "once a step": "more tokens per step: gradients and new weights are exchanged once per step",
            "offload": "more tokens in each microbatch, or another remat: copies to the host take longer than the "
                       "layers that they overlap with",
            traffic.ROUTED: "experts split over fewer GPUs: tokens are sent to all of them",
            traffic.EXPERTS: "fewer, larger microbatches: experts' weights are gathered in each",
            "scales": "more tokens in each microbatch: a layer's scales cost the same for any number of tokens",
        }.get(name, "fewer stages")
        losses.append((f"{name} ({crossed})" if name in AXES else f"data exchanged {name}", lost_s, remedy))
    if one.bubble_s:
        losses.append(("the pipeline's bubble", one.bubble_s,
                       "more microbatches (a larger global batch, or fewer replicas)"))
    losses.append(("the optimizer's update", one.update_s, "states split over more GPUs"))
    return losses
