"""Prices and ranks the layouts of a model on given hosts: meshes, rules, microbatches, schedules, remat.

Tries every factorization of the GPUs over the five axes whose tensor groups fit into a link domain. Rule files that are
equal on a mesh are tried once. Each layout gets the least recomputation that fits and the schedule with the smallest
bubble that fits; the best plans also get other placements of the axes and other context methods. `Question.lay` and
`Question.refused` apply the checks that training starts with.
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import footprint, price as prices, simulate
from meshtrain.cost.formulas.options import Attended, Options
from meshtrain.cost.formulas.place import ModelWeights
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.price import Price
from meshtrain.cost.formulas.rates import Rates
from meshtrain.names import AXES, OFFLOAD, PLACEMENT, REMAT
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import AS_OTHERS, Layout, Rules
from meshtrain.units import amount

METHODS = ("ring", "gather", "ulysses")
FIXABLE = (*AXES, "schedule", "chunks", "microbatches", "remat")        # what a question can fix
# Orders of the axes, slowest link first. The second order keeps neighbouring stages nearer than replicas, the third
# gathers weights inside a host with context parallelism.
PLACEMENTS = (PLACEMENT, ("data", "stage", "fsdp", "context", "tensor"), ("stage", "data", "context", "fsdp", "tensor"),
              ("data", "fsdp", "stage", "context", "tensor"))
# limits: sizes of two axes, sequences of a microbatch on one replica, chunks of a stage
MOST_CONTEXT, MOST_STAGES, MOST_SEQUENCES, MOST_CHUNKS = 64, 64, 16, 16
SHORTEST = 512              # fewest tokens of a sequence on one device under context parallelism
PADDED = 1.1                # largest ratio of layers with padding to layers of the model
REFINED = 120               # plans whose placement and context method are varied
NEAR = 1.3                  # a near miss needs at most this multiple of the usable memory
MOST_MISSES = 5
KIND_NAMES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer states",
              "activations": "activations", "teacher": "weights and forward of the teacher"}
UNSURE = 0.95               # above this fraction of the memory a formula is not reliable
NEAR_LIMIT = "within 5% of the available memory: compile it before you rely on it"
SHORT_S, MANY = 0.3, 100    # no formula holds for shorter steps (seconds) on this many GPUs or more
TOO_SHORT = ("a step below 0.3 s on hundreds of GPUs: latencies and stragglers determine its time, which no formula "
             "predicts")


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """The inputs of a search.

    options: the options of the run; the search replaces microbatches, remat, schedule, chunks and method. fixed: the
    sizes of axes, schedule, chunks, microbatches or remat that the user set. attended: maps (layout, context method) to
    the work of attention. lay: maps (sizes, rules, context method) to the layout and the reasons why training rejects
    it. refused: returns the reasons why training rejects a complete plan, with its microbatches, schedule and remat.
    """
    cfg: Model
    rows: list
    num_gpus: int
    options: Options
    rated: Rates
    usable_bytes: int
    rule_files: tuple[Rules, ...]
    fixed: Mapping[str, object]
    attended: Callable[[Layout, str], Attended]
    lay: Callable[[Mapping[str, int], Rules, str], tuple[Layout, list[str]]]
    refused: Callable[[Plan], list[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One layout with its options and price. reason: why it does not fit into memory, or why its price is uncertain;
    otherwise empty."""
    placed: Placed
    rules: Rules
    options: Options
    price: Price
    fits: bool
    reason: str = ""

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.placed.mesh.sizes

    def as_json(self) -> dict:
        pipelined, split = self.sizes["stage"] > 1, self.sizes["context"] > 1
        return {"mesh": dict(self.sizes), "placement": list(self.placed.mesh.placement), "rules": self.rules.path,
                "schedule": self.options.schedule if pipelined else None, "chunks": self.options.chunks,
                "microbatches": self.options.microbatches, "remat": self.options.remat,
                "context_method": self.options.method if split else None, "fits": self.fits, "reason": self.reason,
                "memory_bytes": dict(self.price.memory_bytes), "traffic_bytes": dict(self.price.traffic_bytes),
                "bubble": self.price.bubble, "step_time_s": self.price.step_s,
                "tokens_per_s_per_gpu": self.price.tokens_per_s_per_gpu, "mfu": self.price.mfu}


Miss = tuple[int, Placed, Rules, Options]       # options that do not fit; first the bytes that they need


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The result of a search.

    plans: the plans that fit, fastest first, one for each pair of mesh and rule file. misses: the fastest plans that
    need more memory than there is. tried: number of combinations of layout and microbatch count that were priced. laid:
    number of combinations of mesh and rule file. faults: how many of these were rejected, by reason.
    """
    plans: list[Plan]
    misses: list[Plan]
    tried: int
    laid: int
    faults: collections.Counter[str]


def search(question: Question, tell: Callable[[int, int], None] | None = None) -> Answer:
    """Price every allowed layout, then vary the placement and context method of the fastest plans. tell: called with
    (number of combinations of mesh and rule file that are done, number of all of them)."""
    fastest: list[tuple[Plan, list[Options]]] = []
    misses: dict[int, list[Miss]] = {}      # by the number of the candidate
    hopeless: dict[int, tuple[ModelWeights, list[int], str]] = {}        # layouts that need far too much, not priced
    tried, candidates = 0, list(_candidates(question))
    faults: collections.Counter[str] = collections.Counter()
    for done, (mesh, rules) in enumerate(candidates):
        if tell:
            tell(done, len(candidates))
        layout, method, wrong = _lay(question, mesh.sizes, rules)
        if wrong:
            faults[wrong[0]] += 1
            continue
        num_shards = layout.num_shards(layout.mesh_axes("activations", "batch"))
        counts = _microbatches(question, num_shards)
        if not counts:
            faults[f"a global batch of {question.options.global_batch} sequences cannot be split over "
                              f"{num_shards} replicas"
                   + (f" in {amount(count, 'microbatch')}"
                      if isinstance(count := question.fixed.get("microbatches"), int) else "")] += 1
            continue
        weights = ModelWeights(question.rows, question.cfg, layout)
        tried += len(counts)
        if footprint.least_bytes(weights, question.options) > NEAR * question.usable_bytes:
            hopeless[done] = weights, counts, method
            continue
        placed = weights.place(mesh)
        fitting, misses[done] = _divide(question, placed, rules, counts, method)
        if fitting:
            fastest.append((_find_fastest(question, placed, rules, fitting), fitting))
    plans = _accept(question, fastest, faults)
    if not plans:       # then misses are shown however much they need
        for number, (weights, counts, method) in hopeless.items():
            mesh, rules = candidates[number]
            misses[number] = _divide(question, weights.place(mesh), rules, counts, method)[1]
    near = [miss for _, of_layout in sorted(misses.items()) for miss in of_layout
            if miss[0] <= NEAR * question.usable_bytes or not plans]
    return Answer(plans, _near(question, near, faults), tried, len(candidates), faults)


def _divide(question: Question, placed: Placed, rules: Rules, counts: Iterable[int], method: str
            ) -> tuple[list[Options], list[Miss]]:
    """Return (the options of a layout that fit, its misses). counts: numbers of microbatches."""
    fitting: list[Options] = []
    misses: list[Miss] = []
    for m in counts:
        for options, needed in _fitting(question, placed, m, method):
            if needed > question.usable_bytes:
                misses.append((needed, placed, rules, options))
            else:
                fitting.append(options)
    return fitting, misses


def _accept(question: Question, candidates: Iterable[tuple[Plan, list[Options]]],
            faults: collections.Counter[str]) -> list[Plan]:
    """Return the plans that training accepts, fastest first. The first `REFINED` of them are refined.

    Plans beyond `REFINED` are not checked again, because their mesh and rules have passed the check. candidates: pairs
    of the best plan of a layout and the options of all its plans.
    """
    waiting = [(*_order(plan), n, plan, 0, fitting) for n, (plan, fitting) in enumerate(candidates)]
    heapq.heapify(waiting)
    taken: list[Plan] = []
    while waiting and len(taken) < REFINED:
        *_, n, first, place_of, fitting = heapq.heappop(waiting)
        plan, after = _refine(question, first), place_of + 1
        if not (wrong := question.refused(plan)):
            taken.append(plan)
        elif after < len(fitting):
            if after == 1:
                fitting = sorted(fitting, key=lambda options: prices.Pricing(
                    first.placed, question.rated, options).step_s())
            other = _price(question, first.placed, first.rules, fitting[after])
            heapq.heappush(waiting, (*_order(other), n, other, after, fitting))
        else:
            faults[wrong[0]] += 1
    return sorted(taken, key=_order) + [plan for *_, plan, _, _ in sorted(waiting, key=lambda entry: entry[:3])]


def _order(plan: Plan):
    return plan.price.step_s, plan.price.memory_bytes["total"]


# ---- candidates ------------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _candidates(question: Question) -> Iterator[tuple[MeshSpec, Rules]]:
    """Yield every mesh with every rule file. Rule files that shard the same arrays on a mesh are yielded once."""
    seen, keys = set(), {}
    for sizes in _meshes(question):
        rest = question.num_gpus // (sizes["tensor"] * sizes["stage"] * sizes["context"])
        for rules in sorted(question.rule_files, key=_separate):       # the simpler one of two files equal on a mesh
            for data, fsdp in _replicas(question, rest, not _separate(rules), "expert" in rules.tables["params"]):
                mesh = MeshSpec({**sizes, "data": data, "fsdp": fsdp})
                split = tuple(axis for axis, n in mesh.sizes.items() if n > 1)
                if (rules.path, *split) not in keys:
                    keys[rules.path, *split] = _sharding_key(rules, split)
                key = tuple(mesh.sizes.values()), keys[rules.path, *split]
                if key not in seen:
                    seen.add(key)
                    yield mesh, rules


def _lay(question: Question, sizes: Mapping[str, int], rules: Rules) -> tuple[Layout, str, list[str]]:
    """Return (layout, context method, reasons for a rejection). The method is the first that training accepts. If
    training accepts none, the result is that of the first method."""
    first, *others = METHODS
    layout, wrong = question.lay(sizes, rules, first)
    for method in others if wrong and sizes["context"] > 1 else ():
        other, faults = question.lay(sizes, rules, method)
        if not faults:
            return other, method, []
    return layout, first, wrong


def _sharding_key(rules: Rules, axes) -> frozenset:
    """Return a hashable description of what the rules shard over these axes, including the rules that experts inherit.
    Rules with equal keys give the same layout."""
    tables = {(table, logical): tuple(a for a in rules.mesh_axes(table, logical) if a in axes)
              for table, entries in rules.tables.items() for logical in (*entries, *AS_OTHERS)}
    return frozenset((key, value) for key, value in tables.items() if value)


def _meshes(question: Question) -> Iterator[dict[str, int]]:
    """Yield the allowed sizes of tensor, stage and context. The other GPUs belong to data and fsdp."""
    n, cfg, domain = question.num_gpus, question.cfg, question.rated.gpu.domain_gpus(question.num_gpus)
    allowed = {
        "tensor": lambda k: k <= min(domain, cfg.num_heads),
        "stage": lambda k: k <= min(MOST_STAGES, pattern.count_staged(cfg))
        and pattern.count_padded(cfg, k) <= PADDED * pattern.count_staged(cfg)
        and (k == 1 or bool(pattern.period(cfg))),
        "context": lambda k: k == 1 or k <= MOST_CONTEXT and question.options.seq_len // k >= SHORTEST}
    choices = [[question.fixed[axis]] if axis in question.fixed else [k for k in divisors(n) if allows(k)]
               for axis, allows in allowed.items()]
    for tensor, stage, context in itertools.product(*choices):
        if n % (tensor * stage * context) == 0:
            yield {"tensor": tensor, "stage": stage, "context": context}


def _separate(rules: Rules) -> bool:
    """Whether the rules shard a dim over data without fsdp or over fsdp without data."""
    return any(("data" in axes) != ("fsdp" in axes) for table in rules.tables.values() for axes in table.values())


def _replicas(question: Question, rest: int, together: bool, experts: bool) -> Iterator[tuple[int, int]]:
    """Yield sizes (data, fsdp) whose product is `rest`.

    together: the rules treat both axes alike, so fsdp gets all devices. Otherwise both are larger than 1; data may be 1
    if experts are sharded.
    """
    fixed = question.fixed
    for data in divisors(rest):
        fsdp = rest // data
        if fixed.get("data", data) != data or fixed.get("fsdp", fsdp) != fsdp:
            continue
        if "data" in fixed or "fsdp" in fixed or (data == 1 if together else (data > 1 or experts) and fsdp > 1):
            yield data, fsdp


def _microbatches(question: Question, num_shards: int) -> list[int]:
    """List the microbatch counts that leave each replica 1, 2, 4, … sequences in a microbatch, or all of its sequences;
    or the fixed count alone. Empty if the global batch cannot be split."""
    share, rest = divmod(question.options.global_batch, num_shards)
    if rest:
        return []
    if fixed := question.fixed.get("microbatches"):
        return [] if share % fixed else [fixed]
    return [share // b for b in divisors(share) if b <= MOST_SEQUENCES and (b & (b - 1) == 0 or b == share)]


@functools.lru_cache(1024)      # many layouts have these stages and microbatches
def _schedules(question: Question, p: int, m: int) -> list[tuple[str, int]]:
    """List the pairs (schedule, chunks) that the stages allow. The pair with the smallest bubble is first, if F, B and
    W cost the same."""
    if p == 1:
        return [("", 1)]
    cfg = question.cfg
    counts = simulate.chunk_counts(-(-pattern.count_staged(cfg) // pattern.period(cfg)), p, MOST_CHUNKS)
    names = [question.fixed["schedule"]] if "schedule" in question.fixed else simulate.AUTOMATIC
    choices = [(name, v) for name in names for v in counts
               if (v > 1) == (name in schedules.INTERLEAVED) and question.fixed.get("chunks", v) == v
               and not schedules.problems(name, p, m, v)]
    return sorted(choices, key=lambda pair: round(prices.bubble_s(simulate.Costs(), pair[0], p, m, pair[1]), 9))


def _fitting(question: Question, placed: Placed, m: int, method: str) -> Iterator[tuple[Options, int]]:
    """Yield (options, bytes) of the candidates that fit and are worth pricing. If none fits, yield the smallest.

    Each remat policy gets the fitting schedule with the smallest bubble, once with a separate W and once without. The
    loop ends when the schedule with the smallest bubble fits. In a pipeline, saved residuals cost time too, so
    "selective" is tried even if "none" fits.
    """
    p, attended = placed.mesh.sizes["stage"], _describe_attention(question, placed.layout, method)
    with_microbatches = functools.partial(dataclasses.replace, question.options, microbatches=m, method=method,
                                          attended=attended)
    without_slots: dict[object, float] = {}    # by remat; schedules differ in their slots alone
    policies = [question.fixed["remat"]] if "remat" in question.fixed else REMAT if p > 1 else (*REMAT, OFFLOAD)
    order, least, any_fits = _schedules(question, p, m), None, False
    if placed.held.stored_bytes + question.options.optimizer_bytes * placed.held.stored > question.usable_bytes:
        order, policies = order[:1], policies[-1:]      # nothing fits
    for kind in (True, False):
        family = [pair for pair in order if (pair[0] in schedules.SPLIT) == kind]
        for remat in policies if family else ():
            fits_first, first = False, with_microbatches(remat=remat, schedule=family[0][0], chunks=family[0][1])
            slot_bytes = footprint.slot_bytes_by_schedule(placed, first) if p > 1 else _no_slots
            if remat not in without_slots:
                without_slots[remat] = footprint.memory(placed, first)["total"] - slot_bytes(*family[0])
            for name, chunks in family:
                needed = int(without_slots[remat] + slot_bytes(name, chunks))
                if needed <= question.usable_bytes:
                    any_fits, fits_first = True, (name, chunks) == family[0]
                    yield first if fits_first else dataclasses.replace(first, schedule=name, chunks=chunks), needed
                    break
                if least is None or needed < least[-1]:
                    least = first, name, chunks, needed
            if fits_first and (p == 1 or remat != REMAT[0]):
                break
    if not any_fits and least:
        first, name, chunks, needed = least
        yield dataclasses.replace(first, schedule=name, chunks=chunks), needed


def _no_slots(schedule: str, chunks: int) -> float:
    return 0.0


@functools.lru_cache(8)     # one layout is tried with several numbers of microbatches
def _describe_attention(question: Question, layout: Layout, method: str) -> Attended:
    return question.attended(layout, method)


# ---- prices ----------------------------------------------------------------------------------------------------------


def _price(question: Question, placed: Placed, rules: Rules, options: Options) -> Plan:
    return _plan(question, prices.Pricing(placed, question.rated, options), rules)


def _plan(question: Question, pricing: prices.Pricing, rules: Rules) -> Plan:
    one, placed, options = pricing.price(), pricing.placed, pricing.options
    held, usable = one.memory_bytes["total"], question.usable_bytes
    unsure = [NEAR_LIMIT] * (held > UNSURE * usable) + [TOO_SHORT] * (
        one.step_s < SHORT_S and placed.mesh.num_devices >= MANY)
    return Plan(placed, rules, options, one, held <= usable, "; ".join(unsure))


def _find_fastest(question: Question, placed: Placed, rules: Rules, fitting: Sequence[Options]) -> Plan:
    """Return the fastest plan of a layout; of equally fast plans the first. Options are skipped if their step even
    without collectives is slower than the best plan's step."""
    pricings = [prices.Pricing(placed, question.rated, options) for options in fitting]
    best = math.inf, len(fitting)
    for least_s, n in sorted((pricing.least_s(), n) for n, pricing in enumerate(pricings)):
        if least_s > best[0]:
            break
        best = min(best, (pricings[n].step_s(), n))
    return _plan(question, pricings[best[1]], rules)


def _refine(question: Question, plan: Plan) -> Plan:
    """Return the fastest variant of a plan over the placements and context methods."""
    best = plan
    own = plan.options.method
    for method in METHODS if plan.sizes["context"] > 1 else (own,):
        if method != own and question.lay(plan.sizes, plan.rules, method)[1]:
            continue
        attended = _describe_attention(question, plan.placed.layout, method)
        options = dataclasses.replace(plan.options, method=method, attended=attended)
        pricing = prices.Pricing(plan.placed, question.rated, options)
        for placement in _list_placements(plan.sizes):
            placed = pricing.on(MeshSpec(plan.sizes, placement))
            if placed.step_s() < 0.999 * best.price.step_s and (other := _plan(question, placed, plan.rules)).fits:
                best = other
    return best


def _list_placements(sizes: Mapping[str, int]) -> list[Sequence[str]]:
    """List the placements that differ in the order of the axes larger than 1."""
    by_order: dict[tuple[str, ...], Sequence[str]] = {}
    for placement in PLACEMENTS:
        by_order.setdefault(tuple(axis for axis in placement if sizes[axis] > 1), placement)
    return list(by_order.values())


def _near(question: Question, misses: list[Miss], faults: collections.Counter[str]) -> list[Plan]:
    """Return the fastest near misses that training accepts. Each one's reason names the kind of data that takes the
    most memory."""
    misses_by_layout, usable = {}, question.usable_bytes
    for needed, placed, rules, options in sorted(misses, key=lambda miss: miss[0])[:8 * MOST_MISSES]:
        plan = _price(question, placed, rules, options)
        held = plan.price.memory_bytes
        name = max(KIND_NAMES, key=lambda kind: held.get(kind, 0))
        gib = simulate.gib
        reason = (f"needs {gib(needed)} where {gib(usable)} can be used: {KIND_NAMES[name]} take {gib(held[name])}, "
                  f"with remat {options.remat} and {amount(options.microbatches, 'microbatch')}")
        if (key := (tuple(plan.sizes.values()), rules.path)) in misses_by_layout:
            continue
        if wrong := question.refused(plan):
            faults[wrong[0]] += 1
        else:
            misses_by_layout[key] = dataclasses.replace(plan, fits=False, reason=reason)
    return sorted(misses_by_layout.values(), key=_order)[:MOST_MISSES]
