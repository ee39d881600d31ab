"""The training state, a pytree that the step takes and returns, and the sharding of each leaf."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from meshtrain.config.sections import Experts, Optimizer
from meshtrain.model import params
from meshtrain.model.transformer import Transformer
from meshtrain.sharding import rules, states
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout
from meshtrain.training import average, groups, offload, optimizer, rounding
from meshtrain.training.average import Average
from meshtrain.training.offload import Offload


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The training state.

    step: int32 scalar, number of steps taken. params: as in the model. opt_state: the optimizer's tree. ema: the
    average of the trained weights; None without training.ema. shares: each expert's share of the choices of the
    previous step, float32 [L, E]; None without experts.balance="batch".
    """
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    ema: Average | None = None
    shares: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpec:
    """Shapes, logical axes and placements of a State, all known before one exists."""
    tx: optax.GradientTransformation
    axes: dict                  # logical axes of each parameter, a tree like params
    trained_axes: dict          # logical axes of the trained parameters, a tree like their gradients
    abstract: State             # ShapeDtypeStructs with shardings, the target of a checkpoint restore
    offload: Offload | None = None      # for moments in the host's memory

    def with_shares(self, model: Transformer) -> StateSpec:
        """Return this spec with the shares of a model's experts added."""
        shape = model.cfg.num_layers + model.cfg.mtp_layers, model.cfg.num_experts
        shares = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.abstract.step.sharding)
        return dataclasses.replace(self, abstract=dataclasses.replace(self.abstract, shares=shares))

    def begin_shares(self) -> jax.Array | None:
        """Return the shares before the first step: equal shares, with which the balance loss has no gradient."""
        if (shares := self.abstract.shares) is None:
            return None
        return jnp.full(shares.shape, 1 / shares.shape[-1], shares.dtype)

    @property
    def host_bytes(self) -> int:
        """The bytes of one device's moments that are in the host's memory."""
        return self.offload.host_bytes(self.abstract.opt_state) if self.offload else 0

    @property
    def sharding(self) -> State:
        return jax.tree.map(lambda a: a.sharding, self.abstract)


def describe_params(model: Transformer, layout: Layout, mesh: Mesh | AbstractMesh) -> dict:
    """Return ShapeDtypeStructs of a model's parameters with the shardings in which they are stored, by [optimizer]."""
    table = model.parameters()
    placed = rules.shardings(layout, mesh, "optimizer", params.tree(table, lambda info: info.axes))
    return params.map_params(
        table, lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding), placed)


def state_spec(model: Transformer, optimizer_cfg: Optimizer, steps: int, layout: Layout,
               mesh: Mesh | AbstractMesh, experts: Experts = Experts(), seed: int = 0,
               averages: bool = False) -> StateSpec:
    """Return the StateSpec of a run. experts: the section with the settings of the balance biases. seed: the seed for
    rounding moments.

    Parameters and optimizer state are stored as in [optimizer]. A step reads the parameters as in [params], see
    `Transformer.as_read`. averages: whether the state has an average of the weights.
    """
    table, p = model.parameters(), describe_params(model, layout, mesh)

    def select_trained(leaf):
        return params.divide(table, params.tree(table, leaf))[0]
    trained_p, trained_axes = model.divide(p)[0], select_trained(lambda info: info.axes)

    def place(tree):
        return rules.shardings(layout, mesh, "optimizer", tree)
    roles, matrix_dims = select_trained(lambda info: info.role), select_trained(lambda info: info.matrix_dims)
    trained = [info for info in table if info.trainable]
    by_name = {info.name: of for info, of in zip(
        trained, groups.assign(optimizer_cfg, trained, model.cfg), strict=True)}
    treatments = select_trained(lambda info: by_name.get(info.name))
    tx = optimizer.build(optimizer_cfg, steps, roles, matrix_dims,
                         place(trained_axes), model.cfg.compute_dtype, experts, treatments)
    if optimizer_cfg.moments_dtype == "bfloat16":
        tx = rounding.store_moments(tx, seed)
    opt_state = jax.tree.map(lambda a, axes: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(axes)),
                             jax.eval_shape(tx.init, trained_p), states.state_axes(tx, trained_p, trained_axes))
    off = None
    if optimizer_cfg.offload:
        off = Offload(tx, offload.find(opt_state, trained_p, trained), trained, jax.tree.leaves(place(trained_axes)))
        opt_state = off.map_moments(offload.put, opt_state)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=place(()))
    ema = None
    if averages:
        ema = Average(step, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding),
                                         average.divide(model, p)[0]))
    return StateSpec(tx, params.tree(table, lambda info: info.axes), trained_axes, State(step, p, opt_state, ema), off)


def optimizer_bytes(model: Transformer, optimizer_cfg: Optimizer, steps: int, averages: bool = False
                    ) -> dict[str, float]:
    """Return the mean bytes per parameter of the optimizer state: {"optimizer_bytes": those on the device, with those
    of the average of the weights, "host_bytes": those in the host's memory}."""
    one_device = MeshSpec({})
    held = state_spec(model, optimizer_cfg, steps, Layout(rules.parse(""), one_device.sizes), one_device.abstract(),
                      averages=averages)
    leaves = jax.tree.leaves((held.abstract.opt_state, held.abstract.ema))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    count = sum(info.size for info in model.parameters())
    return {"optimizer_bytes": (whole - held.host_bytes) / count, "host_bytes": held.host_bytes / count}
