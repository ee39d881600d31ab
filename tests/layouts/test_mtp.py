"""Multi-token prediction: losses and gradients are those of an oracle in float64, on every layout.

tests/goldens/mtp_goldens.npz was written by a program in numpy that computes every document alone, by the formulas of
arXiv:2412.19437 2.2, and differentiates by complex steps. It has two depths, that read the state after the norms
("post"), and masked targets, documents of one to six tokens, and padding.
"""
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest

from meshtrain import config
from meshtrain.model import mtp, transformer
from meshtrain.names import NO_TARGET
from meshtrain.parity import compare

GOLDENS = np.load(parity.RULES.parent / "tests" / "goldens" / "mtp_goldens.npz")
V, D, T = 40, 12, 12
MODEL = dict(vocab_size=V, embed_dim=D, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20,
             norm_eps=1e-3, compute_dtype="float32", mtp_layers=2)
ONE = dict(mesh={}, rule="ddp")
LAYOUTS = {"one device": ONE,
           "zigzag ring": dict(mesh=dict(context=2), rule="zero3"),
           "stages": dict(mesh=dict(stage=2), rule="zero3", training=dict(microbatches=2),
                          pipeline=dict(schedule="1f1b"))}


def run_of(mesh, rule, model=None, training=None, **sections) -> config.Run:
    return config.Run(mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rule}.toml")), model=MODEL | (model or {}),
                      data=dict(seq_len=T, global_batch=2),
                      training=dict(mtp_weight=0.3, steps=9) | (training or {}), **sections)


def golden_tree(model: transformer.Transformer) -> dict:
    """The oracle's weights as parameters of the model."""
    def at(*path):
        return GOLDENS["w:" + "/".join(map(str, path))]

    def layer(*path):
        heads = {"q": (D, 4, 6), "k": (D, 2, 6), "v": (D, 2, 6), "o": (4, 6, D)}
        shaped = {name: at(*path, name).reshape(shape) for name, shape in heads.items()}
        return {"attention_norm": {"scale": at(*path, "norm1")}, "mlp_norm": {"scale": at(*path, "norm2")},
                "attention": {name: {"kernel": shaped[name[0]]} for name in ("query", "key", "value", "out")},
                "mlp": {name: {"kernel": at(*path, name)} for name in ("gate", "up", "down")}}
    rows = transformer.pad_vocab(model.cfg) - V
    tree = {"embedding": {"table": np.pad(at("embedding"), [(0, rows), (0, 0)])},
            "final_norm": {"scale": at("final_norm")}, "head": {"kernel": np.pad(at("head"), [(0, 0), (0, rows)])},
            "layers": jax.tree.map(lambda *arrays: np.stack(arrays), *(layer("layers", i) for i in range(2)))}
    for k in range(2):
        of = lambda name: {"scale": at("mtp", k, name)}
        both = at("mtp", k, "eh_proj")
        tree[mtp.name(k + 1)] = {
            "embedding_norm": of("enorm"), "hidden_norm": of("hnorm"), "norm": of("norm"), "layer": layer("mtp", k, "layer"),
            "from_embedding": {"kernel": both[:D]}, "from_hidden": {"kernel": both[D:]}}
    return jax.tree.map(lambda a: a.astype(np.float32), tree)


def rows() -> dict:
    batch = {name.removeprefix("batch:"): GOLDENS[name] for name in GOLDENS.files if name.startswith("batch:")}
    return batch | {"index": np.tile(np.arange(T, dtype=np.int32), (2, 1)), "sequence": np.arange(2, dtype=np.int32)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_the_oracle(layout):
    made = parity.assemble(run_of(**LAYOUTS[layout]))
    params = jax.device_put(golden_tree(made.model), made.program.step.state.sharding.params)
    batch = made.program.place(rows())
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        grads, loss, count, metrics = jax.jit(made.program.gradients)(params, batch, None)
        total, targets = made.program.evaluate(params, batch)
    g, metrics = jax.device_get(grads), mtp.report(metrics)
    sums, counts = GOLDENS["post:sums"], GOLDENS["post:counts"]
    # float32: 1e-6 is ten roundings of a mean of 19 numbers
    assert [float(loss), float(total / targets)] == pytest.approx([sums[0] / counts[0]] * 2, rel=1e-6)
    assert (float(count), float(targets)) == (counts[0],) * 2
    assert [float(metrics[f"mtp_loss_{k}"]) for k in (1, 2)] == pytest.approx(sums[1:] / counts[1:], rel=1e-6)
    assert all(float(metrics[f"mtp_accept_{k}"]) * counts[k] == pytest.approx(round(
        float(metrics[f"mtp_accept_{k}"]) * counts[k]), abs=1e-4) for k in (1, 2))
    pairs = {"embedding": g["embedding"]["table"][:V], "head": g["head"]["kernel"][:, :V],
             "final_norm": g["final_norm"]["scale"], "layer1_down": g["layers"]["mlp"]["down"]["kernel"][1],
             "mtp1_layer_q": g["mtp_1"]["layer"]["attention"]["query"]["kernel"].reshape(D, 24)}
    for k in (1, 2):
        of = g[mtp.name(k)]
        pairs[f"mtp{k}_eh_proj"] = np.concatenate([of["from_embedding"]["kernel"], of["from_hidden"]["kernel"]])
        pairs |= {f"mtp{k}_{theirs}": of[ours]["scale"] for ours, theirs in (
            ("embedding_norm", "enorm"), ("hidden_norm", "hnorm"), ("norm", "norm"))}
    wanted = {name: GOLDENS[f"post:d:{name}"] for name in pairs}
    assert len(wanted) == sum(name.startswith("post:d:") for name in GOLDENS.files)
    worst = {name: np.abs(pairs[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in pairs}
    assert max(worst.values()) < 1e-5, worst     # the other feed ("pre") is 0.4 away


def test_every_depth_sees_the_tokens_of_its_own_document():
    """Compared with loops over documents, of rows with documents of one token, masked targets and padding."""
    run = run_of(**ONE)
    batch = parity.batch_of(run.replace(data={"seq_len": 48, "global_batch": 8}), 0)
    shifted = mtp.shift(batch, 3)
    assert sorted(shifted) == sorted(f"{name}_{k}" for name in ("tokens", "targets") for k in (1, 2, 3))
    for k in (1, 2, 3):
        for b, t in np.ndindex(*batch["tokens"].shape):
            segment = batch["segments"][b, t]
            inside = segment > 0 and t + k < 48 and batch["segments"][b, t + k] == segment
            assert shifted[f"tokens_{k}"][b, t] == (batch["tokens"][b, t + k] if inside else NO_TARGET)
            assert shifted[f"targets_{k}"][b, t] == (batch["targets"][b, t + k] if inside else NO_TARGET)
    assert all(array.dtype == np.int32 for array in shifted.values())
    one = {name: batch[name][:, :1] for name in ("tokens", "targets", "segments")}
    assert (mtp.shift(one, 2)["targets_2"] == NO_TARGET).all()


def test_a_seed_gives_the_same_model_with_and_without_depths():
    with_depths, without = (run_of(**ONE, model=dict(mtp_layers=n)) for n in (2, 0))
    found, expected = (jax.device_get(jax.jit(transformer.of_run(run).init)(jax.random.key(7)))
                       for run in (with_depths, without))
    assert {name for name in found if name not in expected} == {"mtp_1", "mtp_2"}
    jax.tree.map(np.testing.assert_array_equal, {name: found[name] for name in expected}, expected)
    assert (found["mtp_1"]["from_hidden"]["kernel"] != found["mtp_2"]["from_hidden"]["kernel"]).any()


@pytest.mark.parametrize("more, message", [
    (dict(model=dict(position="learned")), "model.position=\"learned\""),
    (dict(model=dict(mixers="G", linear=dict(key_heads=2, value_heads=2))), "no layer has it"),
    (dict(lora=dict(rank=2)), "which lora.rank=2 freezes; use lora.also=[\"mtp\"], which trains them whole, or training.mtp_weight=0"),
    (dict(training=dict(objective="dpo")), "not part of training.objective=\"dpo\""),
    (dict(training=dict(objective="file.py:Own")), "not part of training.objective=\"file.py:Own\""),
    (dict(optimizer=dict(qk_clip=100.0)), "does not clip the layers of model.mtp_layers=2"),
])
def test_what_depths_do_not_support_is_refused_in_one_message(more, message):
    problems = [line for line in config.problems(run_of(**ONE, **more)) if "mtp_" in line]
    assert len(problems) == 1 and message in problems[0], problems
    weightless = {**more, "training": more.get("training", {}) | {"mtp_weight": 0.0}}
    left = [line for line in config.problems(run_of(**ONE, **weightless)) if "mtp_" in line]
    assert bool(left) == ("mtp_weight" not in message and "mtp_weight" not in problems[0]), left


def test_a_weight_without_depths_is_told():
    lines = config.notes(run_of(**ONE, model=dict(mtp_layers=0)))
    assert [line for line in lines if line.startswith("training.mtp_weight=0.3 has no effect here")]
    assert not [line for line in config.notes(run_of(**ONE)) if "mtp" in line]


CELLS = {
    "data, tensor": dict(mesh=dict(data=2, fsdp=2, tensor=2), rule="zero3"),
    "tensor, 2 microbatches": dict(mesh=dict(tensor=4), rule="tensor", training=dict(microbatches=2)),
    "zero1, remat full": dict(mesh=dict(fsdp=4), rule="zero1", training=dict(remat="full")),
    "ulysses, remat selective": dict(mesh=dict(context=2, fsdp=2), rule="zero3", training=dict(remat="selective"),
                                     context=dict(method="ulysses")),
    "gather, remat offload": dict(mesh=dict(context=2, data=2), rule="ddp", training=dict(remat="offload"),
                                  context=dict(method="gather")),
    "ring over four": dict(mesh=dict(context=4, tensor=2), rule="zero3"),
    "stages, tensor": dict(mesh=dict(stage=2, tensor=2), rule="zero3", training=dict(microbatches=4),
                           pipeline=dict(schedule="zero_bubble")),
    "stages, context": dict(mesh=dict(stage=2, context=2, fsdp=2), rule="zero1", training=dict(microbatches=2),
                            pipeline=dict(schedule="interleaved", chunks=2)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("cell", CELLS)
def test_layouts_compute_what_one_device_does(cell, tied):
    """Loss, metrics of every depth and every gradient; the tied model also with other norms, biases and factors."""
    more = dict(tie_embeddings=True, norm_placement="both", attention_bias="all", logit_softcap=5.0, norm_offset=1.0,
                multipliers=dict(embedding=3.0, logits=0.5)) if tied else {}
    run = run_of(**CELLS[cell], model=MODEL | dict(vocab_size=259, embed_dim=16, head_dim=8, num_layers=4) | more)
    run = run.replace(data={"seq_len": 16, "global_batch": 8})
    case = parity.check(run)
    assert {f"mtp_{what}_{k}" for what in ("loss", "accept") for k in (1, 2)} <= set(
        compare.train(case, parity.draw_parameters(case.made, 0), 1)[1])


@pytest.mark.full
@pytest.mark.parametrize("cell", ["data, tensor", "stages, tensor", "ulysses, remat selective"])
def test_a_depth_has_a_layer_like_the_last_one_with_attention(cell):
    """The model ends with a recurrent layer without an MLP; the depth's layer is the one before."""
    run = run_of(**CELLS[cell], model=MODEL | dict(
        vocab_size=259, embed_dim=16, head_dim=8, num_layers=4, mixers="NG", mlps="d.",
        linear=dict(key_heads=4, value_heads=4, key_dim=4, value_dim=4)))
    case = parity.check(run.replace(data={"seq_len": 16, "global_batch": 8}))
    layer = parity.draw_parameters(case.made, 0)["mtp_1"]["layer"]
    assert "attention" in layer and "mlp" in layer and "linear" not in layer


def test_beside_adapters_the_depths_are_trained_whole_where_lora_names_them():
    run = run_of(mesh=dict(fsdp=2, tensor=2), rule="zero3", model=dict(vocab_size=259, embed_dim=16, head_dim=8, mtp_layers=1),
                 lora=dict(rank=2, also=("mtp",)))
    case = parity.check(run.replace(data={"seq_len": 16, "global_batch": 8}))
    trained, frozen = case.made.model.divide(parity.draw_parameters(case.made, 0))
    assert "lora" in str(jax.tree.structure(trained["layers"])) and not jax.tree.leaves((trained["head"], frozen["mtp_1"]))
    for more, message in ((dict(training={"mtp_weight": 0.0}), "leave out"), (dict(lora={"export": "adapters"}), "no names")):
        assert len([line for line in config.problems(run.replace(**more)) if message in line]) == 1


def test_depths_without_a_weight_keep_theirs_and_change_nothing():
    """DPO, too, trains a model with depths, which stay as they are."""
    run = run_of(**ONE, model=dict(vocab_size=259), training=dict(mtp_weight=0.0))
    case, plain = (parity.compile_run(each) for each in (run, run.replace(model={"mtp_layers": 0})))
    assert not {name for name in case.made.program.step.batch if name.endswith(("_1", "_2"))}
    params = parity.draw_parameters(case.made, 0)
    found, expected = (compare.train(each, {name: params[name] for name in each.made.program.step.state.abstract.params}, 2)
                       for each in (case, plain))
    np.testing.assert_array_equal(found[0], expected[0])
    frozen = case.made.model.divide(params).frozen
    assert jax.tree.leaves(frozen["mtp_1"]) and not jax.tree.leaves({name: frozen[name] for name in ("embedding", "layers")})
    dpo = run.replace(training={"objective": "dpo"}, data={"global_batch": 4})
    assert config.problems(dpo.replace(data={"source": "preferences", "paths": ("x.jsonl",)})) == []
    parity.check(dpo)


def test_what_two_replicas_and_two_microbatches_report_is_a_mean_over_the_targets_of_the_depth():
    run = run_of(mesh=dict(data=2), rule="ddp", model=dict(vocab_size=259), training=dict(microbatches=2))
    case = parity.compile_run(run.replace(data={"global_batch": 8}))
    params = parity.draw_parameters(case.made, 0)
    batch = parity.batch_of(case.made.run, 0)
    metrics = compare.train(case, params, 1)[1]
    made = parity.assemble(parity.on_one_device(case.made.run))
    model, ex = made.model, made.program.step.ex
    rows = {name: jnp.asarray(x) for name, x in (batch | mtp.shift(batch, 2)).items()}
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        sums = jax.jit(lambda p: model.depth_losses(ex, p, model.through_layers(ex, p, rows), rows))(params)
    for k, (_, (nll, hits)) in enumerate(sums[0], 1):
        count = (rows[f"targets_{k}"] != NO_TARGET).sum()
        assert float(metrics[f"mtp_loss_{k}"]) == pytest.approx(float(nll / count), rel=1e-5)
        assert float(metrics[f"mtp_accept_{k}"]) == pytest.approx(float(hits / count), abs=1e-6)
