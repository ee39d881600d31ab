"""checkpoint.init_from: initializes a run from another run's checkpoint.

Adapters are kept if both runs have the same [lora], and merged otherwise. A run with experts may start from a dense
run: each expert is a copy of the layer's MLP, and the router is freshly initialized. With normalized weights and no
noise the model initially equals the dense one. Source: arXiv:2212.05055.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from meshtrain import config, pattern
from meshtrain.checkpoint import adapters, resume
from meshtrain.checkpoint.saved import Saved
from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import DEPTH, LAYERS, LORA
from meshtrain.run import say
from meshtrain.run.trees import leaves_of, nest
from meshtrain.sharding.rules import Layout
from meshtrain.training import state
from meshtrain.training.state import State


def initial_state(run: Run, model: transformer.Transformer, layout: Layout, mesh: jax.sharding.Mesh, shapes: State,
                  fresh: State) -> State:
    """Return the initial state of a run, with another run's weights. layout, mesh: the layout and mesh of the new run.
    shapes: the new run's state as jax.ShapeDtypeStruct with shardings. fresh: the new run's initialized state.

    Raises: ConfigError if the checkpoint is missing or does not fit; as `Checkpoints.restore`.
    """
    where, asks_state = run.checkpoint.init_from, run.checkpoint.init_optimizer
    source = resume.source(where, run.checkpoint.step, f"checkpoint.init_from={where}",
                           only_params=not asks_state)
    with config.user_errors("checkpoint.init_from: "):
        if (trained := source.run["model"]["vocab_size"]) != run.model.vocab_size:
            raise ValueError(f"{where} has model.vocab_size={trained}, but this run has {run.model.vocab_size}; use "
                             f"{trained}. To add ids, export the model with python -m meshtrain.convert and start "
                             f"from that folder, which gives new ids their rows")
        source_lora = adapters.section(source)
        upcycles = bool(run.model.num_experts) and not source.run["model"].get("num_experts")
        if upcycles and not run.lora.rank:
            if asks_state:
                raise ValueError(f"{where} has no experts, so checkpoint.init_optimizer=true finds no state for them; "
                                 f"leave it out")
            upcycled_params = upcycle(run, layout, mesh, source, fresh.params)
            say.out(f"weights from step {source.step} of {where}; every expert starts as a copy of its layer's MLP")
            return dataclasses.replace(fresh, params=upcycled_params)
        if (source_lora or run.lora.rank) and not adapters.are_kept(source_lora, run.lora):
            if asks_state:
                raise ValueError(f"{where} trained other parameters ({adapters.describe(source_lora)}) than this run "
                                 f"({adapters.describe(run.lora.model_dump())}), so checkpoint.init_optimizer=true "
                                 f"finds no state for these; leave it out")
            own, wanted = ({path: leaf for path, leaf in leaves_of(tree).items() if (f"/{LORA}/" in path) == is_own}
                           for tree, is_own in ((fresh.params, True), (shapes.params, False)))
            restored = {"params": nest(own | leaves_of(adapters.restore(source, nest(wanted))))}
        else:
            there = {path.partition("/")[0] for path in leaves_of(source.param_shapes())}
            fresh_depths = {} if asks_state else {key: tree for key, tree in fresh.params.items()
                                                  if key.startswith(DEPTH) and key not in there}
            wanted_params = {key: tree for key, tree in shapes.params.items() if key not in fresh_depths}
            wanted = {"params": wanted_params} | ({"opt_state": shapes.opt_state} if asks_state else {})
            restored = source.restore(wanted, part=True)
            if fresh_depths:
                say.out(f"note: {where} has no {', '.join(sorted(fresh_depths))} of model.mtp_layers="
                        f"{run.model.mtp_layers}; they start from random weights")
                restored["params"] = restored["params"] | fresh_depths
        say.out(f"weights{' and optimizer' * asks_state} from step {source.step} of {where}")
        adapters.warn_left_out(source, shapes.params)
        return dataclasses.replace(fresh, params=restored["params"],
                                   opt_state=restored.get("opt_state", fresh.opt_state))


def upcycle(run: Run, layout: Layout, mesh: jax.sharding.Mesh, source: Saved, fresh: dict) -> dict:
    """Return the parameters of a run with experts, initialized from a dense run's checkpoint. layout, mesh: the layout
    and mesh of the new run. fresh: the new run's initialized parameters.

    Raises: ValueError if the dense MLPs do not match the experts; as `Checkpoints.restore`.
    """
    cfg, source_model = run.model, source.run["model"]
    width, activation = source_model["mlp_dim"], source_model.get("activation", cfg.activation)
    if activation != cfg.activation:
        raise ValueError(f'model.activation="{cfg.activation}": experts start as copies of the dense MLPs, which have '
                         f'"{activation}"; use "{activation}"')
    if source_model.get("mlp_bias"):
        raise ValueError("the MLPs of the dense run have biases (model.mlp_bias=true), which experts cannot use; "
                         "start from a run without them")
    wrong = [f"model.{key}={have}" for key, have in (("expert_mlp_dim", cfg.expert_mlp_dim), ("mlp_dim", cfg.mlp_dim))
             if have != width and (key == "expert_mlp_dim" or pattern.share(cfg, mlps="d"))]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)}: experts start as copies of the dense MLPs, which have "
                         f"model.mlp_dim={width}; use {width}")
    first = pattern.leading(cfg)
    if len(set(pattern.kinds(cfg))) > 1 + bool(first):
        raise ValueError(f'model.mixers="{cfg.mixers}" and model.mlps="{cfg.mlps}": experts cannot start from a dense '
                         f"run if the layers are of several kinds; leave the patterns out")
    dense = transformer.build(cfg.model_copy(update=dict(num_experts=0, shared_expert_dim=0, mlps="d", mlp_dim=width)))
    wanted = state.describe_params(dense, layout, mesh)
    restored = leaves_of(adapters.restore(source, wanted))
    adapters.warn_left_out(source, wanted)

    def expand(restored: dict, fresh: dict) -> dict:
        made = {}
        for path, leaf in leaves_of(fresh).items():
            stack, is_dense = (f"{LAYERS}/layers", f"{LAYERS}/dense_layers/") if first else (LAYERS, "\0")
            name = path.replace(is_dense, f"{LAYERS}/").replace(f"{stack}/", f"{LAYERS}/", 1)
            layers = slice(None) if name not in restored or not first or LAYERS not in path else \
                slice(first) if is_dense in path else slice(first, None)
            expert = name.replace("/moe/", "/mlp/") + "/kernel"
            if "/moe/" in name and expert in restored and "/shared/" not in name:
                made[path] = jnp.broadcast_to(restored[expert][first:, None], leaf.shape).astype(leaf.dtype)
            else:
                made[path] = restored[name][layers] if name in restored else leaf
        return nest(made)
    return jax.jit(expand, out_shardings=jax.tree.map(lambda a: a.sharding, fresh))(restored, fresh)
