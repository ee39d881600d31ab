"""True ZB-H1 order, a branch of its own for every stage, computes what one device computes; no permute is in a branch."""
import jax
import pytest
import sampling

from meshtrain import assembly, inspect, train
from meshtrain.model import transformer
from meshtrain.parallel import stages
from test_layouts import RULES, Compiled, T
from test_pipeline import LAYERS, SEQUENCES, check_equal, run_of, table_of

CASES = {
    "no remat": ("ddp", dict(stage=4), dict(), dict(remat="none")),
    "remat": ("ddp", dict(stage=4), dict(), dict(remat="full")),
    "data, tied, dropout, layers that do not divide": (
        "zero1", dict(stage=2, data=2), dict(tie_embeddings=True, num_layers=5, residual_dropout=0.2),
        dict(remat="selective", microbatches=6)),
    "fsdp and tensor": ("zero3", dict(stage=2, fsdp=2, tensor=2), dict(), dict(remat="none")),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=sampling.GRID if not name.startswith("data, tied") else ()) for name in CASES])
def test_zb_h1_equals_one_device(name):
    rule, mesh, model, training = CASES[name]
    case = Compiled(run_of(rule, mesh, "zb_h1", model, training))
    changes = {k: v for k, v in training.items() if k not in ("remat", "microbatches")}
    check_equal(case, model, changes, steps=20 if name == "remat" else 3)
    check_program(case)
    if mesh == dict(stage=4) and not model:
        check_flops(case)


def check_program(case: Compiled):
    """Two permutes a tick, both outside of the branches; the gradients of the batch leave once a step."""
    ticks = table_of(case.made.run).num_ticks
    # Layers that do not divide also move to their stage and back, once a step.
    permutes = [c for c in case.audit.collectives if c.kind == "collective-permute" and c.trips > 1]
    assert sorted((c.axes, c.count, c.in_branch) for c in permutes) == [(("stage",), ticks, False)] * 2
    assert not case.audit.branch_permutes and not case.audit.broken_permutes and not case.audit.unknown_loops
    assert {c.axes for c in case.audit.collectives if c.in_branch} <= {("tensor",)}
    assert not [c for c in case.audit.collectives if c.trips > 1 and {"data", "fsdp"} & set(c.axes)]


def check_flops(case: Compiled):
    """All matmuls are in branches, each of them once: F, B and W of a stage, and a head that one stage has whole."""
    run, schedule = case.made.run, table_of(case.made.run)
    cfg, tokens = run.model, SEQUENCES // run.training.microbatches * T
    linear = {info.path[-2]: 2 * tokens * info.size // LAYERS for info in case.made.model.parameters() if info.role == "matrix"}
    product = 2 * tokens * T * cfg.num_heads * cfg.head_dim
    layer = 3 * sum(linear.values()) + 7 * product
    if run.training.remat == "full":
        layer += sum(linear.values()) + 2 * product - linear["down"]        # nobody asks for the last output again
    head = 3 * 2 * tokens * cfg.embed_dim * transformer.padded_vocab(cfg)
    assert all(dot.in_branch for dot in case.audit.dots)
    # The audit counts every branch as taken in every tick. Under remat XLA may make the scores once for the remade forward
    # and for attention's own backward, which both want them (jax 0.10 does, 0.12 does not).
    most = schedule.num_ticks * (LAYERS // schedule.num_stages * layer + head)
    least = most - (schedule.num_ticks * LAYERS // schedule.num_stages * product if run.training.remat == "full" else 0)
    assert 0.999 * least <= sum(dot.flops for dot in case.audit.dots) <= 1.001 * most


def test_ends_that_are_whole_are_said_and_kept_whole():
    made = assembly.assemble(run_of("ddp", dict(stage=4), "zb_h1"), jax.devices()[:4])
    assert sum("experimental" in note and "whole embedding" in note for note in made.notes) == 1
    schedule = made.program.spec.sharding.params["embedding"]["table"]
    assert schedule.is_fully_replicated


@pytest.mark.parametrize("main", [train.main, pytest.param(inspect.main, marks=sampling.GRID)], ids=["train", "inspect"])
def test_a_permute_in_a_branch_is_found_in_the_program_and_refused(main, monkeypatch, tmp_path, capsys):
    """A ring in the branches, let in on purpose: its numbers would be wrong without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("".join(f"line {i} is a line like the others\n" for i in range(400)))
    monkeypatch.setattr(stages, "problems", lambda *_: [])
    small = dict(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
    options = {
        "mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.stage": 2, "mesh.context": 4, "mesh.simulated_devices": 8,
        "sharding.rules": RULES / "zero3.toml", "pipeline.schedule": "zb_h1",
        "training.microbatches": 2, "data.seq_len": 32, "data.global_batch": 4, "data.source": "text",
        "data.paths": '["corpus.txt"]', "run.compilation_cache": ""}
    options |= {f"model.{k}": v for k, v in small.items()}
    code = main([word for k, v in options.items() for word in (f"--{k}", str(v))])
    message = capsys.readouterr().err
    assert code == 2 and message.count("error: ") == 1
    assert "zb_h1" in message and "permute" in message and "zero_bubble" in message
