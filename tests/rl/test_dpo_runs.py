"""Runs of DPO, by the command: from lines of pairs to weights that prefer what was chosen; the reference is computed
once."""
import json

import conversations as drawn
import numpy as np
import pytest
from checkpoints import assert_same_bits
from commands import call, home, in_a_directory_of_its_own, ran, rows  # noqa: F401
from test_lora_runs import saved

from meshtrain import run_files
from meshtrain.commands import evaluate, generate, train
from meshtrain.data import sources
from meshtrain.data.batches import preferences
from meshtrain.data.documents import conversations
from meshtrain.data.documents.conversations import parse_pair
from meshtrain.names import NO_TARGET
from meshtrain.run import dpo_reference

ASK, GOOD, BAD = ({"role": role, "content": text}
                  for role, text in (("user", "why?"), ("assistant", "the cat sat"), ("assistant", "no")))


def write_pairs(path, count: int = 23):
    rng = np.random.default_rng(0)
    word = lambda: " ".join(rng.choice(["the", "cat", "sat", "why"], rng.integers(1, 6)))
    lines = [{"prompt": word(), "chosen": f"{word()} yes", "rejected": f"no {word()}"} for _ in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def place(tmp_path_factory, home):  # noqa: F811
    place = tmp_path_factory.mktemp("dpo")
    drawn.folder(place, "chatml")
    write_pairs(place / "pairs.jsonl")
    return place


def words(place, name: str, *more) -> list[str]:
    home = drawn.folder(place, "chatml")
    values = {"run.dir": place / name, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.simulated_devices": 8,
              "sharding.rules": "sharding_rules/zero3.toml", "optimizer.name": "adamw", "model.vocab_size": 1024, "model.embed_dim": 32,
              "model.num_layers": 1, "model.num_heads": 2, "model.mlp_dim": 64, "model.compute_dtype": "float32",
              "data.source": "preferences", "data.paths": json.dumps([str(place / "pairs.jsonl")]),
              "data.tokenizer": home / "tokenizer.json", "data.bos_token": "<s>", "data.seq_len": 96,
              "data.global_batch": 8,
              "data.validation_fraction": 0.2, "training.objective": "dpo", "training.microbatches": 1,
              "training.steps": 4,
              "optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 1, "run.sample_tokens": 0,
              "metrics.tensorboard": "false",
              "run.compilation_cache": ""}
    return [f"--{key}={value}" for key, value in values.items()] + list(more)


def test_a_run_learns_the_preferences_from_where_it_is_its_own_reference(place):
    done = ran(*words(place, "run", "--checkpoint.every=2"))
    assert "the reference's log-probabilities of 23 pairs in " in done.out and "a pair" in done.out
    found = rows(place / "run")
    # the model is the reference
    assert abs(found[0]["loss"] - np.log(2)) < 1e-5 and abs(found[0]["reward_margin"]) < 1e-4
    assert found[-1]["loss"] < 0.6 and found[-1]["reward_margin"] > 0 and found[-1]["val_loss"] < 0.69
    references = np.load(place / "run" / dpo_reference.FILE)
    assert references.shape == (23,) and np.isfinite(references).all()


@pytest.mark.long
@pytest.mark.cell
def test_other_runs_from_the_same_weights_find_the_reference(place):
    ran(*words(place, "first", "--training.steps=1"))
    references = np.load(place / "first" / dpo_reference.FILE)
    # Another beta has the same reference, which is not computed again.
    again = ran(*words(place, "beta", "--training.dpo_beta=0.5", "--training.steps=1"))
    assert " pairs from " in again.out and np.array_equal(np.load(place / "beta" / dpo_reference.FILE), references)
    # Other weights have another.
    other = ran(*words(place, "seed", "--run.seed=1", "--training.steps=1"))
    assert " pairs from " not in other.out and not np.array_equal(np.load(place / "seed" / dpo_reference.FILE), references)


@pytest.mark.long
@pytest.mark.cell
def test_a_run_that_goes_on_ends_where_one_without_a_stop_does(place):
    ran(*words(place, "parts", "--lora.rank=2", "--optimizer.schedule=constant", "--training.steps=2"))
    ran(*words(place, "parts", "--lora.rank=2", "--optimizer.schedule=constant", "--training.steps=4"))
    ran(*words(place, "one", "--lora.rank=2", "--optimizer.schedule=constant", "--training.steps=4"))
    assert_same_bits(saved(place / "parts", 4)["params"], saved(place / "one", 4)["params"])
    (place / "parts" / dpo_reference.FILE).unlink()
    done = call(train.main, *words(place, "parts", "--lora.rank=2", "--optimizer.schedule=constant",
                                   "--training.steps=5"))
    assert done.code == 2 and "the log-probabilities of the reference, is missing or damaged" in done.err


@pytest.mark.parametrize("more, told", [
    (["--data.source=text"], "has none; use data.source=\"preferences\""),
    (["--training.objective=next_token"], "which only training.objective=\"dpo\" supports"),
    (["--mesh.stage=2", "--mesh.data=1", "--sharding.rules=sharding_rules/zero3.toml"],
     "pipelines do not support training.objective"),
    (["--training.z_loss=0.1"], "training.z_loss=0.1 is not part of"),
    (["--data.document_mask=false"], "would let the rejected answer see the chosen one"),
    (["--data.skip_batches=2"], "data.skip_batches=2 is not read by"),
    (["--data.seq_len=8"], "data.seq_len=8 is too short for each of the 23 pairs; the shortest takes"),
])  # fmt: skip
def test_faults_are_told_by_name(place, more, told):
    done = call(train.main, *words(place, "faulty", *more))
    assert done.code == 2 and told in done.err and "Traceback" not in done.err, done.err


def test_pairs_are_told_apart_by_their_keys():
    expected = [[ASK, GOOD], [ASK, BAD]]
    for line in ({"prompt": "why?", "chosen": "the cat sat", "rejected": "no"},
                 {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
                 {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
                 {"prompt": "why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}):
        found = parse_pair(json.loads(json.dumps(line)))
        assert [one.messages for one in found] == expected and [one.trained for one in found] == [[False, True]] * 2
    for line, told in (({"prompt": "a", "completion": "b"}, "is not a pair of answers"),
                       ({"chosen": "a", "rejected": "b"}, "has no prompt"),
                       ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same answer"),
                       ({"prompt": "b", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "do not begin with its prompt"),
                       ({"prompt": "why?", "chosen": [ASK], "rejected": [ASK, GOOD]},
                        "has no assistant's answer to learn in 'chosen'"),
                       ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt")):
        with pytest.raises(ValueError, match=told):
            parse_pair(line)


def test_a_sequence_holds_both_answers_behind_their_prompts_and_learns_them_alone(place):
    run = run_files.load(words(place, "rows"))
    corpus = sources.open_corpus(run.data, vocab_size=1024, cache_dir=place, tell=lambda line: None)
    pairs = preferences.open_pairs(run.data, corpus, 0)
    template = sources.describe(run.data, vocab_size=1024).chats.template
    given = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    batch = pairs.with_references(np.arange(23, dtype=np.float32)).batch(0)
    for row in range(8):
        number = int(batch["reference"][row])
        both = conversations.chat.encode(template, parse_pair(given[number]))
        tokens = np.concatenate([one.ids[:-1] for one in both])
        targets = np.concatenate([np.where(one.mask[1:], one.ids[1:], NO_TARGET) for one in both])
        assert (batch["tokens"][row,
                                :len(tokens)] == tokens).all() and (batch["targets"][row,
                                                                                     :len(tokens)] == targets).all()
        assert (batch["segments"][row, :len(tokens)] == np.repeat([1, 2], [len(one.ids) - 1 for one in both])).all()
        assert (batch["targets"][row,
                                 len(tokens):] == NO_TARGET).all() and (batch["segments"][row, len(tokens):] == 0).all()
    epoch = np.concatenate([pairs.with_references(np.arange(23, dtype=np.float32)).batch(n)["reference"]
                            for n in range(len(pairs.pairs))])
    assert (np.bincount(epoch.astype(int), minlength=23)[pairs.pairs] == 8).all() and len(pairs.pairs) == 19
    np.testing.assert_array_equal(pairs.batch(3, [5, 2])["tokens"], pairs.batch(3)["tokens"][[5, 2]])


def test_a_run_of_preferences_answers_and_is_measured_on_texts(place, tmp_path):
    ran(*words(place, "asked", "--training.steps=1", "--data.validation_fraction=0"))
    asked = call(generate.main, place / "asked", "--prompt", "why", "--max-tokens", "2", "--json")
    assert asked.code == 0 and len(json.loads(asked.out)["completions"]) == 1, asked.err
    done = call(evaluate.main, place / "asked")
    assert done.code == 2 and "a loss is measured on texts" in done.err
    (tmp_path / "text.txt").write_text("the cat sat why " * 200)
    text = ("--data.source", "text", "--data.paths", json.dumps([str(tmp_path / "text.txt")]))
    assert call(evaluate.main, place / "asked", *text, "--json").code == 0
