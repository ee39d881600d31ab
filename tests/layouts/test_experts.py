"""Layers with experts: on every layout the loss and every gradient leaf of a plain loop over experts on one device."""
import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from sampling import GRID

import experts
from meshtrain import assembly, config, run_files
from meshtrain.choices import experts as choices
from meshtrain.choices.setting import Choice, Setting
from meshtrain.cost.formulas import flops
from meshtrain.model import moe, transformer
from meshtrain.parallel.experts import all_to_all
from meshtrain.training import optimizer

V, T, SEQUENCES = 61, 16, 16
MODEL = dict(vocab_size=V, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
             mlp_dim=24, num_experts=8,
             experts_per_token=2, expert_mlp_dim=24, compute_dtype="float32")
EXPERTS = dict(aux_loss=0.5, z_loss=0.05, bias_rate=1e-3)
# Both sides sum in float32, in other orders; a gap of 1e-5 between scores keeps rounding from choosing another expert.
TOLERANCE, GAP = 2e-5, 1e-5

Z = '[params]\nembed = ["data", "fsdp"]\n'
BATCH = '[activations]\nbatch = ["data", "fsdp"]\n'
HEADS = 'heads = "tensor"\nkv_heads = "tensor"\n'
SEQUENCE = BATCH + 'residual_seq = "tensor"\n'
CONTEXT = BATCH + 'seq = "context"\nresidual_seq = "context"\n'
# name: (rules, mesh)
LAYOUTS = {
    "expert over fsdp": (Z + 'expert = "fsdp"\nexpert_embed = "data"\n' + BATCH, dict(data=2, fsdp=4)),
    "expert over tensor with sequence parallelism": (
        Z + 'expert = "tensor"\nexpert_embed = ["data", "fsdp"]\n' + SEQUENCE, dict(fsdp=2, tensor=4)),
    "expert over tensor without": (Z + 'expert = "tensor"\nexpert_embed = "fsdp"\n' + BATCH, dict(fsdp=2, tensor=4)),
    "expert over fsdp and context": (
        Z + 'expert = ["fsdp", "context"]\nexpert_embed = "data"\n' + CONTEXT, dict(data=2, fsdp=2, context=2)),
    "expert over fsdp, expert_mlp over tensor": (
        Z + 'expert = "fsdp"\nexpert_mlp = "tensor"\n' + SEQUENCE, dict(fsdp=4, tensor=2)),
    "expert over fsdp and tensor": (Z + 'expert = ["fsdp", "tensor"]\n' + SEQUENCE, dict(fsdp=4, tensor=2)),
    "expert over data, the rest once a step": ('[params]\nexpert = "data"\n' + BATCH, dict(data=2, fsdp=4)),
    "expert over fsdp, data once a step": ('[params]\nembed = "fsdp"\nexpert = "fsdp"\n' + BATCH, dict(data=2, fsdp=4)),
    "no axis of experts, zero3": (Z + BATCH, dict(data=2, fsdp=4)),
    "no axis of experts, zero3 with tensor": (Z + 'mlp = "tensor"\n' + SEQUENCE + 'mlp = "tensor"\n',
                                              dict(data=2, fsdp=2, tensor=2)),
    "ddp": (BATCH, dict(data=2, fsdp=2)),
    "zero1": (BATCH + '[optimizer]\nembed = ["data", "fsdp"]\n', dict(data=2, fsdp=2)),
    "zero2 of the experts": (BATCH + '[grads]\nexpert = ["data", "fsdp"]\n', dict(data=2, fsdp=2)),
    "expert_embed over tensor": (Z + 'expert = "fsdp"\nexpert_embed = "tensor"\n' + HEADS + BATCH + HEADS,
                                 dict(fsdp=4, tensor=2)),
}
STAGED = '[params]\nlayers = "stage"\nembed = ["data", "fsdp"]\nvocab = "stage"\n'
STAGED_BATCH = BATCH + 'vocab = "stage"\n'
# name: (rules, mesh, schedule, chunks)
PIPELINES = {
    "expert over fsdp, tensor beside, 1f1b": (
        STAGED + 'expert = "fsdp"\n' + STAGED_BATCH + 'residual_seq = "tensor"\n',
        dict(stage=2, fsdp=2, tensor=2), "1f1b", 1),
    "expert over tensor, interleaved zero bubble": (
        STAGED + 'expert = "tensor"\n' + STAGED_BATCH + 'residual_seq = "tensor"\n', dict(stage=2, fsdp=2, tensor=2),
        "interleaved_zero_bubble", 2),
    "expert over fsdp, expert_embed over data, zero bubble": (
        STAGED + 'expert = "fsdp"\nexpert_embed = "data"\n' + STAGED_BATCH, dict(stage=2, fsdp=2, data=2),
        "zero_bubble", 1),
    "expert over fsdp and tensor, gpipe": (
        STAGED + 'expert = ["fsdp", "tensor"]\n' + STAGED_BATCH + 'residual_seq = "tensor"\n',
        dict(stage=2, fsdp=2, tensor=2), "gpipe", 1),
    "expert over data and expert_mlp over tensor, layers that do not divide, 1f1b": (
        STAGED + 'expert = "data"\nexpert_mlp = "tensor"\n' + STAGED_BATCH, dict(stage=2, data=2, tensor=2), "1f1b", 1),
    "expert over context and fsdp, zero bubble": (
        STAGED + 'expert = ["context", "fsdp"]\n' + STAGED_BATCH + 'seq = "context"\nresidual_seq = "context"\n',
        dict(stage=2, fsdp=2, context=2), "zero_bubble", 1),
    "no axis of experts, interleaved": (STAGED + STAGED_BATCH, dict(stage=2, fsdp=2, data=2), "interleaved", 2),
}
MODELS = {
    "softmax": {},
    "sigmoid in groups, scaled, shared, a dense layer first": dict(
        router_score="sigmoid", router_groups=(4, 2), router_scale=2.5, shared_expert_dim=8, num_layers=3,
        mlps="de*"),
    "softmax, not normalized, three of six": dict(num_experts=6, experts_per_token=3,
                                                  router_normalize=False, expert_mlp_dim=10),
    "gelu, one of four": dict(num_experts=4, experts_per_token=1, activation="gelu", router_normalize=False),
    "geglu, all of three": dict(num_experts=3, experts_per_token=3, activation="geglu"),
}
FOUR_LAYERS = {"four layers": dict(num_layers=4),
               "three layers, sigmoid": dict(num_layers=3, router_score="sigmoid", shared_expert_dim=8)}
# Biases of the choice: every token to experts 3 and 0; nobody to 1, 2 and 6.
LEANINGS = {"all to two": {3: 1e3, 0: 5e2}, "three without any": {1: -1e3, 2: -1e3, 6: -1e3}}


def run_of(rules_file, mesh: dict, model: dict = {}, training: dict = {}, pipeline: dict = {},
           dispatch="auto") -> config.Run:
    return config.Run(mesh=mesh, sharding=dict(rules=str(rules_file)), model=MODEL | model,
                      experts=EXPERTS | dict(dispatch=dispatch),
                      data=dict(seq_len=T, global_batch=SEQUENCES),
                      training=dict(microbatches=2, loss_chunk=24) | training, pipeline=pipeline)


@functools.cache
def batch() -> dict:
    rng = np.random.default_rng(3)
    shape = (SEQUENCES, T)
    out = {"tokens": rng.integers(0, V, shape),
           "targets": np.where(rng.random(shape) < 0.2, -1, rng.integers(0, V, shape)),
           "index": np.tile(np.arange(T), (SEQUENCES, 1)), "positions": np.tile(np.arange(T), (SEQUENCES, 1)),
           "segments": np.ones(shape, int), "sequence": np.arange(SEQUENCES)}
    for row, real in ((2, 11), (5, 3), (9, 0)):       # filled up; nothing but padding
        for name, fill in (("tokens", 0), ("targets", -1), ("segments", 0)):
            out[name][row, real:] = fill
    return {name: a.astype(np.int32) for name, a in out.items()}


@functools.cache
def expected(model: str, leaning: str = ""):
    """(parameters, nll, gradients, counts) of a model on one device, by the plain loop."""
    run = run_of("sharding_rules/ddp.toml", {}, (MODELS | FOUR_LAYERS)[model])
    dumped, fresh = run.model_dump(), assembly.assemble(run, jax.devices()[:1]).model.init

    def moved(path, leaf):
        if path[-1].key == "router":
            return leaf * 2         # clearer choices
        if path[-1].key == "bias":
            return leaf + sum(b * (np.arange(leaf.shape[-1]) == n) for n, b in LEANINGS.get(leaning, {}).items())
        return leaf
    for seed in range(9):
        params = jax.device_get(jax.tree_util.tree_map_with_path(moved, jax.jit(fresh)(jax.random.key(seed))))
        nll, grads, counts, gap = experts.gradients(dumped["model"], dumped["experts"], params, batch())
        if gap > GAP:
            return params, nll, grads, counts
    raise AssertionError("no parameters with clear choices")


def computed(run: config.Run, params, devices, shares=None):
    """(loss, gradients, aux) of a step. shares: of the experts in the step before."""
    made = assembly.assemble(run, devices)
    program = made.program
    params = jax.device_put(params, program.step.state.sharding.params)
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        grads, loss, _, aux = jax.device_get(jax.jit(program.gradients)(params, program.place(batch()), None, shares))
    return float(loss), grads, aux


def assert_equal(run, wanted, devices, shares=None):
    params, nll, grads, counts = wanted
    loss, got, aux = computed(run, params, devices, shares)
    assert abs(loss - nll) < 2e-6 * nll          # one float32 sum of 256 numbers
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)), got, grads)
    worst = max((error, jax.tree_util.keystr(path)) for path, error in jax.tree_util.tree_leaves_with_path(errors))
    assert worst[0] < TOLERANCE, worst
    targets = (batch()["targets"] >= 0).sum()
    dense = run.model.mlps.count("d")
    np.testing.assert_allclose(aux["expert_load"][dense:] * targets, counts, rtol=1e-6)
    tokens = jax.tree_util.tree_leaves_with_path(got)
    biases = [leaf for path, leaf in tokens if path[-1].key == "bias"]
    assert biases and all((leaf == counts).all() for leaf in biases)        # whole numbers


def check(tmp_path, layout: str, model: str = "softmax", leaning: str = "", dispatch: str = "gather", **training):
    text, mesh = LAYOUTS[layout]
    rules_file = tmp_path / "rules.toml"
    rules_file.write_text(text)
    run = run_of(rules_file, mesh, MODELS[model], training, dispatch=dispatch)
    assert_equal(run, expected(model, leaning), jax.devices()[:math.prod(mesh.values())])


@pytest.mark.parametrize("model", [pytest.param(name, marks=() if "groups" in name else GRID) for name in MODELS])
def test_one_device_computes_what_a_loop_over_experts_does(model):
    assert_equal(run_of("sharding_rules/ddp.toml", {}, MODELS[model]), expected(model), jax.devices()[:1])


@functools.cache
def one_layer():
    """(assembled run, its parameters, its step's gradients) of one device."""
    made = assembly.assemble(run_of("sharding_rules/ddp.toml", {}, dict(num_layers=1), dict(microbatches=1)),
                             jax.devices()[:1])
    return made, made.model.init(jax.random.key(0)), jax.jit(made.program.gradients)


def stepped(rows: dict):
    """(loss, gradients by path, aux) of a step with these rows."""
    made, params, gradients = one_layer()
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        grads, loss, _, aux = jax.device_get(gradients(params, {name: a[None, None] for name, a in rows.items()}, None))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    return float(loss), leaves, aux


def test_padding_changes_neither_loss_nor_counts_nor_biases_nor_router():
    """Tokens of padding are others in the second step, and not there in the third: the same bits, and rounding alone,
    for a sum over 16 tokens is added in another order than one over 11."""
    whole = {name: a[:4] for name, a in batch().items()}
    real = np.array([[11], [3], [0], [8]]) > np.arange(T)
    padded = whole | {"targets": np.where(real, whole["targets"], -1), "segments": real.astype(np.int32)}
    other = padded | {"tokens": np.where(real, padded["tokens"], 7)}
    cut = {name: a[:, :11] if a.ndim > 1 else a for name, a in padded.items()}
    loss, grads, aux = stepped(padded)
    (bias,) = (name for name in grads if "bias" in name)
    assert grads[bias].sum() == real.sum() * MODEL["experts_per_token"] > 0
    assert aux["expert_load"].sum() * (padded["targets"] >= 0).sum() == pytest.approx(grads[bias].sum())
    again, by_name, aux_again = stepped(other)
    assert again == loss and all((by_name[name] == grads[name]).all() for name in grads)
    assert all((aux_again[name] == aux[name]).all() for name in aux)
    shorter, by_name, aux_shorter = stepped(cut)
    assert abs(shorter - loss) < 1e-6 * loss and (by_name[bias] == grads[bias]).all()
    for name in grads:
        np.testing.assert_allclose(by_name[name], grads[name], rtol=0, atol=1e-6 * np.abs(grads[name]).max(),
                                   err_msg=name)
    for name in aux:
        np.testing.assert_allclose(aux_shorter[name], aux[name], rtol=1e-6)


def test_a_tenth_of_the_targets_leaves_the_routers_losses_their_weight():
    whole = {name: a[:4] for name, a in batch().items()} | {"segments": np.ones((4, T), np.int32)}
    rng = np.random.default_rng(0)
    all_of_them = whole | {"targets": rng.integers(0, V, (4, T)).astype(np.int32)}
    few = all_of_them | {"targets": np.where(rng.random((4, T)) < 0.1, all_of_them["targets"], -1)}
    of_all, of_few = (stepped(rows)[2]["aux_loss"] for rows in (all_of_them, few))
    assert 0 < (few["targets"] >= 0).sum() < 12 and of_all == of_few > 0


FAST = ("expert over fsdp", "expert over tensor with sequence parallelism")


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in FAST else GRID) for name in LAYOUTS])
def test_layouts_compute_what_one_device_does(tmp_path, layout):
    check(tmp_path, layout)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=GRID) for name in LAYOUTS])
@pytest.mark.parametrize("model, leaning, remat", [
    ("softmax", "all to two", "full"), ("softmax", "three without any", "selective"),
    ("sigmoid in groups, scaled, shared, a dense layer first", "", "full")])
def test_uneven_choices_and_other_routers_on_layouts(tmp_path, layout, model, leaning, remat):
    check(tmp_path, layout, model, leaning, remat=remat)


FIRST, SPLIT, DATA = "expert over fsdp, tensor beside, 1f1b", "expert over tensor, interleaved zero bubble", \
    "expert over fsdp, expert_embed over data, zero bubble"


@pytest.mark.parametrize("name, leaning, dispatch, remat", [pytest.param(*case, marks=GRID) for case in (
    *((name, "", "auto", "none") for name in PIPELINES),
    *((name, leaning, "gather", "full") for name in (FIRST, SPLIT) for leaning in LEANINGS),
    (DATA, "", "all_to_all", "none"), (DATA, "all to two", "all_to_all", "full"))])
def test_pipelines_compute_what_one_device_does(tmp_path, name, leaning, dispatch, remat):
    text, mesh, schedule, chunks = PIPELINES[name]
    model = "three layers, sigmoid" if "do not divide" in name else "four layers"
    rules_file = tmp_path / "rules.toml"
    rules_file.write_text(text)
    run = run_of(rules_file, mesh, FOUR_LAYERS[model], dict(microbatches=4, remat=remat),
                 dict(schedule=schedule, chunks=chunks), dispatch)
    assert_equal(run, expected(model, leaning), jax.devices()[:math.prod(mesh.values())])


@pytest.mark.parametrize("spare, leaning", [(0.3, "all to two"), pytest.param(1.0, "", marks=GRID),
                                            pytest.param(0.3, "", marks=GRID)])
def test_a_buffer_that_is_too_small_takes_more_rounds(tmp_path, monkeypatch, spare, leaning):
    choose = choices.choose

    def choose_with_spare(setting: Setting) -> Choice:
        chosen = choose(setting)
        return dataclasses.replace(chosen, value=dataclasses.replace(chosen.value, capacity_factor=spare))
    monkeypatch.setattr(choices, "choose", choose_with_spare)
    check(tmp_path, "expert over fsdp", leaning=leaning)


SENT = ("expert over fsdp", "expert over tensor with sequence parallelism", "expert over fsdp and context",
        "expert over fsdp and tensor", "expert over data, the rest once a step", "expert over fsdp, data once a step",
        "expert_embed over tensor")


@pytest.mark.parametrize("layout, leaning, capacity", [
    ("expert over fsdp", "all to two", 0.3), *(pytest.param(layout, leaning, capacity, marks=GRID)
    for layout in SENT for leaning in ("", "all to two", "three without any") for capacity in (all_to_all.CAPACITY_FACTOR, 0.3)
    if (layout, leaning, capacity) != ("expert over fsdp", "all to two", 0.3))])
def test_tokens_that_are_sent_compute_the_same(tmp_path, monkeypatch, layout, leaning, capacity):
    monkeypatch.setattr(all_to_all, "CAPACITY_FACTOR", capacity)
    check(tmp_path, layout, leaning=leaning, dispatch="all_to_all")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in SENT])
def test_an_all_to_all_that_cannot_be_is_refused(tmp_path, layout):
    with pytest.raises(config.ConfigError, match='experts.dispatch="all_to_all": .*; use "gather"'):
        check(tmp_path, layout, dispatch="all_to_all")


@pytest.mark.parametrize("K, num_shards, said",
                         [(2, 2, "gather over fsdp 2, because 2 shards are fewer than 1.25 × 2 experts per token"),
                                          (2, 4, "all_to_all over fsdp 4, because 4 shards are not fewer"),
                                          (8, 8, "gather over fsdp 8")])
def test_auto_takes_what_sends_less_and_says_so(K, num_shards, said):
    run = run_of("sharding_rules/zero3_experts_fsdp.toml", dict(fsdp=num_shards), dict(experts_per_token=K))
    made = assembly.assemble(run, jax.devices()[:num_shards])
    assert any(note.startswith(f"experts: {said}") for note in made.notes)
    assert made.program.step.ex.engines.experts.by_all_to_all == ("all_to_all" in said)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_biases_move_towards_experts_with_too_few_tokens_by_their_rate_alone(name):
    cfg = config.Optimizer(name=name, learning_rate=0.5, weight_decay=0.3)
    roles, dims = {"layers": {"bias": "balance", "w": "matrix"}}, {"layers": {"bias": None, "w": ((1,), (2,))}}
    p = {"layers": {"bias": np.full((2, 3), 7.0, np.float32), "w": np.ones((2, 4, 4), np.float32)}}
    counts = np.array([[9, 3, 0], [4, 4, 4]], np.float32)
    tx = optimizer.build(cfg, 10, roles, dims, experts=config.Experts(bias_rate=0.01))
    updates, _ = tx.update({"layers": {"bias": counts, "w": p["layers"]["w"]}}, tx.init(p), p, step=0)
    np.testing.assert_allclose(updates["layers"]["bias"], [[-0.01, 0.01, 0.01], [0, 0, 0]])
    assert (updates["layers"]["w"] != 0).all()


def test_biases_move_by_the_share_of_the_mean_that_their_expert_lacks_where_the_rule_is_the_error():
    """Their mean stays: what some gain others lose. A layer without a token (all frozen, none routed) moves nothing."""
    counts = np.array([[9, 3, 0], [4, 4, 4], [0, 0, 0]], np.float32)
    p = {"layers": {"bias": np.full((3, 3), 7.0, np.float32)}}
    tx = optimizer.build(config.Optimizer(), 10, {"layers": {"bias": "balance"}}, {"layers": {"bias": None}},
                         experts=config.Experts(bias_rate=0.01, bias_rule="error"))
    updates, _ = tx.update({"layers": {"bias": counts}}, tx.init(p), p, step=0)
    np.testing.assert_allclose(updates["layers"]["bias"],
                               0.01 * np.array([[-5 / 4, 1 / 4, 1], [0, 0, 0], [0, 0, 0]]), rtol=1e-6)


@pytest.mark.parametrize("rule", ["sign", "error"])
@pytest.mark.parametrize("num_experts", [3, 6, 7, 60])
def test_biases_stay_where_all_experts_have_just_the_mean(num_experts, rule):
    tokens = np.concatenate([np.arange(1, 1000), (1 << 20) + np.arange(1, 1000, 2)])     # 60 of those are beyond 2^24
    counts = np.tile(tokens[:, None], num_experts).astype(np.float32)
    p = {"layers": {"bias": np.zeros_like(counts)}}
    tx = optimizer.build(config.Optimizer(), 10, {"layers": {"bias": "balance"}}, {"layers": {"bias": None}},
                         experts=config.Experts(bias_rate=0.01, bias_rule=rule))
    updates, _ = jax.jit(lambda counts: tx.update({"layers": {"bias": counts}}, tx.init(p), p, step=0))(counts)
    assert (updates["layers"]["bias"] == 0).all()


def test_the_load_of_every_layer_is_reported_and_a_dense_one_has_none():
    # tokens, divided by the step's targets
    load = np.array([[0, 0, 0, 0], [2, 2, 2, 2], [6, 1, 1, 0]], np.float32) / 3
    got = jax.device_get(moe.report_load({"expert_load": load, "aux_loss": 5.0}))
    half = -(6 * np.log(6 / 8) + 2 * np.log(1 / 8)) / 8 / np.log(4)
    wanted = {"expert_load_max_by_layer": [np.nan, 1, 3], "expert_load_min_by_layer": [np.nan, 1, 0],
              "expert_load_entropy_by_layer": [np.nan, 1, half], "expert_load_max": 3,
              "expert_load_entropy": (1 + half) / 2, "aux_loss": 5}
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)
    alone = moe.report_load({"expert_load": np.ones((2, 1), np.float32)})      # one expert is always as busy as the mean
    assert alone["expert_load_max"] == alone["expert_load_entropy"] == 1


# ---- the shipped models ----------------------------------------------------------------------------------------------

PUBLISHED = {       # total and active parameters, from the models' configurations
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248), "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704), "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "gpt-oss-20b": (20_914_757_184, 4_189_376_064), "qwen3.5-9b": (8_953_803_264, 8_953_803_264),
    "deepseek-v3": (671_026_419_200, 37_552_297_472), "glm-4.7-flash": (29_943_393_920, 3_896_766_080)}


def mixer_flops(preset: str, cfg, S: int) -> float:
    """Forward and backward of a token beside matrices, written out: attention to half of S tokens with keys and values
    as wide as they are, 128 tokens of gpt-oss's windows; of a recurrence three products with the state."""
    L, N, H = cfg.num_layers, cfg.num_heads, cfg.head_dim
    if preset == "gpt-oss-20b":
        within = (128 * S - 128 * 127 / 2 - 64) / S         # the first 127 tokens see fewer
        return 3 * 2 * (2 * N * H) * (12 * S / 2 + 12 * within)
    if preset == "qwen3.5-9b":
        return 3 * (8 * 2 * (2 * N * H) * S / 2 + 24 * 3 * 2 * 32 * 128 * 128)
    V = {"deepseek-v3": 128, "glm-4.7-flash": 256}.get(preset, H)
    return 3 * L * 2 * N * (H + V) * S / 2


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_total_and_active_parameters(preset):
    run = run_files.load(["--model.preset", preset, "--data.source", "tokens", "--data.paths", '["a.tokens.npy"]'])
    model, cfg = transformer.build(run.model), run.model
    padding = 2 * (transformer.pad_vocab(cfg) - cfg.vocab_size) * cfg.embed_dim
    total, active = (sum(of(info) for info in model.parameters()) - padding
                     for of in (lambda info: info.size, lambda info: flops.active(info, cfg)))
    assert (total, active) == PUBLISHED[preset]
    # 6 FLOPs for each active parameter that is multiplied, and the mixers' own.
    added = sum(flops.active(info, cfg) for info in model.parameters()
                if info.role not in ("matrix", "router", "head", "embedding"))
    multiplied = active + padding // 2 - cfg.vocab_size * cfg.embed_dim - added
    assert flops.model_flops_per_token(model.parameters(), cfg, 4096) == pytest.approx(
        6 * multiplied + mixer_flops(preset, cfg, 4096), rel=1e-12)
