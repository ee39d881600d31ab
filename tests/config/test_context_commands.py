"""The commands with split sequences: what cannot be split is told, and a run goes on with them to the same end."""
from pathlib import Path

import numpy as np
import pytest
import test_commands

from meshtrain.commands import inspect, train
from meshtrain.parallel.context import attention

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"


# ---- the commands ----------------------------------------------------------------------------------------------------

BAD = {
    "length": ("--data.seq_len 1002", ["data.seq_len=1002", "2 × mesh.context = 8", "use 1000 or 1008"]),
    "length, ulysses": ("--data.seq_len 1002 --context.method ulysses",
                        ["data.seq_len=1002", "mesh.context = 4", "use 1000 or 1004"]),
    "length over tensor, too": (f"--data.seq_len 1028 --mesh.context 2 --mesh.data 1 --mesh.tensor 4 "
                                f"--model.num_kv_heads 4 --sharding.rules {RULES}/zero3.toml",
                                ["2 × mesh.context = 4", "context × tensor", "use 1024 or 1032"]),
    "heads": ("--context.method ulysses --model.num_heads 6 --model.num_kv_heads 2 --model.head_dim 8",
              ["ulysses", "model.num_heads=6", "mesh.context=4", "ring or gather"]),
    "heads of a tensor shard": ("--context.method ulysses --mesh.data 1 --mesh.tensor 2 --sharding.rules " + str(
        RULES / "zero3.toml"), ["splits 2 heads", "mesh.context=4"]),
    "rules without context": ("--sharding.rules batch.toml", ["mesh.context=4", "batch.toml", 'seq = "context"']),
    "weights over context alone": ("--sharding.rules weights.toml",
                                   ["weights.toml", 'seq = "context"', "mesh.context to 1"]),
    "residual_seq without context": ("--sharding.rules residual.toml",
                                     ["residual.toml", "residual_seq", '["context", "tensor"]']),
    "method": ("--context.method rings", ["context.method", "rings", "ring"]),
}
OWN_RULES = {
    "batch.toml": '[activations]\nbatch = "data"\n',
    "weights.toml": '[params]\nembed = ["data", "context"]\n[activations]\nbatch = "data"\n',
    "residual.toml": '[activations]\nbatch = "data"\nseq = "context"\n',
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_split_that_cannot_be_is_exit_2_and_one_message(mistake, tmp_path, monkeypatch):
    words, parts = BAD[mistake]
    monkeypatch.chdir(tmp_path)
    for name, text in OWN_RULES.items():
        (tmp_path / name).write_text(text)
    base = {"mesh.context": 4, "mesh.data": 2, "mesh.fsdp": 1, "mesh.tensor": 1, "sharding.rules": RULES / "ddp.toml",
            "data.seq_len": 1024, "data.global_batch": 8, "optimizer.name": "adamw",
            "model.vocab_size": 257, "model.embed_dim": 32,
            "model.num_layers": 1, "model.num_heads": 4, "model.num_kv_heads": 2, "model.mlp_dim": 64}
    given = [str(word) for key, value in base.items() for word in (f"--{key}", value)]
    test_commands.refused(test_commands.call(inspect.main, *given, *words.split()), *parts)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A function that trains a tiny model in `name` on these axes, and the run on data alone."""
    home = tmp_path_factory.mktemp("context")
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    values = {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8, "sharding.rules": RULES / "ddp.toml",
              "optimizer.name": "adamw", "model.vocab_size": 257, "model.embed_dim": 32, "model.num_layers": 2,
              "model.num_heads": 4,
              "model.num_kv_heads": 2, "model.mlp_dim": 64, "model.compute_dtype": "float32", "data.source": "text",
              "data.paths": f'["{home / "corpus.txt"}"]', "data.seq_len": 32, "data.global_batch": 8,
              "run.sample_tokens": 16, "run.compilation_cache": "", "validation.batches": 2,
              "optimizer.warmup_steps": 2,
              "optimizer.schedule": "constant", "checkpoint.every": 3}

    def run(name: str, steps: int, *words: str):
        given = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        ran = test_commands.call(train.main, *given, "--run.dir", home / name, "--training.steps", steps, *words)
        assert (ran.code, ran.err) == (0, ""), ran
        return ran.out, test_commands.rows(home / name)

    return run, *run("whole", 6, "--mesh.data", "8")


def sample_of(said: str) -> str:
    return said.split("a sample (")[1].splitlines()[1]


def check_end(got_said, got, said, rows):
    """Losses, validation and sample at the end of a run; Adam has magnified the rounding of six steps."""
    np.testing.assert_allclose([r["loss"] for r in got], [r["loss"] for r in rows], rtol=2e-5)
    np.testing.assert_allclose([r["grad_norm"] for r in got], [r["grad_norm"] for r in rows], rtol=1e-4)
    np.testing.assert_allclose(got[-1]["val_loss"], rows[-1]["val_loss"], rtol=2e-5)
    assert [r["tokens"] for r in got] == [r["tokens"] for r in rows]
    assert sample_of(got_said) == sample_of(said)


def test_a_run_of_whole_sequences_goes_on_with_split_ones_to_the_same_end(one_run):
    run, said, rows = one_run
    run("across", 3, "--mesh.data", "8")
    check_end(*run("across", 6, "--mesh.data", "2", "--mesh.context", "4"), said, rows)


@pytest.mark.long
@pytest.mark.parametrize("method", attention.METHODS)
def test_a_run_with_split_sequences_has_the_losses_validation_and_sample_of_one_without(one_run, method):
    run, said, rows = one_run
    check_end(*run(method, 6, "--mesh.data", "4", "--mesh.context", "2", "--context.method", method), said, rows)
