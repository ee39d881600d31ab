"""The routed experts of a layer over a mesh: tokens go where their experts are, and nothing is ever dropped.

The rules say what splits the experts ([params] expert, expert_mlp) and what splits tokens. Tokens are brought together over the
axes that split both, each device works on the rows that chose its experts, and the sums are scattered back: a gather and a
reduce-scatter of T·D each way. Over `tensor` with sequence parallelism that is what a dense MLP sends, too. All of it, and the
gathers of weights that are split further (ZeRO-3), stands in one region where every axis is manual, both directions written out.
Where many devices share the experts or K is small, `exchange` sends less.
The rows of a device's experts lie in a buffer of SPARE times their even share; where more come, further rounds take the rest.
Dims: A tokens after the gather, K experts of a token, e experts of this device, F their width, R rows.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import grouped
from meshtrain.layout.mesh import automatic_axes, on_shards, psum, psum_scatter
from meshtrain.layout.rules import Layout
from meshtrain.names import EVEN_ROWS, EXPERT_AXES, FURTHER_ROUNDS
from meshtrain.parallel import exchange

# With random choices a device of 16 among 128 experts gets up to 1.1 times its share; what is spared costs memory alone.
SPARE = 1.25


@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """How a run computes its experts. activation(inward products) -> h; spare: see SPARE, 0 for a buffer that always suffices.

    aux_loss, z_loss: weights of the losses that a layer's router makes.
    """
    engine: grouped.Engine
    num_experts: int
    activation: Callable
    aux_loss: float = 0.0
    z_loss: float = 0.0
    spare: float = SPARE
    exchanged: bool = False     # whether tokens are sent by all-to-alls (`exchange`), or gathered

    def __call__(self, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
        """Σ_k weight · expert(x), split like the residual stream. weights: {gate?, up, down}, stored as [params] says."""
        return apply(self, layout, x_BTD, chosen_BTK, weight_BTK, weights)


@dataclasses.dataclass(frozen=True)
class Region:
    """Which axes do what where all are manual. experts, inner: they split the experts and their width; tokens: the tokens."""
    experts: tuple[str, ...]
    inner: tuple[str, ...]
    tokens: tuple[str, ...]
    sizes: Mapping[str, int]
    alone: bool = False     # tokens are here already, and nothing is brought, given or summed
    filled: float = 1.0     # the share of them that has an expert

    @classmethod
    def of(cls, layout: Layout) -> Region:
        tokens = layout.every_axis("activations", "batch") + layout.every_axis("activations", "residual_seq")
        return cls(layout.every_axis("params", "expert"), layout.every_axis("params", "expert_mlp"), tokens, layout.sizes)

    @property
    def own(self) -> tuple[str, ...]:
        return self.experts + self.inner

    @property
    def gathered(self) -> tuple[str, ...]:
        """Tokens of these are brought together, and their sums scattered."""
        return () if self.alone else tuple(a for a in self.tokens if a in self.own)

    @property
    def summed(self) -> tuple[str, ...]:
        """The tokens are the same along these; only their sums are added up."""
        return () if self.alone else tuple(a for a in self.own if a not in self.tokens)

    @property
    def others(self) -> tuple[str, ...]:
        """Other tokens, the same experts: gradients of weights are added up over these."""
        return tuple(a for a in self.tokens if a not in self.own)

    def ways(self, axes) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def even_rows(self, T: int, K: int) -> int:
        """Of this device's experts for T tokens of each device, where all experts are equally busy."""
        return max(1, round(T * K * self.filled * self.ways(self.gathered) / (1 if self.alone else self.ways(self.experts))))

    def first_expert(self, e: int):
        """The number of this device's first expert."""
        index = 0
        for axis in self.experts:
            index = index * self.sizes[axis] + lax.axis_index(axis)
        return index * e

    def bring(self, a):
        """[T, …] -> [A, …]. Sends (N-1)/N of A·…; for x of A·D in the compute dtype."""
        return lax.all_gather(a, self.gathered, axis=0, tiled=True) if self.gathered else a

    def give(self, a):
        """[A, …] of this device's experts -> [T, …] of all."""
        a = psum_scatter(a, self.gathered, 0) if self.gathered else a
        return psum(a, self.summed) if self.summed else a


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply(experts: Experts, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
    ways = Ways.of(layout, weights)

    def local(x_BTD, chosen_BTK, weight_BTK, weights):
        args = *map(_flat, (x_BTD, chosen_BTK, weight_BTK)), ways.in_use(weights, x_BTD.dtype)
        return (_exchanged if experts.exchanged else _forward)(experts, ways.region, *args).reshape(x_BTD.shape)
    return on_shards(local, (ways.tokens,) * 3 + (ways.stored,), ways.tokens)(x_BTD, chosen_BTK, weight_BTK, weights)


def _apply_forward(experts, layout, *args):
    return apply(experts, layout, *args), args


def _apply_backward(experts, layout, saved, dy_BTD):
    """In two regions, so that a pipeline can put the weights' half into W (`parallel.split`): a region is never divided."""
    weights = saved[3]
    # Every device has rows of its own; those of replicas are a vmap's business.
    ways, everywhere = Ways.of(layout, weights), P(tuple(a for a in automatic_axes() if a not in layout.hidden))

    def inputs_half(x_BTD, chosen_BTK, weight_BTK, weights, dy_BTD):
        args = *map(_flat, (x_BTD, chosen_BTK, weight_BTK)), ways.in_use(weights, x_BTD.dtype)
        backward = _exchanged_backward if experts.exchanged else _backward
        dx, dweight, passed_on = backward(experts, ways.region, *args, _flat(dy_BTD))
        return dx.reshape(x_BTD.shape), dweight.reshape(weight_BTK.shape), passed_on

    def weights_half(passed_on):
        return ways.added_up(passed_on.gradients(experts.engine))
    out = ways.tokens, ways.tokens, everywhere
    dx, dweight, passed_on = on_shards(inputs_half, (ways.tokens,) * 3 + (ways.stored, ways.tokens), out)(*saved, dy_BTD)
    dw = on_shards(weights_half, (everywhere,), ways.grads)(passed_on)
    dw = {name: layout.constrain("grads", d, EXPERT_AXES[name]).astype(weights[name].dtype) for name, d in dw.items()}
    return dx, None, dweight, dw


apply.defvjp(_apply_forward, _apply_backward)


def _flat(a):
    return a.reshape(-1, a.shape[-1])


@dataclasses.dataclass(frozen=True)
class Ways:
    """How arrays come into the region and leave it. tokens, stored, grads: PartitionSpecs over the axes that are automatic outside,
    of what is split like tokens, and by name of the weights as they are stored and of their gradients.

    gathers: by name [(dim, axes)] that split no experts, over which a weight is gathered. scatters: the same of gradients, over
    axes with other tokens that [grads] names. rest: the axes over which they are then added up; what a pipeline sums after its
    loop is in neither.
    """
    region: Region
    tokens: P
    stored: dict
    grads: dict
    gathers: dict
    scatters: dict
    rest: dict

    @classmethod
    def of(cls, layout: Layout, names) -> Ways:
        region, axes_of = Region.of(layout), layout.mesh_axes
        automatic = {a for axis in ("batch", "residual_seq") for a in axes_of("activations", axis)}
        by_dim = lambda name, pick: [(dim, axes) for dim, axis in enumerate(EXPERT_AXES[name]) if (axes := pick(axis))]
        own = lambda axis: tuple(a for a in axes_of("params", axis) if a in region.own)
        others = lambda axis: tuple(a for a in axes_of("grads", axis) if a in region.others and a not in own(axis))
        scatters = {name: by_dim(name, others) for name in names}
        unscattered = lambda name: tuple(a for a in region.others if a in automatic
                                         and a not in [a for _, axes in scatters[name] for a in axes])
        return cls(
            region, layout.spec("activations", ("batch", "residual_seq", None)),
            stored={name: layout.spec("params", EXPERT_AXES[name]) for name in names},
            grads={name: P(*(own(axis) + others(axis) or None for axis in EXPERT_AXES[name])) for name in names},
            gathers={name: by_dim(name, lambda axis: tuple(a for a in axes_of("params", axis) if a not in region.own))
                     for name in names},
            scatters=scatters, rest={name: unscattered(name) for name in names})

    def in_use(self, weights, dtype):
        """Cast, then gathered: float32 shards travel in the compute dtype.

        Inside the region, so that nothing of it is kept for the backward, and the backward's gradients stay float32.
        """
        used = {name: w.astype(dtype) for name, w in weights.items()}
        for name, gathers in self.gathers.items():
            for dim, axes in gathers:
                used[name] = lax.all_gather(used[name], axes, axis=dim, tiled=True)
        return used

    def added_up(self, dw):
        """Gradients over other tokens, float32."""
        summed = dict(dw)
        for name, scatters in self.scatters.items():
            for dim, axes in scatters:
                summed[name] = psum_scatter(summed[name], axes, dim)
            if self.rest[name]:
                summed[name] = lax.psum(summed[name], self.rest[name])
        return summed


# ---- one device's part -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a device's experts in one round: their groups, the assignment (token · K + k) of each or -1, and where each
    assignment's row is or -1."""
    groups: grouped.Groups
    assignment_R: jax.Array
    row_AK: jax.Array

    def take(self, a_AD, num_choices: int):
        """What the row's token has, else zero. A product, no `where`: XLA would keep [R, D] of zeros through the layers' loop."""
        used = self.assignment_R >= 0
        return a_AD[jnp.where(used, self.assignment_R // num_choices, 0)] * used[:, None].astype(a_AD.dtype)

    def weight(self, weight_AK):
        return jnp.where(self.assignment_R >= 0, weight_AK.reshape(-1)[jnp.maximum(self.assignment_R, 0)], 0.0)[:, None]

    def sum(self, y_RD, dtype):
        """Each token's rows added in the order of its choices, in float32: gathers, so the same bits every time.

        Row 0 is always written: what is multiplied with zero must be a number. A sum over [A, K, D] takes a CPU twice as long.
        """
        here_KA, row_KA = self.row_AK.T >= 0, jnp.maximum(self.row_AK.T, 0)
        return sum(y_RD[row].astype(jnp.float32) * here[:, None] for row, here in zip(row_KA, here_KA)).astype(dtype)


class Arranged:
    """All assignments sorted by this device's experts, those of others last; `round(n)` has the rows of its n-th part."""

    def __init__(self, experts: Experts, region: Region, chosen_AK, e: int):
        A, K = chosen_AK.shape
        local = chosen_AK.reshape(-1) - region.first_expert(e)
        key = jnp.where((local >= 0) & (local < e), local, e)
        order = _sorted(key, e)
        # A scatter turns the order round: it writes every place once.
        self.place_AK = jnp.zeros(A * K, jnp.int32).at[order].set(jnp.arange(A * K, dtype=jnp.int32), unique_indices=True
                                                                   ).reshape(A, K)
        self.order, self.sizes = order, jnp.sum(key[:, None] == jnp.arange(e), 0, dtype=jnp.int32)
        most, even = A * min(K, e), A * K * e // experts.num_experts
        self.rows = max(1, min(most, math.ceil(experts.spare * even)) if experts.spare else most)
        self.block = experts.engine.block(self.rows, e)
        self.num_blocks = -(-self.rows // self.block) + e
        self.one_round = self.rows >= most

    def round(self, n) -> Rows:
        start, ends = n * self.rows, jnp.cumsum(self.sizes)
        low, high = (jnp.clip(edge - start, 0, self.rows) for edge in (ends - self.sizes, ends))
        groups = grouped.groups_of(high - low, self.num_blocks, self.block)
        at = jnp.arange(self.num_blocks * self.block)
        owner = groups.owner[at // self.block]
        within = at - groups.first[owner] * self.block
        used = (at // self.block < groups.count[0]) & (within < (high - low)[owner])
        assignment_R = jnp.where(used, self.order[jnp.where(used, low[owner] + within + start, 0)], -1)
        place = self.place_AK - start
        here = (place >= 0) & (place < self.rows) & (self.place_AK < ends[-1])
        group = jnp.minimum(jnp.sum(high[None, None] <= place[..., None], -1), len(self.sizes) - 1)
        return Rows(groups, assignment_R, jnp.where(here, groups.first[group] * self.block + place - low[group], -1))

    def further(self, one_round: Callable, first):
        """first + the sum of one_round(rows) over the rounds behind the first; mostly there are none.

        Their count is known on the device alone, and the loop's sums stand beside the first round's.
        """
        if self.one_round:
            return first
        step = lambda carry: (carry[0] + 1, jax.tree.map(jnp.add, carry[1], one_round(self.round(carry[0]))))
        more = lambda carry: carry[0] * self.rows < self.sizes.sum()
        with jax.named_scope(FURTHER_ROUNDS):
            return lax.while_loop(more, step, (jnp.int32(1), first))[1]


def _sorted(key, e: int):
    """The order that sorts the keys 0 … e, equal ones as they come. Packed into one number with the index, keys are unique."""
    n = key.shape[0]
    bits = max(1, (n - 1).bit_length())
    index = jnp.arange(n, dtype=jnp.uint32)
    if bits + e.bit_length() > 32:
        return lax.sort((key, index.astype(jnp.int32)), num_keys=1, is_stable=True)[1]
    return (lax.sort((key.astype(jnp.uint32) << bits) | index) & jnp.uint32((1 << bits) - 1)).astype(jnp.int32)


def _inward(weights) -> list[str]:
    return [name for name in ("gate", "up") if name in weights]


def _forward(experts: Experts, region: Region, x_TD, chosen_TK, weight_TK, weights):
    rows_of, K = experts.engine.rows, chosen_TK.shape[1]
    x_AD, chosen_AK, weight_AK = map(region.bring, (x_TD, chosen_TK, weight_TK))
    arranged = Arranged(experts, region, chosen_AK, weights["down"].shape[0])

    def one_round(rows: Rows):
        x_RD = rows.take(x_AD, K)
        h_RF = experts.activation(*(rows_of(x_RD, weights[name], rows.groups).astype(jnp.float32) for name in _inward(weights)))
        # The weight multiplies here, not behind `down`: its gradient then needs no y.
        y_RD = rows_of((h_RF * rows.weight(weight_AK)).astype(x_RD.dtype), weights["down"], rows.groups)
        return rows.sum(y_RD, x_RD.dtype)
    with jax.named_scope(EVEN_ROWS.format(region.even_rows(*chosen_TK.shape))):
        y_AD = arranged.further(one_round, one_round(arranged.round(0)))
    return region.give(y_AD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassedOn:
    """What the gradients of weights are made of: rows, and the cotangents of what they were multiplied to. more: the gradients of
    further rounds by name, made already; None where one round always suffices."""
    groups: grouped.Groups
    x_RD: jax.Array
    dy_RD: jax.Array
    h_RF: jax.Array         # weighted
    d_inward: dict
    more: dict | None = None
    even_rows: int = dataclasses.field(default=1, metadata={"static": True})

    def gradients(self, engine: grouped.Engine) -> dict:
        """float32, by name."""
        with jax.named_scope(EVEN_ROWS.format(self.even_rows)):
            dw = {name: engine.outer(self.x_RD, d, self.groups) for name, d in self.d_inward.items()}
            dw["down"] = engine.outer(self.h_RF, self.dy_RD, self.groups)
        return dw if self.more is None else jax.tree.map(jnp.add, dw, self.more)


def _backward(experts: Experts, region: Region, x_TD, chosen_TK, weight_TK, weights, dy_TD):
    """(dx, dweight, PassedOn): of this device's tokens; the latter of its experts, over the tokens that it has seen."""
    rows_of, even_rows, K, dtype = experts.engine.rows, region.even_rows(*chosen_TK.shape), chosen_TK.shape[1], x_TD.dtype
    x_AD, chosen_AK, weight_AK, dy_AD = map(region.bring, (x_TD, chosen_TK, weight_TK, dy_TD))
    arranged = Arranged(experts, region, chosen_AK, weights["down"].shape[0])

    def one_round(rows: Rows):
        x_RD, dy_RD, weight_R1 = rows.take(x_AD, K), rows.take(dy_AD, K), rows.weight(weight_AK)
        names, groups = _inward(weights), rows.groups
        h_RF, back = jax.vjp(experts.activation, *(rows_of(x_RD, weights[name], groups).astype(jnp.float32) for name in names))
        dhw_RF = rows_of(dy_RD, weights["down"], groups, transpose=True).astype(jnp.float32)
        dweight_R = (dhw_RF * h_RF).sum(-1)
        d_inward = {name: d.astype(dtype) for name, d in zip(names, back(dhw_RF * weight_R1))}
        dx_RD = sum(rows_of(d, weights[name], groups, transpose=True).astype(jnp.float32) for name, d in d_inward.items())
        here = rows.row_AK >= 0
        dweight_AK = jnp.where(here, dweight_R[jnp.where(here, rows.row_AK, 0)], 0.0)
        hw_RF = (h_RF * weight_R1).astype(dtype)
        return rows.sum(dx_RD, dtype), dweight_AK, PassedOn(groups, x_RD, dy_RD, hw_RF, d_inward, even_rows=even_rows)

    def whole_round(rows: Rows):
        dx_AD, dweight_AK, passed_on = one_round(rows)
        return dx_AD, dweight_AK, passed_on.gradients(experts.engine)
    with jax.named_scope(EVEN_ROWS.format(even_rows)):
        dx_AD, dweight_AK, passed_on = one_round(arranged.round(0))
        if not arranged.one_round:
            none = {name: jnp.zeros(w.shape, jnp.float32) for name, w in weights.items()}
            dx_AD, dweight_AK, more = arranged.further(whole_round, (dx_AD, dweight_AK, none))
            passed_on = dataclasses.replace(passed_on, more=more)
    return region.give(dx_AD), region.give(dweight_AK), passed_on


# ---- the same by all-to-alls -------------------------------------------------------------------------------------------


def _apart(experts: Experts, region: Region, chosen_TK, weights):
    """(Experts, Region, Exchange): each device works on what was sent to it, rows of one choice each, in a buffer that suffices."""
    swap = exchange.Exchange(region.experts, region.ways(region.experts), weights["down"].shape[0], chosen_TK, _sorted)
    return dataclasses.replace(experts, spare=0.0), dataclasses.replace(region, alone=True, filled=swap.filled), swap


def _exchanged(experts: Experts, region: Region, x_TD, chosen_TK, weight_TK, weights):
    experts, alone, swap = _apart(experts, region, chosen_TK, weights)

    def one_round(now: exchange.Round):
        return now.back(_forward(experts, alone, now.send(x_TD), now.chosen(), now.weight(weight_TK), weights)).sum(1)
    return swap.further(one_round, one_round(swap.round(0))).astype(x_TD.dtype)


def _exchanged_backward(experts: Experts, region: Region, x_TD, chosen_TK, weight_TK, weights, dy_TD):
    experts, alone, swap = _apart(experts, region, chosen_TK, weights)

    def one_round(now: exchange.Round):
        args = now.send(x_TD), now.chosen(), now.weight(weight_TK), weights, now.send(dy_TD)
        dx, dweight, passed_on = _backward(experts, alone, *args)
        return now.back(dx).sum(1), now.back(dweight)[..., 0], passed_on

    def whole_round(now: exchange.Round):
        dx, dweight, passed_on = one_round(now)
        return dx, dweight, passed_on.gradients(experts.engine)
    dx, dweight, passed_on = one_round(swap.round(0))
    none = {name: jnp.zeros(w.shape, jnp.float32) for name, w in weights.items()}
    dx, dweight, more = swap.further(whole_round, (dx, dweight, none))
    return dx.astype(x_TD.dtype), dweight, dataclasses.replace(passed_on, more=more)


# ---- what a run file asks for ------------------------------------------------------------------------------------------

ACTIVATIONS = {"swiglu": lambda gate, up: jax.nn.silu(gate) * up, "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
               "gelu": jax.nn.gelu}


def choose(run, layout: Layout, platform: str) -> Experts | None:
    """How this run computes its experts on a platform, as jax calls it; None where it has none."""
    if not run.model.num_experts:
        return None
    engine = grouped.loop() if platform == "cpu" else grouped.kernels()
    return Experts(engine, run.model.num_experts, ACTIVATIONS[run.model.activation], run.experts.aux_loss, run.experts.z_loss,
                   exchanged=dispatch(run.experts.dispatch, run.model.experts_per_token, layout)[0] == "all_to_all")


def problems(run, layout: Layout) -> list[str]:
    """Why experts.dispatch cannot be what the run file says."""
    if not run.model.num_experts or run.experts.dispatch != "all_to_all" or not (against := _against_exchange(layout)):
        return []
    return [f'experts.dispatch="all_to_all": {against}; use "gather"']


def note(run, layout: Layout) -> str:
    """How tokens reach their experts, and why so; "" where none travel."""
    region = Region.of(layout)
    if not run.model.num_experts or not region.own:
        return ""
    method, why = dispatch(run.experts.dispatch, run.model.experts_per_token, layout)
    return f"experts: {method} over {' × '.join(f'{a} {layout.sizes[a]}' for a in region.own)}" + (f", because {why}" if why else "")


def _against_exchange(layout: Layout) -> str:
    region = Region.of(layout)
    if region.inner or not region.experts:
        return f"{layout.rules.path} [params] splits experts over {list(region.experts)} and their width over {list(region.inner)}, " \
               "and tokens are only sent where experts are split, and whole"
    if region.summed:
        return f"{layout.rules.path} splits no tokens over {list(region.summed)}, which splits experts"
    return ""


def dispatch(asked: str, K: int, layout: Layout) -> tuple[str, str]:
    """(gather or all_to_all, why). Both send equally often; a gather (n-1)·T·D, an all-to-all CAPACITY·K·T·D·(n-1)/n."""
    if asked != "auto":
        return asked, f"experts.dispatch={asked}"
    if against := _against_exchange(layout):
        return "gather", against
    if layout.sizes["stage"] > 1:
        return "gather", "rounds of an all-to-all cannot be divided into a pipeline's B and W"
    ways = layout.ways(Region.of(layout).experts)
    cheaper = ways < exchange.CAPACITY * K
    return ("gather" if cheaper else "all_to_all"), f"{ways} ways are {'less' if cheaper else 'not less'} than {exchange.CAPACITY} × {K} experts a token"
