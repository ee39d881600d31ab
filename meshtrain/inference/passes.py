"""The passes of generation, with the layers of training and the engines of `cache`: prompts, drafts, next tokens."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.inference import cache
from meshtrain.model.execution import Execution
from meshtrain.model.transformer import Transformer


def empty(model: Transformer, ex: Execution, p, slots: int, room: int, drafts: int = 0) -> list:
    """Return the shapes of the cache as jax.ShapeDtypeStructs. room: from `round_room`."""
    batch = {name: jax.ShapeDtypeStruct((slots, room), jnp.int32)
             for name in ("tokens", "segments", "index", "positions", "length")}
    batch["sequence"] = jax.ShapeDtypeStruct((slots,), jnp.int32)
    return jax.eval_shape(lambda p, batch: read(model, ex, p, batch, drafts), p, batch)


def read(model: Transformer, ex: Execution, p, batch, drafts: int = 0) -> list:
    """Run the prompts through the layers and return their caches. Prompts are padded on the left, with segment 0. The
    last token is at the last place. drafts: number of depths that will draft."""
    x_BTD, inputs, caches = model.embed(ex, p, batch), model.inputs(batch), []
    for first, group in model.number_groups():
        def repeat(x_BTD, scanned, group=group):
            weights, number = scanned
            kept = [cache.PromptEngine(ex, drafts) for _ in group.period]
            for i, layer in enumerate(group.period):
                bound = layer.bind(weights[i])
                x_BTD, _ = bound(cache.through(ex, kept[i]), x_BTD, inputs, number + i)
                if bound.mixer is not None and len(kept[i].cache) not in (2, 4):
                    raise ValueError(f"the mixer {type(bound.mixer).__name__} leaves no state in the cache, so the "
                                     "model cannot generate; call attention, or convolve and recur, once in its layer")
            return x_BTD, tuple(layer.cache for layer in kept)
        x_BTD, by_layer = lax.scan(repeat, x_BTD, (model.weights(p, group), group.numbers(first)))
        caches.append(tuple(layer if len(layer) == 2 else tuple(jnp.repeat(x, drafts + 1, 0) for x in layer)
                            for layer in by_layer))
    if not drafts:
        return caches
    h_BTD, depths = model.final_state(ex, p, x_BTD), []
    recent = h_BTD[None, :, -2 * drafts:]
    for k in range(1, drafts + 1):
        written, ahead_BT = cache.PromptEngine(ex, drafts), jnp.pad(batch["tokens"][:, k:], ((0, 0), (0, k)))
        h_BTD, _ = model.depth_state(cache.through(ex, written), p, k, h_BTD, batch | {"tokens": ahead_BT}, inputs)
        depths.append(tuple(x[None] for x in written.cache))
    return [*caches, tuple(depths), ((recent,),)]


def draft(model: Transformer, ex: Execution, p, batch, caches: list, pick: Callable) -> tuple[jax.Array, list]:
    """Run the depths of MTP. Return (the last token of each slot and the draft of each depth [S, N + 1], the cache).

    batch: as in training, for the last 2 N positions, whose tokens ahead were drafts or missing; "tokens" also has the
    last token. pick: (state [S, 1, D], number of positions after the last) -> `sampling.Draw`.
    """
    *groups, depths, ((recent,),) = caches
    h_STD, tokens_ST, new, T = recent[0], batch["tokens"], [], recent.shape[2]
    inputs, reach = model.inputs(batch), cache.reach(ex, batch)
    for k, arrays in enumerate(depths, 1):
        engine, ahead = cache.SlotEngine(arrays, 0, reach), batch | {"tokens": tokens_ST[:, k:]}
        h_STD, _ = model.depth_state(cache.through(ex, engine), p, k, h_STD, ahead, inputs)
        new.append(engine.cache)
        tokens_ST = jnp.concatenate([tokens_ST, pick(h_STD[:, -1:], k).token_B], 1)
    return tokens_ST[:, T:], [*groups, tuple(new), caches[-1]]


def extend(model: Transformer, ex: Execution, p, batch, caches: list, count_S=None) -> tuple[jax.Array, list]:
    """Run T tokens of each slot, at batch["positions"]. Return (output of the last layer [S, T, D], the cache).

    batch: as in training; slots with segment 0 are done, and the loop over places does not run further for these slots.
    count_S: number of tokens of the previous pass that stay; needed if T > 1.
    """
    x_BTD, inputs, new = model.embed(ex, p, batch), model.inputs(batch), []
    reach = cache.reach(ex, batch, count_S)
    for (first, group), arrays in zip(model.number_groups(), caches):
        def repeat(carry, scanned, group=group):
            # The cache is carried, not scanned, so that one token is written in place and nothing else moves.
            x_BTD, arrays = carry
            weights, number, index = scanned
            for i, layer in enumerate(group.period):
                engine = cache.SlotEngine(arrays[i], index, reach)
                x_BTD, _ = layer.bind(weights[i])(cache.through(ex, engine), x_BTD, inputs, number + i)
                arrays = (*arrays[:i], engine.cache, *arrays[i + 1:])
            return (x_BTD, arrays), None
        scanned = (model.weights(p, group), group.numbers(first), jnp.arange(group.repeats))
        (x_BTD, arrays), _ = lax.scan(repeat, (x_BTD, arrays), scanned)
        new.append(arrays)
    return x_BTD, new + caches[len(new):]


def keep(caches: list, h_STD, count_S) -> list:
    """Return the cache with the states after the final norm of the last pass [S, N + 1, D], of which count_S stay."""
    *others, ((recent,),) = caches
    at_ST = count_S[:, None] + jnp.arange(recent.shape[2])
    h_STD = jnp.concatenate([recent[0], h_STD], 1)
    return [*others, ((jnp.take_along_axis(h_STD, at_ST[..., None], 1)[None],),)]
