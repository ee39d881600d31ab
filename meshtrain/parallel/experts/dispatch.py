"""The routed experts of a layer over a mesh: tokens go where their experts are, and nothing is ever dropped.

The rules say what splits the experts ([params] expert, expert_mlp) and what splits tokens. Tokens are brought together
over the axes that split both, each device works on the rows that chose its experts, and the sums are scattered back: a
gather and a reduce-scatter of T·D each way. Over `tensor` with sequence parallelism that is what a dense MLP sends,
too. All of it, and the gathers of weights that are split further (ZeRO-3), stands in one region where every axis is
manual, both directions written out. Where many devices share the experts or K is small, `exchange` sends less.
The rows of a device's experts lie in a buffer of SPARE times their even share; where more come, further rounds take the
rest. Dims: A tokens after the gather, K experts of a token, e experts of this device, F their width, R rows.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import grouped
from meshtrain.names import EVEN_ROWS, EXPERT_AXES
from meshtrain.parallel.experts import all_to_all
from meshtrain.parallel.experts.permutation import Arranged, ExpertRows, sorted_by
from meshtrain.sharding.mesh import automatic_axes, on_shards, psum, psum_scatter
from meshtrain.sharding.rules import Layout

# With random choices a device of 16 among 128 experts gets up to 1.1 times its share; what is spared costs memory
# alone.
SPARE = 1.25


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedExperts:
    """How a run computes its experts. activation(inward products) -> h; spare: see SPARE, 0 for a buffer that always
    suffices.

    aux_loss, z_loss: weights of the losses that a layer's router makes. kept: whether the forward leaves what the
    inward matrices give to the backward (`keeps`).
    """
    engine: grouped.GroupedEngine
    num_experts: int
    activation: Callable
    aux_loss: float = 0.0
    z_loss: float = 0.0
    spare: float = SPARE
    kept: bool = False
    exchanged: bool = False     # whether tokens are sent by all-to-alls (`exchange`), or gathered

    def __call__(self, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
        """Σ_k weight · expert(x), split like the residual stream. weights: {gate?, up, down}, stored as [params]
        says."""
        return apply(self, layout, x_BTD, chosen_BTK, weight_BTK, weights)


@dataclasses.dataclass(frozen=True)
class Region:
    """Which axes do what where all are manual. experts, inner: they split the experts and their width; tokens: the
    tokens."""
    experts: tuple[str, ...]
    inner: tuple[str, ...]
    tokens: tuple[str, ...]
    sizes: Mapping[str, int]
    alone: bool = False     # tokens are here already, and nothing is brought, given or summed
    filled: float = 1.0     # the share of them that has an expert

    @classmethod
    def of(cls, layout: Layout) -> Region:
        tokens = layout.all_axes("activations", "batch") + layout.all_axes("activations", "residual_seq")
        return cls(layout.all_axes("params", "expert"), layout.all_axes("params", "expert_mlp"), tokens, layout.sizes)

    @property
    def own(self) -> tuple[str, ...]:
        return self.experts + self.inner

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which tokens are all-gathered before the experts and outputs reduce-scattered after them."""
        return () if self.alone else tuple(a for a in self.tokens if a in self.own)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes along which tokens are replicated: outputs are all-reduced over them."""
        return () if self.alone else tuple(a for a in self.own if a not in self.tokens)

    @property
    def others(self) -> tuple[str, ...]:
        """Axes that split tokens but not experts: weight gradients are summed over them."""
        return tuple(a for a in self.tokens if a not in self.own)

    def num_shards(self, axes) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def even_rows(self, T: int, K: int) -> int:
        """Of this device's experts for T tokens of each device, where all experts are equally busy."""
        return max(1,
                   round(T * K * self.filled * self.num_shards(self.gathered) / (
                       1 if self.alone else self.num_shards(self.experts))))

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
def apply(experts: RoutedExperts, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
    return _apply_forward(experts, layout, x_BTD, chosen_BTK, weight_BTK, weights)[0]


def _apply_forward(experts, layout, x_BTD, chosen_BTK, weight_BTK, weights):
    shards = ExpertShards.of(layout, weights)

    def local(x_BTD, chosen_BTK, weight_BTK, weights):
        tokens = RoutedTokens(*map(_flat, (x_BTD, chosen_BTK, weight_BTK)))
        matrices = shards.gathered(experts.engine, weights, x_BTD.dtype)
        y_TD, inward = (_exchanged if experts.exchanged else _forward)(experts, shards.region, tokens, matrices)
        return y_TD.reshape(x_BTD.shape), inward if experts.kept else None
    args = x_BTD, chosen_BTK, weight_BTK, weights
    y_BTD, kept = on_shards(local, (shards.tokens,) * 3 + (shards.stored,), (shards.tokens, _everywhere()))(*args)
    return y_BTD, (*args, kept)


def _everywhere() -> P:
    """Every device has rows of its own."""
    return P(automatic_axes())


def _apply_backward(experts, layout, saved, dy_BTD):
    """In one region; with stages in two, so that a pipeline can put the weights' half into W (`layer_vjp`): a region is
    never divided."""
    weights, shards, staged = saved[3], ExpertShards.of(layout, saved[3]), layout.sizes["stage"] > 1

    def inputs_half(x_BTD, chosen_BTK, weight_BTK, weights, kept, dy_BTD):
        tokens = RoutedTokens(*map(_flat, (x_BTD, chosen_BTK, weight_BTK)))
        matrices, dy_TD = shards.gathered(experts.engine, weights, x_BTD.dtype), _flat(dy_BTD)
        backward = _exchanged_backward if experts.exchanged else _backward
        dx, dweight, rest = backward(experts, shards.region, tokens, matrices, kept, dy_TD, staged)
        return dx.reshape(x_BTD.shape), dweight.reshape(weight_BTK.shape), rest if staged else shards.added_up(rest)

    def weights_half(passed_on):
        return shards.added_up(passed_on.gradients(experts.engine, shards.axes))
    everywhere = _everywhere()
    out = shards.tokens, shards.tokens, everywhere if staged else shards.grads
    dx, dweight, dw = on_shards(inputs_half, (shards.tokens,) * 3 + (shards.stored, everywhere, shards.tokens),
                                out)(*saved, dy_BTD)
    if staged:
        dw = on_shards(weights_half, (everywhere,), shards.grads)(dw)
    dw = {name: layout.constrain("grads", d, EXPERT_AXES[name]).astype(weights[name].dtype) for name, d in dw.items()}
    return dx, None, dweight, dw


apply.defvjp(_apply_forward, _apply_backward)


def _flat(a):
    return a.reshape(-1, a.shape[-1])


@dataclasses.dataclass(frozen=True)
class ExpertShards:
    """How arrays come into the region and leave it. tokens, stored, grads: PartitionSpecs over the axes that are
    automatic outside, of what is split like tokens, and by name of the weights as they are stored and of their
    gradients.

    axes: by name the logical axes of a weight's dims where it is multiplied. gathers: by name [(axis, mesh axes)] that
    split no experts, over which a weight is gathered. scatters: the same of gradients, over mesh axes with other tokens
    that [grads] names. rest: those over which they are then added up; what a pipeline sums after its loop is in
    neither.
    """
    region: Region
    tokens: P
    stored: dict
    grads: dict
    axes: dict
    gathers: dict
    scatters: dict
    rest: dict

    @classmethod
    def of(cls, layout: Layout, names) -> ExpertShards:
        region, axes_of = Region.of(layout), layout.mesh_axes
        automatic = {a for axis in ("batch", "residual_seq") for a in axes_of("activations", axis)}
        by_axis = lambda name, pick: [(axis, axes) for axis in EXPERT_AXES[name] if (axes := pick(axis))]
        own = lambda axis: tuple(a for a in axes_of("params", axis) if a in region.own)
        others = lambda axis: tuple(a for a in axes_of("grads", axis) if a in region.others and a not in own(axis))
        gathered = lambda axis: tuple(a for a in axes_of("params", axis) if a not in region.own)
        scatters = {name: by_axis(name, others) for name in names}
        # Shards lie one behind the other: joined and parted along any dim but the first, all of a weight is turned.
        embed_first = bool(gathered("expert_embed") or others("expert_embed"))
        unscattered = lambda name: tuple(a for a in region.others if a in automatic
                                         and a not in [a for _, axes in scatters[name] for a in axes])
        return cls(
            region, layout.spec("activations", ("batch", "residual_seq", None)),
            stored={name: layout.spec("params", EXPERT_AXES[name]) for name in names},
            grads={name: P(*(own(axis) + others(axis) or None for axis in EXPERT_AXES[name])) for name in names},
            axes={name: ("expert_embed", "expert", "expert_mlp") if embed_first else EXPERT_AXES[name]
                  for name in names},
            gathers={name: by_axis(name, gathered) for name in names}, scatters=scatters,
            rest={name: unscattered(name) for name in names})

    def gathered(self, engine: grouped.GroupedEngine, weights, dtype) -> ExpertMatrices:
        """Cast, then gathered: float32 shards travel in the compute dtype.

        Inside the region, so that nothing of it is kept for the backward, and the backward's gradients stay float32.
        """
        used = {}
        for name, w in weights.items():
            used[name] = _in_order(w.astype(dtype), EXPERT_AXES[name], self.axes[name])
            for axis, axes in self.gathers[name]:
                used[name] = lax.all_gather(used[name], axes, axis=self.axes[name].index(axis), tiled=True)
        return ExpertMatrices(engine, used, self.axes)

    def added_up(self, dw):
        """Gradients over other tokens, float32, as weights are stored."""
        summed = dict(dw)
        for name, scatters in self.scatters.items():
            for axis, axes in scatters:
                summed[name] = psum_scatter(summed[name], axes, self.axes[name].index(axis))
            if self.rest[name]:
                summed[name] = lax.psum(summed[name], self.rest[name])
        return {name: _in_order(d, self.axes[name], EXPERT_AXES[name]) for name, d in summed.items()}


def _in_order(a, axes: tuple[str, ...], wanted: tuple[str, ...]):
    return a if axes == wanted else a.transpose([axes.index(axis) for axis in wanted])


# ---- one device's part -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ExpertMatrices:
    """Of this device's experts, by name. axes: the order of their dims."""
    engine: grouped.GroupedEngine
    arrays: dict
    axes: dict

    @property
    def e(self) -> int:
        return self.arrays["down"].shape[self.axes["down"].index("expert")]

    @property
    def inward(self) -> list[str]:
        return [name for name in ("gate", "up") if name in self.arrays]

    def rows(self, by_name: Mapping, summed: str, groups: grouped.Groups, *then_and_beside):
        """The sum of rows by name, each times its matrices, as an engine's `rows`; summed: the logical axis that they
        share."""
        pairs = [grouped.GroupedOperands(x, self.arrays[name], _letters(self.axes[name], summed))
                 for name, x in by_name.items()]
        return self.engine.rows(pairs, groups, *then_and_beside)

    def zeros(self) -> dict:
        return {name: jnp.zeros(w.shape, jnp.float32) for name, w in self.arrays.items()}


def _letters(axes: tuple[str, ...], summed: str) -> str:
    """The order of dims as `grouped` has it."""
    return "".join("g" if axis == "expert" else "k" if axis == summed else "n" for axis in axes)


def _arranged(experts: RoutedExperts, region: Region, chosen_AK, matrices: ExpertMatrices) -> Arranged:
    e = matrices.e
    return Arranged(chosen_AK, region.first_expert(e), e, experts.num_experts, experts.spare, experts.engine.block)


class RoutedTokens(NamedTuple):
    """Tokens, the experts that each goes to, and what their outputs weigh."""
    x_TD: jax.Array
    chosen_TK: jax.Array
    weight_TK: jax.Array


def _forward(experts: RoutedExperts, region: Region, tokens: RoutedTokens, matrices: ExpertMatrices):
    """y, and of the first round what the inward matrices give."""
    K = tokens.chosen_TK.shape[1]
    x_AD, chosen_AK, weight_AK = map(region.bring, tokens)
    arranged = _arranged(experts, region, chosen_AK, matrices)

    def weighted(last, weight_R1, *others):
        # The weight multiplies here, not behind `down`: its gradient then needs no y.
        h = experts.activation(*(a.astype(jnp.float32) for a in others), last)
        return h * weight_R1, *([last] if experts.kept else [])

    def one_round(rows: ExpertRows):
        x_RD, groups, (*others, last) = experts.engine.take(x_AD, rows.token(K)), rows.groups, matrices.inward
        inward = [matrices.rows({name: x_RD}, "expert_embed", groups)[0] for name in others]
        hw_RF, *made = matrices.rows({last: x_RD}, "expert_embed", groups, weighted, [rows.weight(weight_AK), *inward])
        (y_RD,) = matrices.rows({"down": hw_RF}, "expert_mlp", groups)
        return rows.sum(y_RD, x_AD.dtype), [*inward, *made]
    with jax.named_scope(EVEN_ROWS.format(region.even_rows(*tokens.chosen_TK.shape))):
        y_AD, inward = one_round(arranged.round(0))
        y_AD = arranged.further(lambda rows: one_round(rows)[0], y_AD)
    return region.give(y_AD), inward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassedOn:
    """What the gradients of weights are made of: rows, and the cotangents of what they were multiplied to. more: the
    gradients of further rounds by name, made already; None where one round always suffices."""
    groups: grouped.Groups
    x_RD: jax.Array | grouped.Taken
    dy_RD: jax.Array | grouped.Taken
    hw_RF: jax.Array        # h, weighted
    d_inward: dict
    more: dict | None = None
    even_rows: int = dataclasses.field(default=1, metadata={"static": True})

    def gradients(self, engine: grouped.GroupedEngine, axes: Mapping[str, tuple]) -> dict:
        """float32, by name; axes: the order of their dims."""
        with jax.named_scope(EVEN_ROWS.format(self.even_rows)):
            outer = lambda x_RD, d_RF, name: engine.outer(x_RD, d_RF, self.groups, _letters(axes[name], "expert_embed"))
            dw = {name: outer(self.x_RD, d, name) for name, d in self.d_inward.items()} | {
                "down": outer(self.dy_RD, self.hw_RF, "down")}
        return dw if self.more is None else jax.tree.map(jnp.add, dw, self.more)


def _backward(experts: RoutedExperts, region: Region, tokens: RoutedTokens, matrices: ExpertMatrices, kept, dy_TD,
              apart: bool):
    """(dx, dweight, gradients of this device's experts over the tokens that it has seen; apart: PassedOn). kept: of the
    first round what the inward matrices give, or None."""
    even_rows, K, dtype = region.even_rows(*tokens.chosen_TK.shape), tokens.chosen_TK.shape[1], tokens.x_TD.dtype
    x_AD, chosen_AK, weight_AK, dy_AD = map(region.bring, (*tokens, dy_TD))
    arranged = _arranged(experts, region, chosen_AK, matrices)

    def gradients(dhw, weight_R1, *inward):
        h, back = jax.vjp(experts.activation, *(a.astype(jnp.float32) for a in inward))
        dweight = (dhw * h).sum(1)
        return h * weight_R1, dweight, *back(dhw * weight_R1)

    def one_round(rows: ExpertRows, inward=None):
        x_RD, dy_RD = (experts.engine.take(a, rows.token(K)) for a in (x_AD, dy_AD))
        names, groups = matrices.inward, rows.groups
        inward = inward or [matrices.rows({name: x_RD}, "expert_embed", groups)[0] for name in names]
        beside = [rows.weight(weight_AK), *inward]
        hw_RF, dweight_R, *d_inward = matrices.rows({"down": dy_RD}, "expert_embed", groups, gradients, beside)
        d_inward = dict(zip(names, d_inward, strict=True))
        (dx_RD,) = matrices.rows(d_inward, "expert_mlp", groups)
        here = rows.row_AK >= 0
        dweight_AK = jnp.where(here, dweight_R[jnp.where(here, rows.row_AK, 0)], 0.0)
        return rows.sum(dx_RD, dtype), dweight_AK, PassedOn(groups, x_RD, dy_RD, hw_RF, d_inward, even_rows=even_rows)
    with jax.named_scope(EVEN_ROWS.format(even_rows)):
        dx_AD, dweight_AK, rest = _rounds(arranged, one_round, kept, matrices, apart, arranged.one_round)
    return region.give(dx_AD), region.give(dweight_AK), rest


def _rounds(of: Arranged | all_to_all.Exchange, one_round: Callable, kept, matrices: ExpertMatrices,
            apart: bool, alone: bool):
    """(dx, dweight, gradients or, apart, PassedOn) of the first round and those behind it; alone: there are none.

    Further rounds run twice, for inputs and for weights: their sums begin with the first round's in place. One loop for
    both would begin with zeros as large as all gradients in every step, mostly for nothing, or hold dx back until the
    gradients are made.
    """
    gradients = lambda passed_on: passed_on.gradients(matrices.engine, matrices.axes)
    dx, dweight, passed_on = one_round(of.round(0), kept)
    if not apart:
        dx, dweight = of.further(lambda now: one_round(now)[:2], (dx, dweight))
        return dx, dweight, of.further(lambda now: gradients(one_round(now)[2]), gradients(passed_on))
    if alone:
        return dx, dweight, passed_on

    def whole_round(now):
        dx, dweight, passed_on = one_round(now)
        return dx, dweight, gradients(passed_on)
    dx, dweight, more = of.further(whole_round, (dx, dweight, matrices.zeros()))
    return dx, dweight, dataclasses.replace(passed_on, more=more)


# ---- the same by all-to-alls -----------------------------------------------------------------------------------------


def _apart(experts: RoutedExperts, region: Region, chosen_TK, matrices: ExpertMatrices):
    """(Experts, Region, Exchange): each device works on what was sent to it, rows of one choice each, in a buffer that
    suffices."""
    swap = all_to_all.Exchange(region.experts, region.num_shards(region.experts), matrices.e, chosen_TK, sorted_by)
    return dataclasses.replace(experts, spare=0.0), dataclasses.replace(region, alone=True, filled=swap.filled), swap


def _exchanged(experts: RoutedExperts, region: Region, tokens: RoutedTokens, matrices: ExpertMatrices):
    experts, alone, swap = _apart(experts, region, tokens.chosen_TK, matrices)

    def one_round(now: all_to_all.Round):
        sent = RoutedTokens(now.send(tokens.x_TD), now.chosen(), now.weight(tokens.weight_TK))
        y, inward = _forward(experts, alone, sent, matrices)
        return now.back(y).sum(1), inward
    y_TD, inward = one_round(swap.round(0))
    return swap.further(lambda now: one_round(now)[0], y_TD).astype(tokens.x_TD.dtype), inward


def _exchanged_backward(experts: RoutedExperts, region: Region, tokens: RoutedTokens, matrices: ExpertMatrices, kept,
                        dy_TD, apart: bool):
    experts, alone, swap = _apart(experts, region, tokens.chosen_TK, matrices)

    def one_round(now: all_to_all.Round, inward=None):
        sent = RoutedTokens(now.send(tokens.x_TD), now.chosen(), now.weight(tokens.weight_TK))
        dx, dweight, passed_on = _backward(experts, alone, sent, matrices, inward, now.send(dy_TD), True)
        return now.back(dx).sum(1), now.back(dweight)[..., 0], passed_on
    dx, dweight, rest = _rounds(swap, one_round, kept, matrices, apart, False)
    return dx.astype(tokens.x_TD.dtype), dweight, rest


# ---- what a run file asks for ----------------------------------------------------------------------------------------

ACTIVATIONS = {"swiglu": lambda gate, up: jax.nn.silu(gate) * up, "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
               "gelu": jax.nn.gelu}


def choose(run, layout: Layout, platform: str) -> RoutedExperts | None:
    """How this run computes its experts on a platform, as jax calls it; None where it has none."""
    if not run.model.num_experts:
        return None
    engine = grouped.loop() if platform == "cpu" else grouped.kernels()
    return RoutedExperts(engine, run.model.num_experts, ACTIVATIONS[run.model.activation],
                         run.experts.aux_loss, run.experts.z_loss,
                   kept=keeps(run.training.remat, layout.sizes["stage"]),
                   exchanged=dispatch(run.experts.dispatch, run.model.experts_per_token, layout)[0] == "all_to_all")


def keeps(remat: str, stages: int) -> bool:
    """Whether what gate and up give waits for the backward: two of eleven products less, for rows as wide as two
    experts. Under `selective` they are more bytes than all else that it keeps, for less time, and in stages they would
    wait in every slot."""
    return remat == "none" and stages == 1


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
    return f"experts: {method} over {' × '.join(f'{a} {layout.sizes[a]}' for a in region.own)}" + (
        f", because {why}" if why else "")


def _against_exchange(layout: Layout) -> str:
    region = Region.of(layout)
    if region.inner or not region.experts:
        return (f"{layout.rules.path} [params] splits experts over {list(region.experts)} and their width over "
                f"{list(region.inner)}, and tokens are only sent where experts are split, and whole")
    if region.summed:
        return f"{layout.rules.path} splits no tokens over {list(region.summed)}, which splits experts"
    return ""


def dispatch(asked: str, K: int, layout: Layout) -> tuple[str, str]:
    """(gather or all_to_all, why). Both send equally often; a gather (n-1)·T·D, an all-to-all
    CAPACITY·K·T·D·(n-1)/n."""
    if asked != "auto":
        return asked, f"experts.dispatch={asked}"
    if against := _against_exchange(layout):
        return "gather", against
    if layout.sizes["stage"] > 1:
        return "gather", "rounds of an all-to-all cannot be divided into a pipeline's B and W"
    num_shards = layout.num_shards(Region.of(layout).experts)
    cheaper = num_shards < all_to_all.CAPACITY * K
    why = (f"{num_shards} shards are {'less' if cheaper else 'not less'} than {all_to_all.CAPACITY} × {K} experts a "
           f"token")
    return ("gather" if cheaper else "all_to_all"), why
