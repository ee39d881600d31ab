"""Whole runs that go on otherwise than they began: back to a step, with another batch, rate and data; from another's
state."""
import json
import shutil

import jax
import numpy as np
import pytest

from meshtrain.commands import train
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.run import contents as run_contents
from test_commands import call, contents, finished, home, in_a_directory_of_its_own, refused, rows, tiny  # noqa: F401


def test_a_run_goes_back_with_another_rate_and_batch_and_its_text_renamed_and_loses_nothing(tiny, home, tmp_path):
    directory = tmp_path / "run"
    command = (*tiny, "--run.sample_tokens", 0, "--run.dir", directory)
    assert call(train.main, *command, "--training.steps", 6, "--checkpoint.every", 2).code == 0
    shutil.copy(home / "corpus.txt", "renamed.txt")
    command += ("--data.paths", '["renamed.t*"]')
    back = (*command, "--training.steps", 8, "--checkpoint.step", 4, "--data.skip_batches",
            2, "--optimizer.learning_rate", 1e-4,
            "--data.seq_len", 16, "--data.global_batch", 16)
    ran = call(train.main, *back)
    assert ran.code == 0 and "resuming after step 4" in ran.out, ran
    for line in ("back to step 4: later checkpoints are kept as 6.aside", "learning_rate=0.0001 (was 0.002)",
                 "data.seq_len=16 (was 32)", "data.skip_batches=2 (was 0)"):
        assert line in ran.out
    written = rows(directory)
    assert [row["step"] for row in written] == list(range(1, 9))
    assert [row["learning_rate"] for row in written[4:]] == [np.float32(1e-4)] * 4
    aside = [json.loads(line)["step"] for line in (directory / "metrics.aside.jsonl").read_text().splitlines()]
    assert aside == [5, 6]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["4", "6.aside", "8"]
    before = contents(directory)
    ran = call(train.main, *back)
    assert (ran.code, ran.err) == (0, "") and "finished" in ran.out and contents(directory) == before


# noqa: F811
def test_a_changed_tokenizer_is_refused_before_anything_is_tokenized(tiny, finished, tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    from meshtrain.data import sources
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "line": 1, "?": 2}, unk_token="?"))
    other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()        # no text makes the separator
    other.add_special_tokens(["<|endoftext|>"])
    other.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(sources.Description, "open", lambda *_: pytest.fail("it began to tokenize"))
    before = contents(finished)
    ran = call(train.main, finished / "config.toml", "--run.dir", finished, "--training.steps", 9, "--data.tokenizer",
               tmp_path / "tokenizer.json")
    refused(ran, "data.tokenizer=", "has another content than the tokenizer", "run.name")
    assert contents(finished) == before


@pytest.mark.parametrize("along", [False, True], ids=["weights", "weights and optimizer"])
def test_a_new_run_begins_with_or_without_the_optimizers_state(along, tiny, finished, tmp_path):  # noqa: F811
    before = contents(finished)
    ran = call(train.main, *tiny, "--run.sample_tokens", 0, "--training.steps", 2, "--run.dir", tmp_path / "new",
               "--checkpoint.init_from", finished, "--checkpoint.init_optimizer", str(along).lower(),
               "--optimizer.learning_rate", 1e-12, "--run.seed", 5)
    assert ran.code == 0 and f"weights{' and optimizer' * along} from step 6" in ran.out, ran
    assert [row["step"] for row in rows(tmp_path / "new")] == [1, 2], "its own steps, and its own schedule"
    was, now = rows(finished)[-1]["val_loss"], rows(tmp_path / "new")[-1]["val_loss"]
    assert abs(now - was) < 1e-5, "a step of 1e-12 moves nothing, and the held-out split is the same"
    assert contents(finished) == before
    checkpoints = Checkpoints(DirectoryStore(tmp_path / "new" / "checkpoints"), read_only=True)
    stored = checkpoints.arrays(2)
    counts = [leaf for path, leaf in jax.tree.leaves_with_path(checkpoints.restore(2, stored)["opt_state"])
              if "count" in jax.tree_util.keystr(path)]
    assert [int(count) for count in counts] == [2 + 6 * along], "updates that Adam's moments hold"


@pytest.mark.parametrize("size", [300, 512])
def test_rows_that_pad_a_runs_vocabulary_are_not_taken_as_trained_rows(size, tiny, finished, tmp_path):  # noqa: F811
    ran = call(train.main, *tiny, "--run.dir", tmp_path / "new", "--checkpoint.init_from", finished,
               "--model.vocab_size", size)
    refused(ran, "checkpoint.init_from: ", "model.vocab_size=", f"this run has {size}", "meshtrain.convert")


def test_checkpoints_kept_for_ever_stay_when_a_later_start_keeps_others(tiny, tmp_path):
    words = (*tiny, "--run.dir", tmp_path / "kept", "--checkpoint.every", 1, "--checkpoint.keep", 1)
    words += ("--run.sample_tokens", 0)
    steps = lambda: run_contents.steps(str(tmp_path / "kept"))
    assert call(train.main, *words, "--training.steps", 5, "--checkpoint.keep_every", 2).code == 0
    assert steps() == [2, 4, 5]
    assert call(train.main, *words, "--training.steps", 10, "--checkpoint.keep_every", 3).code == 0
    assert steps() == [2, 4, 6, 9, 10]
    back = call(train.main, *words, "--training.steps", 11, "--checkpoint.step", 4)
    assert back.code == 0 and "later checkpoints are kept as 6.aside, 9.aside, 10.aside" in back.out, back
    assert steps() == [2, 4, 11]
