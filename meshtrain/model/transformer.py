"""The decoder: tokens -> embedding -> layer groups -> norm -> head and loss.

By default it has RMSNorm, rope and SwiGLU; fields of `[model]` select others. `pattern` divides the layers into groups
(`block.LayerGroup`). Most models have one group of equal layers.

Parameters are one nested dict: {"embedding", "position"?, LAYERS, "final_norm", "head"?, "mtp_1"?, …}. LAYERS holds
stacked weights [L, …] if all layers are equal, else {group: [repeats, …]}, or {group: {position in the period:
[repeats, …]}}. Only `ex.layout` depends on the run's layout. Initialization depends on the seed alone.
"""
from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain import custom, pattern
from meshtrain.config.sections import MIXER, Lora, Model, Run
from meshtrain.kernels import products
from meshtrain.model import lora, mtp, params, rope
from meshtrain.model.block import Attention, Layer, LayerGroup, build_block
from meshtrain.model.dropout import dropout
from meshtrain.model.ends import EmbeddingAndHead, pad_vocab
from meshtrain.model.execution import Execution
from meshtrain.model.latent import LatentAttention
from meshtrain.model.layers import kv_heads
from meshtrain.model.linear import RecurrentMixer
from meshtrain.model.loss import LossSpec, cap, loss_sums, token_nll, with_balance_loss
from meshtrain.model.mlp import MLP
from meshtrain.model.moe import MoE
from meshtrain.model.parts import Inputs
from meshtrain.model.stats import LayerStats
from meshtrain.names import LAYERS, LORA, MATMUL_ROLES, NO_TARGET
from meshtrain.sharding.rules import GATHERED, Layout, Rules, Tensor

@dataclasses.dataclass(frozen=True, eq=False)
class Transformer:
    """The model of a `[model]` section: parameter table, initializer, loss and logits. Layers are numbered from 0.

    depth: the layer of an MTP depth, without adapters. lora: the section [lora] if layers have adapters; all other
    parameters except lora.also are then frozen. trains_depths: whether steps compute depths; if not, depths are frozen.
    """
    cfg: Model
    ends: params.Module
    groups: tuple[LayerGroup, ...]
    depth: params.Module
    lora: Lora | None = None
    trains_depths: bool = True

    def __post_init__(self):
        assert sum(group.num_layers for group in self.groups) == self.cfg.num_layers

    def parameters(self) -> tuple[params.ParamInfo, ...]:
        """Return every parameter, in the order of the tree's leaves."""
        return self._parameters

    @functools.cached_property
    def _parameters(self) -> tuple[params.ParamInfo, ...]:
        infos = params.infos(self.ends)
        for group in self.groups:
            infos += group.parameters((LAYERS,) if len(self.groups) == 1 else (LAYERS, group.name))
        if self.lora:
            infos = [dataclasses.replace(info, trainable=LORA in info.path or (
                "mtp" if mtp.of_depth(info.path) else info.path[0]) in self.lora.also) for info in infos]
        elif not self.trains_depths:
            infos = [dataclasses.replace(info, trainable=not mtp.of_depth(info.path)) for info in infos]
        return tuple(sorted(infos, key=lambda info: info.path))

    def divide(self, p: dict) -> params.Divided:
        """Return the trained parameters and the frozen parameters."""
        return params.divide(self.parameters(), p)

    def init(self, key: jax.Array):
        """Return the parameters for `key`, in float32 or [model].param_dtype."""
        ends_key, layers_key = jax.random.split(key)
        keys = jax.random.split(layers_key, self.cfg.num_layers)
        groups = [group.init(keys[first:first + group.num_layers]) for first, group in self.number_groups()]
        return self.with_layers(self.ends.init(ends_key), groups)

    def number_groups(self) -> list[tuple[int, LayerGroup]]:
        """Return [(number of the group's first layer, group)]."""
        firsts = itertools.accumulate((group.num_layers for group in self.groups), initial=0)
        return list(zip(firsts, self.groups))

    def places(self) -> list[tuple[str, int]]:
        """Return, for each layer, (the replacement of LAYERS in the paths of its stacks, its index in these stacks)."""
        places = []
        for group in self.groups:
            base = LAYERS if len(self.groups) == 1 else f"{LAYERS}/{group.name}"
            names = [base] if len(group.period) == 1 else [f"{base}/{i}" for i in range(len(group.period))]
            places += [(name, repeat) for repeat in range(group.repeats) for name in names]
        return places

    # For pipelines: stages hold whole periods. The last stage is padded with identity layers.

    @property
    def leading(self) -> LayerGroup | None:
        """The leading layers, which run before the stages."""
        return self.groups[0] if self.groups[0].leading else None

    @property
    def staged(self) -> tuple[LayerGroup, ...]:
        return self.groups[bool(self.leading):]

    @property
    def period(self) -> tuple[params.Module, ...]:
        """The period of all staged layers; the last may be incomplete. `choices.stages` requires a period."""
        return self.staged[0].period

    def first(self, layers):
        """Return the subtree of the whole periods. layers: a tree like LAYERS."""
        return layers if len(self.groups) == 1 else layers[self.staged[0].name]

    def before(self, layers):
        """Return the subtree of the leading layers. layers: a tree like LAYERS."""
        return layers[self.leading.name] if self.leading else {}

    def by_period(self, layers, length: int):
        """Stack the layers at the same place in the period. Return the tree of one period, its arrays zero-padded to
        [length, …]. layers: a tree like LAYERS."""
        first, *left = self.staged
        stacks_of = [[weights] for weights in self.weights({LAYERS: layers}, first)]
        for group in left:
            stacks = self.weights({LAYERS: layers}, group)
            for i in range(group.num_layers):
                of, at = i % len(stacks), i // len(stacks)
                stacks_of[i].append(jax.tree.map(lambda a, at=at: a[at:at + 1], stacks[of]))

        def stack(*arrays):
            a = jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
            return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))
        return first.subtree(tuple(jax.tree.map(stack, *trees) for trees in stacks_of))

    def from_period(self, tree, before):
        """Return the tree of all layers from the results of `by_period` (tree) and `before`; undo the padding."""
        first, *left = self.staged

        def entries(start, stop, place):
            return jax.tree.map(lambda a: a[start:stop], place)
        places = first.weights(tree)
        trees = {first.name: first.subtree(tuple(entries(0, first.repeats, place) for place in places))}
        for group in left:
            alone = [entries(first.repeats, first.repeats + 1, place) for place in places[:group.num_layers]]
            trees[group.name] = group.subtree(tuple(
                jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *alone[i::len(group.period)])
                for i in range(len(group.period))))
        return trees | ({self.leading.name: before} if self.leading else {}) if len(self.groups) > 1 else trees[
            first.name]

    def cast_before_loop(self, layout: Layout) -> bool:
        """Return whether matmul weights are cast to the compute dtype before the microbatch loop.

        Weights are cast if they are gathered before the loop or never. Weights that only layers gather (ZeRO-3) are not
        cast, which saves a copy.
        """

        def apart(table):
            return any(layout.spec(table, info.axes) != layout.spec("params", info.axes) for info in self.parameters())
        return apart("optimizer") or not apart(GATHERED)

    def as_read(self, layout: Layout, p, dtype=None):
        """Reshard parameters from [optimizer] to [params], for the microbatch loop.

        dtype: the dtype of matmul weights; None: the stored dtype. All-gathers over the axes that only [optimizer] has
        move (N-1)/N of the bytes.
        """
        def read(info: params.ParamInfo):
            w = functools.reduce(dict.__getitem__, info.path, p)
            if dtype is not None and info.role in MATMUL_ROLES:
                # Constrained to its stored sharding; otherwise XLA gathers float32 and casts afterwards.
                w = layout.constrain("optimizer", w.astype(dtype), info.axes)
            return layout.constrain("params", w, info.axes)
        return params.tree(self.parameters(), read)

    def weights(self, p, group: LayerGroup) -> tuple:
        """Return the stacked weights of each layer of the group's period."""
        return group.weights(p[LAYERS] if len(self.groups) == 1 else p[LAYERS][group.name])

    def with_layers(self, ends: dict, weights: list[tuple]) -> dict:
        """Return the parameter tree of these ends (the parameters outside the layers) and each group's weights."""
        subtrees = {group.name: group.subtree(w) for group, w in zip(self.groups, weights, strict=True)}
        return {**ends, LAYERS: subtrees if len(self.groups) > 1 else subtrees[self.groups[0].name]}

    # Pipelines use these functions, too. In embed and head_loss p needs no LAYERS.

    def inputs(self, batch: dict, dropout_key=None, shares_LE=None) -> Inputs:
        ropes = rope.of(self.cfg, batch["positions"], batch.get("length"))
        return Inputs(batch["segments"], batch["index"], batch["sequence"], ropes, dropout_key, shares_LE)

    def embed(self, ex: Execution, p, batch: dict, dropout_key=None):
        """Return the input of the first layer [B, T, D]."""
        ends = self._ends(p)
        x_BTD = ends.embedding(ex, batch["tokens"])
        if (factor := self.cfg.multipliers.embedding) != 1:
            x_BTD = x_BTD * jnp.asarray(factor, x_BTD.dtype)
        if self.cfg.position == "learned":
            x_BTD = x_BTD + ends.position(ex, batch["positions"])
        x_BTD = dropout(ex, x_BTD, self.cfg.embedding_dropout, self.inputs(batch, dropout_key), 2 * self.cfg.num_layers)
        return ex.after(x_BTD, without_layers(p))

    def head_loss(self, ex: Execution, p, x_BTD, targets_BT, *, z_loss: float = 0.0, chunk: int = 2048):
        """Return (objective, nll) from the last layer's output, summed over tokens with a target, in nats. The
        caller divides them by the number of these tokens and adds the layers' balance loss to the objective."""
        return loss_sums(ex, *self.head_inputs(ex, p, x_BTD, chunk, z_loss=z_loss), targets_BT)

    def head_token_nll(self, ex: Execution, p, x_BTD, targets_BT, chunk: int = 2048, temperature: float = 1.0):
        """Return the nll of each token [B, T], float32, from the last layer's output; 0 without a target."""
        return token_nll(ex, *self.head_inputs(ex, p, x_BTD, chunk, temperature=temperature), targets_BT)

    def head_inputs(self, ex: Execution, p, x_BTD, chunk: int, *, z_loss: float = 0.0, temperature: float = 1.0):
        """Return (LossSpec, output of the final norm, weight of the head), as the functions of `loss` take them."""
        p = self._read_after(ex, p, x_BTD)
        spec, w = self._loss_spec(p, z_loss, chunk, temperature=temperature)
        return spec, self._scale_for_head(ex, self._ends(p).final_norm(ex, x_BTD)), w

    def _loss_spec(self, p, z_loss: float, chunk: int, **more):
        """Return (LossSpec, weight of the head)."""
        axes, w = self._head(p)
        name = "embedding" if self.cfg.tie_embeddings else "head"
        frozen = self.lora is not None and name not in self.lora.also
        return LossSpec(axes, self.cfg.vocab_size, z_loss, chunk, self.cfg.logit_softcap, frozen, **more), w

    def depth_losses(self, ex: Execution, p, x_BTD, batch: dict, chunk: int = 2048):
        """Return ([(objective, [nll, number of hits]) of each depth of MTP, as `head_loss`, without dropout and
        z-loss], the stats of their layers). A hit is a target with the largest logit.

        batch: also contains the arrays of `mtp.shift`, and the step's normalizers for the balance loss of experts. At
        places without a token, no token goes to experts.
        """
        spec, w = self._loss_spec(p, 0.0, chunk, counts_hits=True)
        normalizers, sums, stats = batch.get("normalizers"), [], LayerStats()
        inputs = self.inputs(batch, shares_LE=normalizers and normalizers.shares_LE)
        h_BTD = self.final_state(ex, p, x_BTD)
        for k in range(1, self.cfg.mtp_layers + 1):
            tokens_BT = batch[f"tokens_{k}"]
            h_BTD, of_layer = self.depth_state(ex, p, k, h_BTD, batch | {"tokens": tokens_BT}, inputs._replace(
                routed_BT=tokens_BT != NO_TARGET), normalizers and normalizers.tokens)
            stats += of_layer
            sums.append(loss_sums(ex, spec, self._scale_for_head(ex, h_BTD), w, batch[f"targets_{k}"]))
        return sums, stats

    def depth_state(self, ex: Execution, p, k: int, h_BTD, batch: dict, inputs: Inputs, num_tokens=None):
        """Return (state [B, T, D] of depth k of MTP after its norm, stats of its layer) from that of depth k - 1.
        batch: has "tokens" k places ahead. num_tokens: as in `with_balance_loss`; None: no balance loss."""
        p = self._read_after(ex, p, h_BTD)
        depth, tokens_BT = getattr(self._ends(p), mtp.name(k)), ex.after(batch["tokens"], h_BTD)
        e_BTD = self.embed(ex, p, batch | {"tokens": jnp.maximum(tokens_BT, 0)})
        apply = build_block(ex, self.depth, h_BTD.shape, False)
        number, x_BTD = self.cfg.num_layers + k - 1, depth.merge(ex, e_BTD, h_BTD)
        x_BTD, stats = apply(p[mtp.name(k)]["layer"], x_BTD, inputs, number)
        x_BTD = x_BTD if num_tokens is None else with_balance_loss(x_BTD, stats, num_tokens)
        return ex.layout.act(depth.norm(ex, x_BTD), "batch", "residual_seq", None), stats

    def through_layers(self, ex: Execution, p, batch: dict):
        """Return the output of the last layer, without dropout."""
        inputs, x_BTD = self.inputs(batch), self.embed(ex, p, batch)
        for first, group in self.number_groups():
            def repeat(x_BTD, scanned, group=group):
                weights, number = scanned
                return group.apply(ex, weights, x_BTD, inputs, number)[0], None
            x_BTD, _ = jax.lax.scan(repeat, x_BTD, (self.weights(p, group), group.numbers(first)))
        return x_BTD

    def final_state(self, ex: Execution, p, x_BTD):
        """Return the state [B, T, D] after the final norm, from the last layer's output."""
        return ex.layout.act(self._ends(p).final_norm(ex, x_BTD), "batch", "residual_seq", None)

    def _scale_for_head(self, ex: Execution, x_BTD):
        if (factor := self.cfg.multipliers.logits) != 1:
            x_BTD = (factor * x_BTD.astype(jnp.float32)).astype(x_BTD.dtype)
        return ex.layout.act(x_BTD, "batch", "residual_seq", None)

    def _read_after(self, ex: Execution, p, x_BTD):
        """Return the parameters outside the layers. Where order matters, their gathers depend on x_BTD."""
        if not ex.in_order:
            return p
        # Constrained as stored; otherwise the gather would move before the sum.
        return params.tree(params.infos(self.ends), lambda info: ex.layout.constrain(
            "params", ex.after(functools.reduce(dict.__getitem__, info.path, p), x_BTD), info.axes))

    def _ends(self, p) -> EmbeddingAndHead:
        return self.ends.bind(without_layers(p))

    def head_logits(self, ex: Execution, p, x_BTD):
        """Return float32 logits [B, T, V] of each next token, from the last layer's output, without padding ids."""
        return self.state_logits(ex, p, self.final_state(ex, self._read_after(ex, p, x_BTD), x_BTD))

    def state_logits(self, ex: Execution, p, h_BTD):
        """Return `head_logits` from the state after a norm: `final_state` or `depth_state`."""
        axes, w = self._head(self._read_after(ex, p, h_BTD))
        x_BTD = ex.layout.act(self._scale_for_head(ex, h_BTD), "batch", "seq", None)
        eq = "BTD,DV->BTV" if axes == ("embed", "vocab") else "BTD,VD->BTV"
        logits_BTV = products.einsum(eq, x_BTD, w.astype(ex.numerics.dtype), jnp.float32)
        return cap(logits_BTV[..., :self.cfg.vocab_size], self.cfg.logit_softcap)

    def read_by_head(self, ends: dict) -> dict:
        """Return the parameters outside the layers that the final norm, the head or the loss reads."""
        looks_up = self.cfg.tie_embeddings or self.cfg.mtp_layers and self.trains_depths
        unread = {"position"} if looks_up else {"position", "embedding"}
        return {name: subtree for name, subtree in ends.items() if name not in unread}

    def _head(self, p):
        if self.cfg.tie_embeddings:
            return ("vocab", "embed"), p["embedding"]["table"]
        return ("embed", "vocab"), p["head"]["kernel"]

    def fit(self, loaded: Rules, sizes: Mapping[str, int]) -> tuple[Rules, list[str]]:
        """Return (rules without tensor on the kv heads if tensor ranks outnumber them, notes for the user).

        The weights and optimizer states of these heads are then whole on every tensor rank. See `layers.kv_heads`.
        """
        layout, split = Layout(loaded, sizes), loaded.mesh_axes("activations", "kv_heads")
        few = {what: (n, computed) for what, n in pattern.kv_heads_of(self.cfg).items()
               if (computed := kv_heads(layout, n)) != n}
        if not few:
            return loaded, []

        def without(axes):
            return tuple(axis for axis in axes if axis not in split)
        tables = {name: table if name == "activations" or "kv_heads" not in table
                  else {**table, "kv_heads": without(table["kv_heads"])} for name, table in loaded.tables.items()}
        num_shards = " × ".join(f"mesh.{axis}={sizes[axis]}" for axis in split if sizes[axis] > 1)
        return dataclasses.replace(loaded, tables=tables), [
            f"{what}: {n} key and value heads on {num_shards}: {computed // n} ranks compute each head, and every "
            f"rank holds the weights and states of all heads" for what, (n, computed) in few.items()]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every parameter in each rule table of parameters, for the checks at load."""
        return tuple(Tensor(table, info.name, info.shape, info.axes) for table in ("params", "grads", "optimizer")
                     for info in self.parameters())

    def products(self) -> list[Tensor]:
        """Return the weights of a step's matmuls, except routers and adapters, which are small."""
        multiplied = ("matrix", "head", *["embedding"] * self.cfg.tie_embeddings)
        return [Tensor("params", info.name, info.shape, info.axes) for info in self.parameters()
                if info.role in multiplied and LORA not in info.path]

    def activations(self, batch: int, seq_len: int, layout: Layout) -> list[Tensor]:
        """Return the activations that rules shard, with full shapes, for the checks at load."""
        cfg, (mixers, mlps) = self.cfg, map(set, zip(*pattern.kinds(self.cfg)))
        # widths of the MLPs that all tokens pass through
        widths = [cfg.mlp_dim] * ("d" in mlps) + [cfg.shared_expert_dim] * bool("e" in mlps and cfg.shared_expert_dim)

        def tensor(name, axis, *dims):
            axes = "batch", "residual_seq" if axis is None else "seq", axis, "head_dim"
            return Tensor("activations", name, (batch, seq_len, *dims), axes[:2 + len(dims)])
        heads = {("queries", "keys", own.num_heads, own.num_kv_heads, own.head_dim) for own in (
            cfg.of(mixer) for mixer in mixers if pattern.mixer(mixer).attends)}
        if pattern.has(cfg, pattern.RECURRENT):
            heads.add(("recurrent values", "recurrent keys", cfg.linear.value_heads, cfg.linear.key_heads,
                       cfg.linear.key_dim))
        return [tensor("residual stream", None, cfg.embed_dim), *(
            tensor(*of) for many, few, N, K, H in sorted(heads) for of in (
                (many, "heads", N, H), (few, "kv_heads", kv_heads(layout, K), H))),
            *(tensor("mlp", "mlp", n) for n in widths), tensor("logits", "vocab", pad_vocab(cfg))]


def of_run(run: Run) -> Transformer:
    """Return the model of a run. Raises: ValueError as `build`."""
    return build(run.model, run.lora, run.training.mtp_weight > 0)


def build(cfg: Model, adapters=None, trains_depths: bool = True) -> Transformer:
    """Return the model of a [model] section, in the groups of `pattern.stretches`.

    adapters: the section [lora]. trains_depths: as in `Transformer`. Raises: ValueError as `lora.check`.
    """
    adapters = adapters if adapters is not None and adapters.rank else None

    def layer(kind: pattern.Kind, rngs: nnx.Rngs) -> Layer:
        return Layer(cfg.of(kind.mixer), rngs, _mixer(cfg, kind.mixer), _MLPS[kind.mlp])

    @functools.cache
    def module(kind: pattern.Kind) -> params.Module:
        return params.Module(lambda rngs: layer(kind, rngs) if adapters is None else lora.adapt(
            layer(kind, rngs), rngs, adapters))
    groups = tuple(LayerGroup(part.name, tuple(map(module, part.period)), part.repeats, part.leading)
                   for part in pattern.stretches(cfg))
    if adapters is not None:
        lora.check((layer.bind(layer.state) for group in groups for layer in group.period), adapters)
    of_depth = functools.partial(layer, pattern.depth_kind(cfg))
    ends = params.Module(lambda rngs: EmbeddingAndHead(cfg, rngs, of_depth))
    depth = params.Module(of_depth) if adapters else module(pattern.depth_kind(cfg))
    return Transformer(cfg, ends, groups, depth, adapters, trains_depths)


_MLPS = {"d": ("mlp", MLP), "e": ("moe", MoE), ".": None}


# Family of a mixer -> (name in the parameter tree, class). A class sets `context = True` if it reads other tokens by
# `ex.engines` only, and `cache = True` if besides it calls attention once, or convolve and recur once.
_MIXERS: dict[str, tuple[str, type]] = {
    pattern.ATTENTION: ("attention", Attention), pattern.RECURRENT: ("linear", RecurrentMixer)}


def _mixer_class(cfg: Model, letter: str) -> tuple[str, type]:
    """Return (name in the parameter tree, class) of a mixer. Raises: ValueError for a mixer without a class."""
    family = pattern.mixer(letter).family
    if family == pattern.CUSTOM:
        return family, custom.load(getattr(cfg.custom, letter))
    if family not in _MIXERS:
        raise ValueError(f"the mixer {letter!r} ({pattern.mixer(letter).words}) has no class; add it here")
    return ("attention", LatentAttention) if family == pattern.ATTENTION and cfg.latent.kv_dim else _MIXERS[family]


def _mixer(cfg: Model, letter: str):
    """Return (name in the parameter tree, (cfg, rngs) -> module); None without a mixer."""
    if not pattern.mixer(letter).family:
        return None
    name, cls = _mixer_class(cfg, letter)
    if name != pattern.CUSTOM:
        return name, lambda cfg, rngs: cls(cfg, rngs, letter)

    def build(cfg: Model, rngs: nnx.Rngs) -> nnx.Module:
        part = f"model.custom.{letter}", getattr(cfg.custom, letter), MIXER
        if not (isinstance(made := custom.call(*part, cfg, rngs), nnx.Module) and callable(made)):
            raise custom.refuse(*part, f"made a {type(made).__name__}, not a flax.nnx.Module with `__call__`")
        try:
            inspect.signature(made).bind("ex", "x_BTD", "inputs")
        except TypeError as error:
            raise custom.refuse(*part, f"cannot be called: {error}") from error
        return made
    return name, build


def find_lacking(cfg: Model, attribute: str) -> list[str]:
    """Return the mixers of the model whose class does not set `attribute` to a true value, as named in messages to the
    user. Raises: ValueError as `custom.load`."""
    letters = sorted({kind.mixer for kind in pattern.kinds(cfg) if pattern.mixer(kind.mixer).family})
    return [f'model.custom.{letter}="{value}"' if (value := getattr(cfg.custom, letter, "")) else
            f"the mixer {letter} ({pattern.mixer(letter).words})"
            for letter in letters if not getattr(_mixer_class(cfg, letter)[1], attribute, None)]


def without_layers(tree: dict) -> dict:
    return {name: subtree for name, subtree in tree.items() if name != LAYERS}
