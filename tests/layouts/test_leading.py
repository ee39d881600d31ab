"""Dense layers before stages of experts: every schedule computes what one device does, and no stage computes them for
another."""
import math

import jax
import numpy as np
import parity
import pytest
from sampling import GRID

from checkpoints import assert_same_bits
from meshtrain import assembly, config, run_files
from meshtrain import hardware
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas import flops, footprint, price, rates
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.model import transformer
from meshtrain.names import LEADING
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import is_axes
from meshtrain.shipped import locate_shipped
from test_experts import (BATCH, MODELS, PIPELINES, SEQUENCES, STAGED, STAGED_BATCH, T, assert_equal, expected,
                          run_of)
import steps

TWO = "two dense layers, then four"
MODELS |= {
    TWO: dict(num_layers=6, mlps="dde*"),
    "one dense layer, then five, sigmoid, shared": dict(num_layers=6, mlps="de*",
                                                        router_score="sigmoid", shared_expert_dim=8),
    "periods of two, two of them dense": dict(num_layers=7, mlps="dddde*", mixers="WF",
                                              window=5, qk_norm="head")}
# Experts in the layers before the stages: of those that differ by a window, and of those before dense ones.
FIRST_OF_FIVE = {"a window first": dict(num_layers=5, mixers="WF*", window=3),
                 "experts first": dict(num_layers=5, mlps="ed*")}
MESHES = PIPELINES | {
    "three stages, experts over data, 1f1b": (STAGED.replace('vocab = "stage"\n', "") + 'expert = "data"\n' + BATCH,
                                              dict(stage=3, data=2), "1f1b", 1),
    "four stages, experts over fsdp, zero bubble": (STAGED + 'expert = "fsdp"\n' + STAGED_BATCH,
                                                    dict(stage=4, fsdp=2), "zero_bubble", 1)}
SPLIT, THREE = "expert over tensor, interleaved zero bubble", "three stages, experts over data, 1f1b"


def made_of(path, name: str, model: dict, microbatches: int, remat: str = "none", **sections) -> config.Run:
    text, mesh, schedule, chunks = MESHES[name] if name else (BATCH, {}, "1f1b", 1)
    (path / "rules.toml").write_text(text)
    run = run_of(path / "rules.toml", mesh, model, dict(microbatches=microbatches, remat=remat),
                 dict(schedule=schedule, chunks=chunks))
    return config.Run(**run.model_dump(exclude_defaults=True) | sections)


def devices(run: config.Run):
    return jax.devices()[:math.prod(getattr(run.mesh, axis) for axis in config.AXES)]


# Rounds in which stages are idle: 4 microbatches on 3 stages, 1 on 2, 2 on 4.
@pytest.mark.parametrize("name, model, microbatches, remat", [
    (THREE, "one dense layer, then five, sigmoid, shared", 4, "none"),
    *(pytest.param(name, TWO, 4, remat, marks=GRID) for name in MESHES
      for remat in ("none", "selective", "full") if "context" not in name),
    *(pytest.param("expert over context and fsdp, zero bubble", TWO, 4, remat, marks=GRID)
      for remat in ("none", "full")),
    *(pytest.param(name, "one dense layer, then five, sigmoid, shared", n, "full", marks=GRID) for name, n in (
        ("expert over fsdp, tensor beside, 1f1b", 1), ("four stages, experts over fsdp, zero bubble", 2),
        ("expert over fsdp and tensor, gpipe", 8), (SPLIT, 8)))])
def test_pipelines_behind_dense_layers_compute_what_one_device_does(tmp_path, name, model, microbatches, remat):
    run = made_of(tmp_path, name, MODELS[model], microbatches, remat)
    assert_equal(run, expected(model), devices(run))


KINDS = {
    "dropout": (TWO, dict(residual_dropout=0.2, embedding_dropout=0.1), {}),
    "adapters": (TWO, {}, dict(lora=dict(rank=2, alpha=4))),
    "periods": ("periods of two, two of them dense", {}, {}),
    "tied": (TWO, dict(tie_embeddings=True), {}),
}


@pytest.mark.parametrize("kind, name", [pytest.param(kind, name, marks=GRID)
                                        for kind in KINDS for name in (THREE, SPLIT)])
def test_every_kind_of_leading_layers_has_one_devices_loss_gradients_and_evaluation(tmp_path, kind, name):
    model, more, sections = KINDS[kind]
    run = made_of(tmp_path, name, MODELS[model] | more, 4, **sections)
    parity.check(run)
    np.testing.assert_allclose(parity.evaluate(run), parity.evaluate(parity.on_one_device(run)), rtol=1e-5)


# Microbatches that fill no round: 4 on 3 stages, 1 on 4; one of a batch has far fewer tokens than the others.
@pytest.mark.parametrize("kind, name, microbatches", [
    ("a window first", THREE, 4),
    *(pytest.param(kind, name, microbatches, marks=GRID) for kind in FIRST_OF_FIVE
      for name, microbatches in ((THREE, 2), (SPLIT, 4), ("four stages, experts over fsdp, zero bubble", 1),
                                 ("expert over context and fsdp, zero bubble", 2)))])
def test_leading_layers_with_experts_report_their_balance(tmp_path, kind, name, microbatches):
    """Metrics too: loss and norm alone differ by 3e-4 where a layer's balance loss is forgotten."""
    more = dict(num_layers=9) if name == SPLIT else {}
    run = made_of(tmp_path, name, FIRST_OF_FIVE[kind] | more, microbatches)
    case = parity.check(run)
    metrics = parity.train(case, parity.draw_parameters(case.made, 0), 1)[1]
    assert metrics["aux_loss"] > 0 and np.isfinite(metrics["expert_load_max_by_layer"][0])


@pytest.mark.parametrize("name, microbatches", [pytest.param(THREE, 4, marks=GRID)])
def test_a_stage_computes_leading_layers_for_its_share_of_the_microbatches_alone(tmp_path, name, microbatches):
    """Every matmul of the program counted, with them and without: those of a layer, as often as a stage has
    microbatches."""
    multiplied = lambda case: sum(dot.flops for dot in case.audit.dots)
    plain = dict(num_layers=6)
    case, without = (parity.compile_run(made_of(tmp_path, name, plain | more, microbatches))
                     for more in (dict(num_layers=8, mlps="dde*"), {}))
    sizes = case.made.mesh_spec.sizes
    linear = sum(info.size for info in case.made.model.parameters() if info.axes[0] == LEADING
                 and info.role == "matrix") // 2
    tokens, cfg = SEQUENCES // microbatches * T // sizes["data"] // sizes["fsdp"], case.made.run.model
    # attention: two products forward, five back
    layer = 3 * 2 * tokens * linear + 7 * 2 * tokens * T * cfg.num_heads * cfg.head_dim
    rounds = -(-microbatches // sizes["stage"])
    assert multiplied(case) - multiplied(without) == rounds * 2 * layer
    assert not steps.unordered(case.step.as_text())


def test_leading_layers_lie_whole_on_every_stage_and_the_others_are_split(tmp_path):
    run = made_of(tmp_path, SPLIT, MODELS[TWO], 4)
    made = assembly.assemble(run, devices(run))
    specs = jax.tree.map(lambda axes: made.layout.spec("optimizer", axes), made.program.step.state.axes["layers"],
                         is_leaf=is_axes)
    over_stages = lambda group: {spec[0] for spec in jax.tree.leaves(
        specs[group], is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))}
    assert over_stages("dense_layers") == {None} and over_stages("layers") == {"stage"}
    (note,) = [note for note in made.notes if "before the stages" in note]
    assert "every stage holds all weights and states of the 2 layers before the stages" in note and "idle" not in note
    (note,) = [note for note in assembly.assemble(made_of(tmp_path, THREE, MODELS[TWO], 4), jax.devices()[:6]).notes
               if "idle" in note]
    assert "with training.microbatches=4, 2 of 3 stages are idle in the last round; use a multiple of 3" in note


def test_a_checkpoint_goes_from_stages_to_none_and_to_other_stages(tmp_path):
    first = assembly.assemble(run := made_of(tmp_path, THREE, MODELS[TWO], 4), devices(run)).program
    with jax.set_mesh(first.step.mesh):
        state = first.initialize()
    with checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints")) as kept:
        kept.save(1, state, {})
    for name in ("", SPLIT):
        other = assembly.assemble(run := made_of(tmp_path, name, MODELS[TWO], 4), devices(run)).program
        restored = checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints"), read_only=True).restore(
            1, other.step.state.abstract)
        assert_same_bits(jax.device_get(state), jax.device_get(restored))


@pytest.mark.parametrize("model, pipeline, said", [
    (dict(num_layers=7, mlps="ddde*"), dict(chunks=3), "into chunks without a layer; use at most 2")])
def test_what_does_not_fit_behind_leading_layers_is_refused(tmp_path, model, pipeline, said):
    run = made_of(tmp_path, SPLIT, MODELS[TWO] | model, 4)
    run = run.replace(pipeline=pipeline)
    with pytest.raises(config.ConfigError, match=said.replace(".", r"\.")):
        assembly.assemble(run, devices(run))


def test_formulas_count_the_rounds_of_leading_layers_and_those_in_which_stages_idle():
    """What the compiled program holds, sends and multiplies beside them: `test_gpu_formulas`."""
    cfg = run_files.load(["configs/quickstart.toml", "--model.preset", "qwen3-30b-a3b",
                       "--model.mlps", "dde*", "--model.mlp_dim", "6144",
                       "--model.compute_dtype", "bfloat16"]).model
    sizes = MeshSpec(dict(stage=4, fsdp=8))
    layout = rules.Layout(rules.load(locate_shipped("sharding_rules/zero3_experts_fsdp.toml")), sizes.sizes)
    placed, rated = place(transformer.build(cfg).parameters(), cfg, layout, sizes), rates.Rates(
        hardware.get("h100"), Assumptions("h100"))
    assert (placed.cfg.num_layers, placed.leading.cfg.num_layers) == (46, 2) and placed.layer.depth == 12
    found = {}
    for microbatches, rounds in ((8, 2), (9, 3)):
        options = Options(4096, 8 * microbatches, microbatches, "full", "1f1b")
        matrices = sum(info.size for info in placed.leading.rows if info.role == "matrix")
        again = matrices - 2 * 6144 * 2048          # under remat all but what the last product adds
        assert flops.count_executed(placed.leading, options) == rounds * 2 * 4096 * (3 * matrices + again)
        found[rounds] = footprint.leading_bytes(placed, options), price.price(placed, rated, options)
    assert found[3][0] == 1.5 * found[2][0]
    # In the third round three of four stages idle.
    layer_s = price.Pricing(placed, rated, options).leading()[1] / (9 * 2 / 4)
    ticks_s = price.bubble_s(price.stage_costs(placed, rated, options), "1f1b", 4, 9, 1)
    assert found[3][1].bubble_s == pytest.approx(ticks_s + (3 - 9 / 4) * 2 * layer_s, rel=1e-6)
