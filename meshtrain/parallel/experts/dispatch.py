"""Expert parallelism of a layer: tokens are dispatched to the devices of their experts. No token is dropped.

The rules `expert` and `expert_mlp` in [params] say which mesh axes split the experts. There are two dispatches.

gather: tokens are all-gathered over the axes that split both tokens and experts. Each device multiplies the rows of its
own experts, and outputs are reduce-scattered. T·D elements move each way, as in a dense MLP with sequence parallelism.

all_to_all: each token is sent only to the devices of its experts. This moves less if many devices share the experts.

Both run in one manual region (shard_map) with the weight gathers of ZeRO-3 and an explicit backward. A device's rows
are in a buffer of CAPACITY_FACTOR times the balanced load. Overflow is processed in further rounds.

Dims: A tokens after the gather, K experts of a token, e experts of this device, F their width, R rows.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.kernels import grouped
from meshtrain.names import EXPERT_AXES
from meshtrain.parallel.experts import all_to_all
from meshtrain.parallel.experts.permutation import ExpertRows, SortedAssignments
from meshtrain.parallel.experts.region import ExpertShards, ManualRegion
from meshtrain.scopes import BALANCED_ROWS, FURTHER_ROUNDS
from meshtrain.sharding import reduced
from meshtrain.sharding.mesh import automatic_axes, on_shards
from meshtrain.sharding.rules import Layout

# Size of the row buffer, divided by the balanced load. With random routing a device with 16 of 128 experts gets up to
# 1.1 times the balanced load. A larger buffer costs only memory. Tried and left out: splitting a device's tokens into
# two halves within the region, each with its own buffer. By the roofline of 64 H100, the tokens of Qwen3-30B-A3B were
# hidden entirely (exposed time 35 ms to 0), but the gathers of the experts' weights were exposed more (165 ms to 327),
# and the gradients of the halves had to be added: the step took 3.21 s instead of 2.97. Mixtral by all-to-alls over 8
# devices took 7.68 s instead of 7.59.
CAPACITY_FACTOR = 1.25
ADAPTERS = "_a", "_b"       # ends of the names of adapters' matrices


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Settings with which a run's experts are executed. The caller adds the biases of the experts' outputs.

    activation: maps the outputs of the inward matrices (gate, up) to h. capacity_factor: see CAPACITY_FACTOR; with 0
    the buffer holds any load. saves_inward: see the function `saves_inward`. adapter_scale: alpha/rank of [lora].
    """
    engine: grouped.GroupedEngine
    num_experts: int
    activation: Callable
    capacity_factor: float = CAPACITY_FACTOR
    saves_inward: bool = False
    by_all_to_all: bool = False
    adapter_scale: float = 1.0

    def __call__(self, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
        """Return Σ_k weight · expert(x), sharded like the residual stream.

        weights: {gate?, up, down, gate_bias?, up_bias?}, and adapters {gate_a?, gate_b?, …}, sharded as in [params].
        If there are adapters, only they have gradients.
        """
        return apply(self, layout, x_BTD, chosen_BTK, weight_BTK, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply(experts: RoutedExperts, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
    return _apply_forward(experts, layout, x_BTD, chosen_BTK, weight_BTK, weights)[0]


def _apply_forward(experts, layout: Layout, x_BTD, chosen_BTK, weight_BTK, weights):
    shards = ExpertShards.of(layout, weights)

    def local(x_BTD, chosen_BTK, weight_BTK, weights):
        tokens = RoutedTokens(*map(_flat, (x_BTD, chosen_BTK, weight_BTK)))
        # Gathers run in the order in which they start. The inward matrices are gathered during the mixer, then the
        # tokens. The outward matrix is needed last and is gathered during the inward matmuls. Weights are cast before a
        # barrier, because XLA does not remove a cast to float32 and back across it.
        down = {"down": weights["down"].astype(x_BTD.dtype)}
        arrays = shards.gather({name: w for name, w in weights.items() if name != "down"}, x_BTD.dtype)
        if not experts.by_all_to_all:
            tokens, arrays = lax.optimization_barrier((tokens, arrays))
            tokens = RoutedTokens(*map(shards.region.gather_tokens, tokens))
            tokens, down = lax.optimization_barrier((tokens, down))
        matrices = ExpertMatrices(experts.engine, arrays | shards.gather(down, x_BTD.dtype), shards.axes,
                                  experts.adapter_scale)
        y_TD, inward = (_forward_by_all_to_all if experts.by_all_to_all else _forward)(
            experts, shards.region, tokens, matrices)
        return y_TD.reshape(x_BTD.shape), inward if experts.saves_inward else None
    args = x_BTD, chosen_BTK, weight_BTK, weights
    y_BTD, inward = on_shards(local, (shards.tokens,) * 3 + (shards.stored,), (shards.tokens, _everywhere()))(*args)
    return y_BTD, (*args, inward)


def _everywhere() -> P:
    """Return the spec of arrays whose dim 0 is split over all automatic axes."""
    return P(automatic_axes())


def _apply_backward(experts, layout: Layout, residuals, dy_BTD):
    """Return (dx, None, dweight, dw) by one manual region, or by two with pipeline stages.

    With stages, the first region computes input gradients and the second computes weight gradients, so that a schedule
    can run the second region in W. `training.backward` cannot divide a region.
    """
    weights, shards, staged = residuals[3], ExpertShards.of(layout, residuals[3]), layout.sizes["stage"] > 1
    dtype = reduced.dtype_of(layout)

    def inputs_half(x_BTD, chosen_BTK, weight_BTK, weights, inward, dy_BTD):
        tokens, dy_TD = RoutedTokens(*map(_flat, (x_BTD, chosen_BTK, weight_BTK))), _flat(dy_BTD)
        if not experts.by_all_to_all:
            tokens = RoutedTokens(*map(shards.region.gather_tokens, tokens))
        # A layer's backward begins here. No computation can hide gathers yet, and gathers queue in the order in which
        # they start. So x and the values from which x is computed come first, then dy and the weights, one of which the
        # first matmul needs.
        weights = {name: w.astype(x_BTD.dtype) for name, w in weights.items()}
        (tokens, dy_TD), weights = lax.optimization_barrier(((tokens, dy_TD), weights))
        matrices = ExpertMatrices(experts.engine, shards.gather(weights, x_BTD.dtype), shards.axes,
                                  experts.adapter_scale)
        backward = _backward_by_all_to_all if experts.by_all_to_all else _backward
        dx, dweight, rest = backward(experts, shards.region, tokens, matrices, inward, dy_TD, staged)
        reduced = rest if staged else shards.reduce(rest, dtype)
        return dx.reshape(x_BTD.shape), dweight.reshape(weight_BTK.shape), reduced

    def weights_half(operands):
        return shards.reduce(operands.gradients(experts.engine, shards.axes), dtype)
    everywhere, grads = _everywhere(), {name: shards.grads[name] for name in _find_trained(weights)}
    out = shards.tokens, shards.tokens, everywhere if staged else grads
    dx, dweight, dw = on_shards(inputs_half, (shards.tokens,) * 3 + (shards.stored, everywhere, shards.tokens),
                                out)(*residuals, dy_BTD)
    if staged:
        dw = on_shards(weights_half, (everywhere,), grads)(dw)
    dw = {name: layout.constrain("grads", d, EXPERT_AXES[name]).astype(weights[name].dtype) for name, d in dw.items()}
    return dx, None, dweight, dict.fromkeys(weights) | dw


apply.defvjp(_apply_forward, _apply_backward)


def _flat(a):
    return a.reshape(-1, a.shape[-1])


def _find_trained(weights: Mapping) -> list[str]:
    """Return the names of the weights that have gradients: the adapters, or all if there are none."""
    return [name for name in weights if name.endswith(ADAPTERS)] or list(weights)


# ---- one device's part -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ExpertMatrices:
    """The matrices of this device's experts by name. axes: the order of their dims. scale: the adapters' alpha /
    rank."""
    engine: grouped.GroupedEngine
    arrays: dict
    axes: dict
    scale: float = 1.0

    @property
    def e(self) -> int:
        return self.arrays["down"].shape[self.axes["down"].index("expert")]

    @property
    def inward(self) -> list[str]:
        return [name for name in ("gate", "up") if name in self.arrays]

    def rows(self, by_name: Mapping, columns: str | None, groups: grouped.Groups, *epilogue):
        """Return Σ over names of rows × the matrix of that name (`GroupedEngine.rows`).

        columns: the logical axis of the result's columns; None: the rank of an adapter.
        """
        pairs = [grouped.GroupedOperands(x, self.arrays[name], _letters(self.axes[name], columns))
                 for name, x in by_name.items()]
        return self.engine.rows(pairs, groups, *epilogue)

    def with_adapters(self, by_name: Mapping, groups: grouped.Groups, order: str = "ab") -> dict:
        """Return the rows by name, with the rows of the adapters added: alpha/rank · x·A under B's name. The products
        are summed.

        order: "ba" for cotangents of outputs, which are multiplied by Bᵀ, then by Aᵀ.
        """
        out = dict(by_name)
        for name, x in by_name.items():
            first, second = (f"{name}_{matrix}" for matrix in order)
            if first in self.arrays:
                (out[second],) = self.rows({first: x}, None, groups, lambda h: (h * self.scale,))
        return out

    def inward_rows(self, name: str, operands: Mapping, groups: grouped.Groups, then: Callable = grouped.as_it_is,
                    beside=()):
        """Return `rows` of one inward matrix with its adapter. The bias of each row's expert is added before `then`.

        operands: the result of `with_adapters`, which may also have operands of other matrices."""
        bias = self.arrays.get(f"{name}_bias")
        operands = {key: operands[key] for key in (name, f"{name}_b") if key in operands}
        if bias is None:
            return self.rows(operands, "expert_mlp", groups, then, beside)
        owner_R, _ = grouped.owners(groups, operands[name])

        def add_bias(y, bias, *beside):
            return then(y + bias.astype(y.dtype), *beside)
        return self.rows(operands, "expert_mlp", groups, add_bias, [bias[owner_R], *beside])

    def zeros(self) -> dict:
        return {name: jnp.zeros(self.arrays[name].shape, jnp.float32) for name in _find_trained(self.arrays)}


def _letters(axes: tuple[str | None, ...], columns: str | None) -> str:
    """Return the order of the dims in the letters of `grouped`."""
    return "".join("g" if axis == "expert" else "n" if axis == columns else "k" for axis in axes)


def _sort_assignments(experts: RoutedExperts, region: ManualRegion, chosen_AK, e: int) -> SortedAssignments:
    return SortedAssignments(chosen_AK, region.first_expert(e), e, experts.num_experts, experts.capacity_factor,
                             experts.engine.block)


class RoutedTokens(NamedTuple):
    """Tokens, their chosen experts and the weights of the experts' outputs."""
    x_TD: jax.Array
    chosen_TK: jax.Array
    weight_TK: jax.Array


def _forward(experts: RoutedExperts, region: ManualRegion, tokens: RoutedTokens, matrices: ExpertMatrices):
    """Return (y [T, D], outputs of gate and up in the first round). tokens: after the gather."""
    (x_AD, chosen_AK, weight_AK), K = tokens, tokens.chosen_TK.shape[1]
    assignments = _sort_assignments(experts, region, chosen_AK, matrices.e)

    def weigh(last, weight_R1, *others):
        # The weight is applied before `down`, so its gradient does not need y.
        h = experts.activation(*(a.astype(jnp.float32) for a in others), last)
        return h * weight_R1, *([last] if experts.saves_inward else [])

    def one_round(rows: ExpertRows):
        x_RD, groups, (*others, last) = experts.engine.take(x_AD, rows.token(K)), rows.groups, matrices.inward
        operands = matrices.with_adapters(dict.fromkeys(matrices.inward, x_RD), groups)
        inward = [matrices.inward_rows(name, operands, groups)[0] for name in others]
        hw_RF, *saved = matrices.inward_rows(last, operands, groups, weigh, [rows.weight(weight_AK), *inward])
        (y_RD,) = matrices.rows(matrices.with_adapters({"down": hw_RF}, groups), "expert_embed", groups)
        return rows.sum(y_RD, x_AD.dtype), [*inward, *saved]
    T = len(x_AD) // region.num_shards(region.gathered)
    with jax.named_scope(BALANCED_ROWS.write(region.rows_if_balanced(T, K))):
        y_AD, inward = one_round(assignments.round(0))
        y_AD = _add_further_rounds(assignments, lambda rows: one_round(rows)[0], y_AD)
    return region.combine(y_AD), inward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightGradOperands:
    """Operands of the weight gradients of the first round: rows and cotangents.

    low: scaled values [R, rank] between the matrices of an adapter: the rows after A under B's name, and the cotangents
    under A's name. more: the gradients of further rounds by name; None if there are no further rounds.
    """
    groups: grouped.Groups
    x_RD: jax.Array | grouped.Taken
    dy_RD: jax.Array | grouped.Taken
    hw_RF: jax.Array        # h, weighted
    d_inward: dict
    low: dict
    more: dict | None = None
    balanced_rows: int = dataclasses.field(default=1, metadata={"static": True})

    def gradients(self, engine: grouped.GroupedEngine, axes: Mapping[str, tuple]) -> dict:
        """Return the weight gradients by name, float32. axes: the order of the dims of each weight."""
        # name -> rows as wide as the model, rows as wide as an expert
        pairs = {name: (self.x_RD, d) for name, d in self.d_inward.items()} | {"down": (self.dy_RD, self.hw_RF)}
        biases = {f"{name}_bias": d for name, d in self.d_inward.items() if f"{name}_bias" in axes}
        if self.low:
            pairs, biases = {name: (rows, pairs[name[:-2]][1]) if "expert_mlp" in axes[name] else
                             (pairs[name[:-2]][0], rows) for name, rows in self.low.items()}, {}
        with jax.named_scope(BALANCED_ROWS.write(self.balanced_rows)):
            dw = {name: engine.outer(*pair, self.groups, _letters(
                axes[name], "expert_mlp" if "expert_mlp" in axes[name] else None)) for name, pair in pairs.items()}
            dw |= {name: grouped.sums(d, self.groups) for name, d in biases.items()}
        return dw if self.more is None else jax.tree.map(jnp.add, dw, self.more)


def _backward(experts: RoutedExperts, region: ManualRegion, tokens: RoutedTokens, matrices: ExpertMatrices,
              saved, dy_TD, split: bool):
    """Return (dx, dweight, float32 gradients of this device's experts by name).

    With `split`, the third is the WeightGradOperands instead. tokens: after the gather; dy is not gathered yet. saved:
    outputs of gate and up in the first round, or None.
    """
    (x_AD, chosen_AK, weight_AK), dy_AD = tokens, region.gather_tokens(dy_TD)
    K, dtype = chosen_AK.shape[1], x_AD.dtype
    balanced_rows = region.rows_if_balanced(len(dy_TD), K)
    assignments = _sort_assignments(experts, region, chosen_AK, matrices.e)

    def gradients(dhw, weight_R1, *inward):
        dhw, *inward = (a.astype(jnp.float32) for a in (dhw, *inward))
        h, vjp = jax.vjp(experts.activation, *inward)
        narrow = [a.astype(dtype) for a in (h * weight_R1, *vjp(dhw * weight_R1))]
        return narrow[0], (dhw * h).sum(1), *narrow[1:]

    def one_round(rows: ExpertRows, inward=None):
        x_RD, dy_RD = (experts.engine.take(a, rows.token(K)) for a in (x_AD, dy_AD))
        names, groups = matrices.inward, rows.groups
        operands = matrices.with_adapters(dict.fromkeys(names, x_RD), groups)
        inward = inward or [matrices.inward_rows(name, operands, groups)[0] for name in names]
        # The activation's gradients are not an epilogue of the matmul's kernel. With several sums as an epilogue, its
        # tiles were so narrow that it took 2.2 ms on an H200 (Qwen3 30B-A3B). A plain matmul takes 0.75 ms, and this
        # fusion 0.35 ms by its bytes.
        cotangents = matrices.with_adapters({"down": dy_RD}, groups, "ba")
        (dhw_RF,) = matrices.rows(cotangents, "expert_mlp", groups)
        hw_RF, dweight_R, *d_inward = gradients(dhw_RF, rows.weight(weight_AK), *inward)
        d_inward = dict(zip(names, d_inward, strict=True))
        behind = matrices.with_adapters(d_inward, groups, "ba")
        (dx_RD,) = matrices.rows(behind, "expert_embed", groups)
        everything = matrices.with_adapters({"down": hw_RF}, groups) | operands | cotangents | behind
        low = {name: h_RR for name, h_RR in everything.items() if name.endswith(ADAPTERS)}
        here = rows.row_AK >= 0
        dweight_AK = jnp.where(here, dweight_R[jnp.where(here, rows.row_AK, 0)], 0.0)
        return rows.sum(dx_RD, dtype), dweight_AK, WeightGradOperands(
            groups, x_RD, dy_RD, hw_RF, d_inward, low, balanced_rows=balanced_rows)
    with jax.named_scope(BALANCED_ROWS.write(balanced_rows)):
        dx_AD, dweight_AK, rest = _rounds(assignments, one_round, saved, matrices, split)
    return region.combine(dx_AD), region.combine(dweight_AK), rest


def _add_further_rounds(of: SortedAssignments | all_to_all.AllToAll, one_round: Callable, first):
    """Return first + the sum of one_round(round) over all later rounds. Usually there are none.

    Only the device knows the number of rounds. The loop's sums take memory in addition to the sums of the first round.
    """
    if of.one_round:
        return first

    def step(carry):
        number, total = carry
        return number + 1, jax.tree.map(jnp.add, total, one_round(of.round(number)))
    with jax.named_scope(FURTHER_ROUNDS.write()):
        return lax.while_loop(lambda carry: of.has_more(carry[0]), step, (jnp.int32(1), first))[1]


def _rounds(of: SortedAssignments | all_to_all.AllToAll, one_round: Callable, saved, matrices: ExpertMatrices,
            split: bool):
    """Return (dx, dweight, gradients), summed over all rounds. With `split`, the third is WeightGradOperands.

    Further rounds run twice, once for inputs and once for weights, and add to the first round's results in place. A
    single loop for both would zero-fill all gradients in every step, or delay dx until the gradients exist.
    """
    def gradients(operands: WeightGradOperands) -> dict:
        return operands.gradients(matrices.engine, matrices.axes)
    dx, dweight, operands = one_round(of.round(0), saved)
    if not split:
        dx, dweight = _add_further_rounds(of, lambda now: one_round(now)[:2], (dx, dweight))
        return dx, dweight, _add_further_rounds(of, lambda now: gradients(one_round(now)[2]), gradients(operands))
    if of.one_round:
        return dx, dweight, operands

    def whole_round(now):
        dx, dweight, operands = one_round(now)
        return dx, dweight, gradients(operands)
    dx, dweight, more = _add_further_rounds(of, whole_round, (dx, dweight, matrices.zeros()))
    return dx, dweight, dataclasses.replace(operands, more=more)


# ---- dispatch by all-to-alls -----------------------------------------------------------------------------------------


def _after_sending(experts: RoutedExperts, region: ManualRegion, chosen_TK, matrices: ExpertMatrices):
    """Return (RoutedExperts, ManualRegion, AllToAll) for received rows of one expert each, all in one buffer."""
    exchange = all_to_all.AllToAll(region.experts, region.num_shards(region.experts), matrices.e, chosen_TK)
    region = dataclasses.replace(region, received=True, occupancy=exchange.occupancy)
    return dataclasses.replace(experts, capacity_factor=0.0), region, exchange


def _forward_by_all_to_all(experts: RoutedExperts, region: ManualRegion, tokens: RoutedTokens,
                           matrices: ExpertMatrices):
    experts, received, exchange = _after_sending(experts, region, tokens.chosen_TK, matrices)

    def one_round(now: all_to_all.Round):
        sent = RoutedTokens(now.send(tokens.x_TD), now.send_chosen(), now.weight(tokens.weight_TK))
        y, inward = _forward(experts, received, sent, matrices)
        return now.send_back(y).sum(1), inward
    y_TD, inward = one_round(exchange.round(0))
    return _add_further_rounds(exchange, lambda now: one_round(now)[0], y_TD).astype(tokens.x_TD.dtype), inward


def _backward_by_all_to_all(experts: RoutedExperts, region: ManualRegion, tokens: RoutedTokens,
                            matrices: ExpertMatrices, saved, dy_TD, split: bool):
    experts, received, exchange = _after_sending(experts, region, tokens.chosen_TK, matrices)

    def one_round(now: all_to_all.Round, inward=None):
        sent = RoutedTokens(now.send(tokens.x_TD), now.send_chosen(), now.weight(tokens.weight_TK))
        dx, dweight, operands = _backward(experts, received, sent, matrices, inward, now.send(dy_TD), True)
        return now.send_back(dx).sum(1), now.send_back(dweight)[..., 0], operands
    dx, dweight, rest = _rounds(exchange, one_round, saved, matrices, split)
    return dx.astype(tokens.x_TD.dtype), dweight, rest
