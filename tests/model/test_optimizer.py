"""Optimizers: every matrix of the stacked layers alone, decay where it belongs, state placed by logical axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain import assembly, config as run_file
from meshtrain.config import messages
from meshtrain.sharding import states
from meshtrain.training import optimizer
from meshtrain.training.state import State

NAMES, SCHEDULES = (messages.choices(run_file.SECTIONS["optimizer"].model_fields[key]) for key in ("name", "schedule"))
L, D, N, H, F, V = 3, 8, 2, 4, 12, 16

SHAPES = {
    "embed": (V, D),
    "layers": {"wq": (L, D, N, H), "wo": (L, N, H, D), "up": (L, D, F), "norm": (L, D), "bq": (L, N, H)},
    "norm": (D,),
    "head": (D, V),
}
ROLES = {
    "embed": "embedding",
    "layers": {"wq": "matrix", "wo": "matrix", "up": "matrix", "norm": "norm", "bq": "bias"},
    "norm": "norm",
    "head": "head",
}
MATRIX_DIMS = {
    "embed": None,
    "layers": {"wq": ((1,), (2, 3)), "wo": ((1, 2), (3,)), "up": ((1,), (2,)), "norm": None, "bq": None},
    "norm": None,
    "head": None,
}
AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "wo": ("layers", "heads", "head_dim", "embed"),
        "up": ("layers", "embed", "mlp"),
        "norm": ("layers", "embed"),
        "bq": ("layers", "heads", "head_dim"),
    },
    "norm": ("embed",),
    "head": ("embed", "vocab"),
}


def config(name="adamw", **changes):
    defaults = dict(learning_rate=0.1, b1=0.9, b2=0.95, weight_decay=0.0, schedule="constant")
    # a copy is not checked: some tests ask for what no run file may
    return run_file.Run().optimizer.model_copy(update=dict(name=name) | defaults | changes)


def build(cfg, steps=10):
    return optimizer.build(cfg, steps, ROLES, MATRIX_DIMS)


def random_params(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), dtype), SHAPES,
                        is_leaf=lambda x: isinstance(x, tuple))


def updates_of(cfg, sequence, params):
    """The update after the last gradients of a sequence."""
    tx = build(cfg)
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for step, grads in enumerate(sequence):
        updates, state = update(grads, state, params, step=step)
    return updates


@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_of_a_quadratic_falls(name):
    tx = build(config(name), 30)
    target, params = random_params(1), random_params(2)
    losses = lambda params: jax.tree.map(lambda p, t: jnp.mean((p - t) ** 2), params, target)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params, step=0)
        return optax.apply_updates(params, updates), state

    before, state = losses(params), jax.jit(tx.init)(params)
    for _ in range(30):
        params, state = step(params, state)
    jax.tree.map(lambda new, old: np.testing.assert_array_less(new, 0.5 * old), losses(params), before)


@pytest.mark.parametrize("name", NAMES)
def test_decay_reaches_matrices_and_tables_and_never_norms_or_biases(name):
    params = random_params()
    grads = jax.tree.map(jnp.zeros_like, params)
    decayed = updates_of(config(name, weight_decay=0.5), [grads], params)
    for (path, update), p in zip(jax.tree.leaves_with_path(decayed), jax.tree.leaves(params), strict=True):
        is_vector = str(path[-1].key) in ("norm", "bq")
        np.testing.assert_allclose(update, 0 * p if is_vector else -0.1 * 0.5 * p, rtol=1e-6, err_msg=str(path))


def test_nothing_moves_before_the_first_step_whatever_the_schedule(tmp_path):
    (tmp_path / "mine.py").write_text("def rate(cfg, steps): return lambda count: cfg.learning_rate\n")
    params = random_params()
    for schedule in ("constant", f"{tmp_path}/mine.py:rate"):
        tx = build(config(schedule=schedule, weight_decay=0.5))
        updates, _ = jax.jit(lambda p: tx.update(p, tx.init(p), p, step=jnp.int32(-1)))(params)
        assert not any(map(np.any, jax.tree.leaves(updates))), schedule


def learning_rates(steps, **changes):
    rate = optimizer.learning_rate_schedule(config(learning_rate=2.0, **changes), steps)
    return [float(rate(count)) for count in range(steps)]


def test_schedules_have_the_promised_values():
    for name in ("cosine", "linear", "wsd", "constant"):
        rates = learning_rates(20, schedule=name, warmup_steps=4, decay_steps=5)
        assert rates[:4] == [0.5, 1.0, 1.5, 2.0], name  # warm-up: exact quarters of the peak
        assert rates[-1] == pytest.approx(2.0 if name == "constant" else 0.2), name
    halfway = {name: learning_rates(20, schedule=name, warmup_steps=4)[11] for name in ("cosine", "linear")}
    assert halfway == pytest.approx({"cosine": 1.1, "linear": 1.1})
    quarter = {name: learning_rates(20, schedule=name, warmup_steps=4)[7] for name in ("cosine", "linear")}
    assert quarter == pytest.approx({"cosine": 2 - 1.8 * (1 - np.cos(np.pi / 4)) / 2, "linear": 2 - 1.8 / 4})
    wsd = learning_rates(20, schedule="wsd", warmup_steps=4, decay_steps=5)
    assert wsd[3:15] == [2.0] * 12 and wsd[15] == pytest.approx(2 - 1.8 / 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_longer_than_the_run_is_cut_to_the_run(name):
    assert learning_rates(4, schedule=name, warmup_steps=100, decay_steps=100) == [0.5, 1.0, 1.5, 2.0]
    assert learning_rates(1, schedule=name, warmup_steps=100, decay_steps=100) == [2.0]
    (only,) = learning_rates(1, schedule=name, warmup_steps=0, decay_steps=0)
    assert np.isfinite(only) and only > 0


def test_a_decay_longer_than_the_run_is_cut_to_what_the_warm_up_leaves():
    assert learning_rates(6, schedule="wsd", warmup_steps=2, decay_steps=100) == learning_rates(
        6, schedule="linear", warmup_steps=2)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_stacked_layers_are_updated_as_separate_matrices_would_be(name):
    params, sequence = random_params(1), [random_params(2), random_params(3)]
    # Layers of very different gradient size, in one step rising and in the next falling: any statistic over all of them
    # would show.
    for grads, sizes in zip(sequence, (jnp.logspace(-3, 3, L), jnp.logspace(3, -3, L)), strict=True):
        grads["layers"] = jax.tree.map(lambda g: g * sizes.reshape((L,) + (1,) * (g.ndim - 1)), grads["layers"])
    together = updates_of(config(name), sequence, params)
    for layer in range(L):
        one = lambda tree: {**tree, "layers": jax.tree.map(lambda x: x[layer : layer + 1], tree["layers"])}
        alone = updates_of(config(name), [one(grads) for grads in sequence], one(params))
        # float32 sums of up to a hundred terms in another order, through Newton–Schulz's five steps
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[layer], rtol=2e-4, atol=1e-6),
                     alone["layers"], together["layers"])


def test_muon_orthogonalizes_projections_as_matrices_with_the_rms_of_adamw():
    params, grads = random_params(1), random_params(2)
    updates = updates_of(config("muon", learning_rate=1.0), [grads], params)["layers"]
    for name, matrix in (("wq", (D, N * H)), ("wo", (N * H, D)), ("up", (D, F))):
        for layer in range(L):
            update = -np.asarray(updates[name][layer]).reshape(matrix) / (0.2 * np.sqrt(max(matrix)))
            left, _, right = np.linalg.svd(np.asarray(grads["layers"][name][layer]).reshape(matrix),
                                           full_matrices=False)
            singular = np.diag(left.T @ update @ right.T)  # in the gradient's own basis: Newton–Schulz keeps it
            assert singular.min() > 0.3 and singular.max() < 1.3, (name, layer, singular)
            assert np.abs(left.T @ update @ right.T - np.diag(singular)).max() < 1e-4


def test_muon_leaves_tables_norms_and_biases_to_adamw():
    params, grads = random_params(1), random_params(2)
    muon, adamw = (updates_of(config(name, weight_decay=0.1), [grads, grads], params) for name in ("muon", "adamw"))
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), muon, adamw)
    assert same == jax.tree.map(lambda role: role != "matrix", ROLES)


def test_adafactor_equals_optax_where_both_factor_the_same_matrix():
    rng = np.random.default_rng(0)
    params, grads = jnp.zeros((D, V)), [jnp.asarray(rng.normal(size=(D, V)), jnp.float32) for _ in range(3)]
    reference = optax.adafactor(0.1, min_dim_size_to_factor=1, multiply_by_parameter_scale=False)
    ours = optimizer.build(config("adafactor", b2=1.0), 10, {"w": "head"}, {"w": None})
    state, expected_state = ours.init({"w": params}), reference.init(params)
    for grad in grads:
        update, state = ours.update({"w": grad}, state, {"w": params}, step=0)
        expected, expected_state = reference.update(grad, expected_state, params)
        np.testing.assert_allclose(update["w"], expected, rtol=1e-5)


def test_adafactor_survives_a_token_not_seen_beside_huge_gradients():
    params = random_params()
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e6), params)
    grads["embed"] = grads["embed"].at[3].set(0.0)
    updates = updates_of(config("adafactor"), [grads, grads], params)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    assert not updates["embed"][3].any() and updates["embed"][2].all()


@pytest.mark.parametrize("name", ["adafactor", "muon"])  # the two that look across a whole matrix
def test_a_sharded_update_equals_the_plain_one(name):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))
    rules = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    place = lambda tree, axes: jax.tree.map(lambda _, a: NamedSharding(mesh, P(*map(rules.get, a))), tree, axes)
    tx, params, grads = build(config(name)), random_params(1), random_params(2)
    state = jax.jit(tx.init)(params)
    shardings = place(params, AXES), place(state, states.state_axes(tx, params, AXES))
    update = functools.partial(tx.update, step=0)
    step = jax.jit(update, out_shardings=shardings)
    sharded = step(jax.device_put(grads, shardings[0]), jax.device_put(state, shardings[1]),
                   jax.device_put(params, shardings[0]))
    # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
                 sharded, jax.jit(update)(grads, state, params))


@pytest.mark.parametrize("name", NAMES)
def test_state_axes_name_every_dim_of_the_state(name):
    tx = build(config(name))
    params = jax.eval_shape(random_params)
    state = jax.eval_shape(tx.init, params)
    axes = states.state_axes(tx, params, AXES)
    size = {"layers": L, "embed": D, "heads": N, "head_dim": H, "mlp": F, "vocab": V}

    def check(leaf, axes):
        assert isinstance(axes, tuple) and len(axes) == leaf.ndim
        assert all(axis is None or size[axis] == n for axis, n in zip(axes, leaf.shape, strict=True))
        assert leaf.dtype in (jnp.float32, jnp.int32)
        return leaf.size

    sizes = jax.tree.leaves(jax.tree.map(check, state, axes))
    moments = {"adamw": 2, "lion": 1, "muon": 1, "adafactor": 0}[name]
    assert sum(sizes) >= moments * sum(leaf.size for leaf in jax.tree.leaves(params))


def test_a_constant_dim_of_the_state_is_no_dim_of_a_parameter():
    """Whatever its size: one that a probe has once is another in the next."""
    held = lambda params: {"table": jnp.zeros((1009, 1010, 3)), "moments": jax.tree.map(jnp.zeros_like, params)}
    tx = optax.GradientTransformation(held, lambda grads, state, params=None: (grads, state))
    axes = states.state_axes(tx, jax.eval_shape(random_params), AXES)
    assert axes["table"] == (None, None, None) and axes["moments"] == AXES


def test_a_square_state_is_split_once_by_the_name_of_its_rows():
    """A preconditioner [D, D] of each dim, as of Shampoo. Two dims over one mesh axis would be jax's error."""
    squares = lambda params: jax.tree.map(lambda w: [jnp.zeros((n, n)) for n in w.shape], params)
    tx = optax.GradientTransformation(squares, lambda grads, state, params=None: (grads, state))
    axes = states.state_axes(tx, jax.ShapeDtypeStruct((D, F), jnp.float32), ("embed", "mlp"))
    assert axes == [("embed", None), ("mlp", None)]


def test_a_state_whose_form_depends_on_sizes_is_named_by_its_own_form():
    """optax's adafactor factors the two largest dims, if they are large enough: other dims than in a probe."""
    shapes = {"h": (6, 15, 5), "w": (15, 30), "small": (3, 15), "b": (15,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    axes = {"h": ("heads", "embed", "head_dim"), "w": ("embed", "mlp"), "small": ("kv_heads", "embed"), "b": ("embed",)}
    state = states.state_axes(optax.adafactor(1e-2, min_dim_size_to_factor=4), params, axes)[0]
    assert state.v_row == {"h": ("heads", "head_dim"), "w": ("embed",), "small": (None,), "b": (None,)}
    assert state.v_col == {"h": ("embed", "head_dim"), "w": ("mlp",), "small": (None,), "b": (None,)}
    assert state.v == {"h": (None,), "w": (None,), "small": ("kv_heads", "embed"), "b": ("embed",)}
    by_size = optax.multi_transform({"large": optax.trace(0.9), "small": optax.identity()}, lambda params: jax.tree.map(
        lambda w: "large" if w.size > 100 else "small", params))
    traces = states.state_axes(by_size, params, axes).inner_states["large"].inner_state.trace
    assert traces["w"] == axes["w"] and traces["h"] == axes["h"] and not jax.tree.leaves(traces["b"])


def test_adafactor_rows_and_columns_get_the_axes_that_remain():
    tx = build(config("adafactor"))
    moments = optax.tree.get(states.state_axes(tx, jax.eval_shape(random_params), AXES), "moments")
    assert moments == {
        "embed": (("vocab",), ("embed",)),
        "layers": {
            "wq": (("layers", "embed"), ("layers", "heads", "head_dim")),
            "wo": (("layers", "heads", "head_dim"), ("layers", "embed")),
            "up": (("layers", "embed"), ("layers", "mlp")),
            "norm": (("layers", "embed"),),
            "bq": (("layers", "heads", "head_dim"),),
        },
        "norm": (("embed",),),
        "head": (("embed",), ("vocab",)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_parameters_keep_float32_state(name):
    params = random_params(dtype=jnp.bfloat16)
    tx = build(config(name))
    state = jax.eval_shape(tx.init, params)
    updates, new_state = jax.eval_shape(functools.partial(tx.update, step=0), params, state, params)
    assert {x.dtype for x in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, new_state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


def test_a_role_that_nobody_knows_is_refused():
    with pytest.raises(AssertionError, match="matrx"):
        optimizer.build(config(), 1, {"a": "matrx"}, {"a": None})


def one_layer_run(**training):
    """The smallest model on one device, assembled, and a batch for it."""
    run = run_file.Run(
        model=dict(vocab_size=64, embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8, compute_dtype="float32"),
        data=dict(seq_len=8, global_batch=2), training=training,
        optimizer=dict(learning_rate=0.1, eps=1e-30, weight_decay=0.0, schedule="linear",
                       warmup_steps=2, final_fraction=0.0))
    made = assembly.assemble(run, jax.devices()[:1])
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)
    rows = dict(tokens=ids, targets=ids + 1, segments=np.ones_like(ids), positions=ids % 8, index=ids % 8,
                sequence=np.arange(2, dtype=np.int32))
    return made, made.program.place(rows)


def test_the_logged_learning_rate_is_the_one_applied_and_reaches_its_end_through_a_skipped_step():
    """Adam's first applied update moves every weight with a gradient by the learning rate: lr · g / |g|."""
    made, batch = one_layer_run(steps=4, grad_clip=0.0)
    step = made.program.compile()
    with jax.set_mesh(made.mesh):
        state = made.program.initialize()
    good = jax.device_get(state.params)
    state = State(state.step, jax.tree.map(lambda w: w.at[...].set(jnp.nan), state.params), state.opt_state)
    counts_before = [x for x in jax.tree.leaves(jax.device_get(state.opt_state)) if x.dtype == np.int32]
    state, metrics = step(state, batch)
    assert metrics["skipped"] and metrics["learning_rate"] == np.float32(0.05)
    counts = [x for x in jax.tree.leaves(jax.device_get(state.opt_state)) if x.dtype == np.int32]
    # of applied updates: the bias correction waits, the learning rate does not
    assert counts == counts_before == [0]
    state = State(state.step, jax.device_put(good, made.program.step.state.sharding.params), state.opt_state)
    state, metrics = step(state, batch)
    moved = max(np.abs(new - old).max()
                for new, old in zip(*map(jax.tree.leaves, (jax.device_get(state.params), good))))
    assert metrics["learning_rate"] == np.float32(0.1)
    assert moved == pytest.approx(0.1, rel=1e-5)        # float32 rounding of lr · m / (√v + eps) and of the sum
    rates = [float(metrics["learning_rate"])]
    for _ in range(2):
        state, metrics = step(state, batch)
        rates.append(float(metrics["learning_rate"]))
    assert rates == pytest.approx([0.1, 0.05, 0.0]) and int(state.step) == 4
