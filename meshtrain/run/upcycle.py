"""A mixture of experts begun from a dense run: every expert starts as the layer's MLP, the router as it is initialized.

With normalized weights and no noise the model then computes what the dense one does. Source: arXiv:2212.05055.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtrain.config import Run
from meshtrain.model import transformer
from meshtrain.names import LAYERS
from meshtrain.run import adapters
from meshtrain.run.checkpoint import Checkpoints
from meshtrain.run.pretrained import leaves_of, nested
from meshtrain.training import state

DENSE = dict(num_experts=0, shared_expert_dim=0, first_dense_layers=0)


def is_due(run: Run, source: Checkpoints, step: int) -> bool:
    """Whether the run has experts and the one that it begins from has none."""
    return bool(run.model.num_experts) and not source.metadata(step)["run"]["model"].get("num_experts")


def load(run: Run, layout, mesh, source: Checkpoints, step: int, fresh: dict) -> dict:
    """The parameters of a run with experts from those of a dense one. layout, mesh: of the run; fresh: initialized ones.

    Raises: ValueError where the MLPs of the dense run are no experts of this one; as `Checkpoints.restore`.
    """
    cfg, had = run.model, source.metadata(step)["run"]["model"]
    width, activation = had["mlp_dim"], had.get("activation", cfg.activation)
    if activation != cfg.activation:
        raise ValueError(f'model.activation="{cfg.activation}": the dense run has MLPs of "{activation}", as which experts start; use it, too')
    if had.get("mlp_bias"):
        raise ValueError("the MLPs of the dense run have biases (model.mlp_bias=true), and experts have none; begin from a run without")
    wrong = [f"model.{key}={have}" for key, have in (("expert_mlp_dim", cfg.expert_mlp_dim), ("mlp_dim", cfg.mlp_dim))
             if have != width and (key == "expert_mlp_dim" or cfg.first_dense_layers)]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)}: the dense run has MLPs of model.mlp_dim={width}, as which experts start; use {width}")
    if cfg.global_every:
        raise ValueError(f"model.global_every={cfg.global_every}: layers of two kinds are not made into experts; leave it out")
    dense = transformer.build(cfg.model_copy(update=DENSE | {"mlp_dim": width}))
    wanted = state.stored(dense, layout, mesh)
    taken = dict(leaves_of(adapters.restore(source, step, wanted)))
    adapters.tell_left_out(source, step, wanted)
    first, noise, key = cfg.first_dense_layers, run.experts.upcycle_noise, jax.random.key(run.run.seed)

    def expanded(taken, fresh):
        made = {}
        for number, (path, leaf) in enumerate(leaves_of(fresh)):
            stack, is_dense = (f"{LAYERS}/layers", f"{LAYERS}/dense_layers/") if first else (LAYERS, "\0")
            name = path.replace(is_dense, f"{LAYERS}/").replace(f"{stack}/", f"{LAYERS}/", 1)
            layers = slice(None) if name not in taken or not first or LAYERS not in path else \
                slice(first) if is_dense in path else slice(first, None)
            expert = name.replace("/moe/", "/mlp/") + "/kernel"
            if "/moe/" in name and expert in taken and "/shared/" not in name:
                mlp = taken[expert][first:, None]
                drawn = jax.random.normal(jax.random.fold_in(key, number), leaf.shape) * jnp.std(mlp, (-2, -1), keepdims=True)
                made[path] = (mlp + noise * drawn if noise else jnp.broadcast_to(mlp, leaf.shape)).astype(leaf.dtype)
            else:
                made[path] = taken[name][layers] if name in taken else leaf
        return nested(made)
    return jax.jit(expanded, out_shardings=jax.tree.map(lambda a: a.sharding, fresh))(taken, fresh)
