"""Runs that learn a teacher's predictions, by the commands: the teacher's tokens, resumes, refusals."""
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import call, in_a_directory_of_its_own, refused, rows  # noqa: F401
from folders import GOLDENS, run_of

from meshtrain import assembly, teacher
from meshtrain.commands import evaluate, train
from meshtrain.data.documents.tokenizer import Ids
from meshtrain.journal.spikes import LossSpike, Spikes
from meshtrain.names import TEACHER_IDS, TEACHER_LOGP

FOLDER = GOLDENS / "qwen3"
DISTILL = ("--training.objective", "distill", "--distill.teacher", str(FOLDER))
EIGHT = dict(data=2, fsdp=2, tensor=2)


@pytest.mark.full
@pytest.mark.parametrize("rule, mesh, words", [
    ("ddp", {}, ()),
    ("zero3", EIGHT, ("--distill.rules", "tensor", "--training.microbatches", "2")),
    ("zero1", dict(data=4), ("--distill.rules", "zero3")),      # the teacher reduces over other axes
    ("zero3", dict(fsdp=2, context=2, tensor=2), ("--context.method", "ring", "--training.loss_chunk", "8"))])
def test_a_teachers_predictions_are_those_of_transformers(rule, mesh, words):
    k, heat, golden = 70, 1.5, np.load(FOLDER / "golden.npz")       # of 200 tokens: more than a shard of 64 has
    run = run_of(FOLDER, rule, mesh, *DISTILL, "--distill.top_tokens", str(k), "--distill.temperature", str(heat), *words)
    made = assembly.assemble(run, jax.devices()[:int(np.prod(list(mesh.values())))])
    tokens = np.resize(golden["tokens"], (8, 40))
    index = np.tile(np.arange(40), (8, 1))
    batch = {"tokens": tokens, "targets": tokens, "positions": index, "index": index, "segments": 1 + 0 * index,
             "sequence": np.arange(8)}
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        taught = teacher.load(made, Ids(200, 0)).teach(made.program.place(
            {name: x.astype(np.int32) for name, x in batch.items()}))
    assert {name: (x.shape, x.dtype) for name, x in taught.items()} == {
        name: (x.shape, x.dtype) for name, x in made.program.step.batch.items()}
    order = made.program.step.order
    ids, logp = (np.asarray(taught[name]).reshape(8, 40, k)[:, np.arange(40) if order is None else np.argsort(order)]
                 for name in (TEACHER_IDS, TEACHER_LOGP))
    logits = np.resize(golden["logits"], (8, 40, 200)) / heat
    expected = np.take_along_axis(logits, ids, -1) - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, expected, atol=2e-5)       # the goldens' own tolerance
    # No token that was left out is likelier than the last one, but for rounding.
    np.testing.assert_allclose(logp, -np.sort(-(logits - np.log(np.exp(logits).sum(-1, keepdims=True))), -1)[..., :k],
                               atol=4e-5)
    assert all(len(set(row)) == k for row in ids.reshape(-1, k))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A run of seconds on token files, with the teacher's vocabulary."""
    place = tmp_path_factory.mktemp("distilled")
    np.save(place / "ids.tokens.npy", np.random.default_rng(0).integers(3, 200, 4000).astype(np.uint16))
    np.save(place / "ids.ends.npy", np.arange(40, 4001, 40))
    values = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.simulated_devices": 8, "sharding.rules": "zero3",
              "model.vocab_size": 200, "model.embed_dim": 16, "model.num_layers": 1, "model.num_heads": 2,
              "model.num_kv_heads": 2, "model.head_dim": 8, "model.mlp_dim": 32, "model.compute_dtype": "float32",
              "data.source": "tokens", "data.bos_token": "0", "data.paths": json.dumps([str(place / "ids.tokens.npy")]), "data.seq_len": 32,
              "data.global_batch": 8, "run.sample_tokens": 0, "run.name": "taught", "training.steps": 4,
              "optimizer.name": "adamw", "optimizer.schedule": "constant", "optimizer.warmup_steps": 0,
              "optimizer.learning_rate": 0.01, "validation.batches": 1, "checkpoint.every": 2}
    return tuple(word for key, value in values.items() for word in (f"--{key}", str(value)))


@pytest.mark.full
def test_a_run_learns_its_teacher_and_resumes_bit_for_bit(words):
    whole = call(train.main, *words, *DISTILL, "--run.dir", "whole")
    assert whole.code == 0 and "teacher: " in whole.out, whole
    for steps in ("2", "4"):
        part = call(train.main, *words, *DISTILL, "--run.dir", "parts", "--training.steps", steps)
        assert part.code == 0, part.err
    columns = ("loss", "divergence", "grad_norm")
    first, second = ([[row[name] for name in columns] for row in rows(Path(place))]
                     for place in ("whole", "parts"))
    assert first == second and first[-1][1] < first[0][1]
    assert call(evaluate.main, "whole").code == 0       # without the teacher


@pytest.fixture
def spiking(monkeypatch):
    """A function: a step -> that step's loss is a spike the first time."""
    real, spikes = Spikes.see, set()

    def see(self, row):
        if row["step"] in spikes:
            spikes.remove(row["step"])
            raise LossSpike(row["step"], row["loss"], 0.0)
        real(self, row)
    monkeypatch.setattr(Spikes, "see", see)
    return spikes.add


@pytest.mark.full
def test_a_teacher_predicts_the_batches_that_warm_up_biases_and_those_after_a_rollback(words, spiking):
    spiking(3)
    ran = call(train.main, *words, *DISTILL, "--run.dir", "back", "--training.loss_spike", "rollback",
               "--model.num_experts", "2", "--experts.bias_rate", "0.01", "--experts.bias_warmup", "1")
    assert ran.code == 0 and "back to step 2, without the 1 batch up to the spike" in ran.out, ran
    assert [row["step"] for row in rows(Path("back"))] == [1, 2, 3, 4]


@pytest.mark.full
def test_a_rollback_before_the_first_checkpoint_begins_with_the_weights_of_the_folder_again(words, spiking):
    spiking(1)
    begun = [word for pair in zip(words[::2], words[1::2]) for word in pair if not pair[0].startswith("--model.")]
    ran = call(train.main, *begun, *DISTILL, "--checkpoint.init_from", str(FOLDER), "--training.steps", "1",
               "--model.compute_dtype", "float32", "--training.loss_spike", "rollback", "--run.dir", "back")
    assert ran.code == 0 and "back to step 0, without the 1 batch up to the spike" in ran.out, ran
    (row,) = rows(Path("back"))
    assert abs(row["divergence"]) < 1e-5 and row["loss"] > 1


@pytest.mark.full
def test_a_model_that_begins_as_its_teacher_has_no_divergence(words):
    begun = [word for pair in zip(words[::2], words[1::2]) for word in pair if not pair[0].startswith("--model.")]
    done = call(train.main, *begun, *DISTILL, "--checkpoint.init_from", str(FOLDER), "--training.steps", "1",
                "--model.compute_dtype", "float32", "--lora.rank", "2", "--run.dir", "same")
    assert done.code == 0, done.err
    (row,) = rows(Path("same"))
    assert abs(row["divergence"]) < 1e-5 and row["loss"] > 1 and row["grad_norm"] < 1e-3


@pytest.mark.parametrize("given, parts", [
    (("--distill.teacher", ""), ("distill.teacher is empty",)),
    (("--distill.teacher", "nowhere"), ('distill.teacher="nowhere"', "config.json")),
    (("--distill.top_tokens", "200"), ("distill.top_tokens=200", "model.vocab_size=200")),
    (("--training.z_loss", "0.1"), ("training.z_loss=0.1",)),
    (("--training.objective", "next_token"), ("distill.teacher", "reads section [distill], not")),
    (("--mesh.stage", "2", "--mesh.data", "1"), ("mesh.stage=2", 'training.objective="distill"')),
    (("--distill.rules", "nosuch"), ('distill.rules="nosuch" is not a file', "zero3")),
    (("--distill.teacher", "gs://bucket/teacher"), ("distill.teacher: gs://bucket/teacher", "GOOGLE_APPLICATION_CREDENTIALS")),
    (("--model.vocab_size", "201"), ("a vocabulary of 200", "model.vocab_size=201"))])
def test_a_teacher_that_cannot_be_used_is_one_message(words, given, parts):
    refused(call(train.main, *words, *DISTILL, *given), *parts)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    from meshtrain.data.documents.tokenizer import TokenizerFile
    ours = {f"t{n}": n for n in range(200)}
    theirs = ours | {"t7": 8, "t8": 7}
    directory = shutil.copytree(FOLDER, tmp_path / "other")
    Tokenizer(models.WordLevel(theirs, "t0")).save(str(directory / "tokenizer.json"))
    reader = TokenizerFile("mine.json", Tokenizer(models.WordLevel(ours, "t0")), 200, 0, "mine")
    with pytest.raises(ValueError, match=r"has the id 8 for the token 't7', but data.tokenizer=mine.json has 7; use a teacher"):
        teacher._compare_tokens(directory, reader)
