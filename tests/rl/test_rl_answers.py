"""Answers at the edges of runs that learn from rewards: ids that no text gives back, answers of one token, answers that
are all cut off."""
import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import sampling
import tokenizers
from checkpoints import assert_same_bits
from commands import answers as texts
from commands import call, home, in_a_directory_of_its_own, rows  # noqa: F401
from test_lora_runs import saved
from test_rl import place, ran, words  # noqa: F401
from tokenizers import decoders, models, normalizers

from meshtrain.commands import generate, report
from meshtrain.inference.generate import Generator
from meshtrain.model.execution import with_numerics
from meshtrain.names import NO_TARGET
from meshtrain.rl import groups, samplers
from meshtrain.rl.rollouts import Rollouts

PIECES = ["<s>", "a", "b", "c", "d", "A", "B", "C", "D", ":", "1", "ab", "cd", "abc"]


@pytest.fixture
def drawn_and_trained(monkeypatch):
    """(prompt and answer ids of every completion, ids and targets of every step's segments) as a run goes on."""
    drawn, trained = [], []
    complete, following = Generator.complete, Rollouts.next

    def draws(self, *args, **keys):
        found = complete(self, *args, **keys)
        drawn.append([(one.prompt, one.tokens) for one in found])
        return found

    def trains(self, *args):
        step = following(self, *args)
        trained.append(segments({name: np.asarray(x) for name, x in step.batch.items()}))
        return step
    monkeypatch.setattr(Generator, "complete", draws)
    monkeypatch.setattr(Rollouts, "next", trains)
    return drawn, trained


def segments(batch: dict) -> list[tuple[list[int], list[int]]]:
    """(what is read but for the targets, the targets) of each segment of a batch."""
    shape = -1, batch["tokens"].shape[-1]
    tokens, targets, numbers = (batch[name].reshape(shape) for name in ("tokens", "targets", "segments"))
    found = []
    for row in range(len(tokens)):
        for number in range(1, numbers[row].max() + 1):
            at = np.flatnonzero(numbers[row] == number)
            learned = at[targets[row, at] != NO_TARGET]
            assert (tokens[row, learned[1:]] == targets[row, learned[:-1]]).all(), "what is read is what was drawn"
            found.append((tokens[row, at[0]:learned[0] + 1].tolist(), targets[row, learned].tolist()))
    return found


def test_the_ids_that_were_drawn_are_learned_where_their_text_has_others(place, home, drawn_and_trained):  # noqa: F811
    library = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [
        ("a", "b"), ("c", "d"), ("ab", "c")], unk_token=":"))
    library.normalizer, library.decoder = normalizers.Lowercase(), decoders.Fuse()
    library.add_special_tokens(["<s>"])
    library.save(str(place / "tokenizer.json"))
    drawn, trained = drawn_and_trained
    # ids 14 and 15 have no text, the end of an answer is within a token, and all answers have an entropy to learn from
    ran(*words(place, "ids", f"--data.tokenizer={place / 'tokenizer.json'}", "--model.vocab_size=16",
                '--rl.stop=["d"]', "--rl.entropy=0.01", "--training.steps=1", "--validation.every=0"))
    answers, (step,) = drawn[0], trained
    assert len(answers) == 16 and sorted(step) == sorted(answers)
    text = [line["answer"] for line in texts(place / "ids", 0)]
    encoded = [library.encode(one).ids for one in text]
    assert sum(one != ids for one, (_, ids) in zip(encoded, answers, strict=True)) > 12
    assert not any("d" in one for one in text) and {4, 12} & {ids[-1] for _, ids in answers}
    kept = groups.unflat(*groups.unpack_arrays(place / "ids" / "rollouts" / "0.npz"))
    assert [one.tokens for one in kept] == [ids for _, ids in answers], "a run that goes on has them, too"


def test_answers_that_are_all_cut_off_and_left_out_change_nothing(place, home):  # noqa: F811
    done = ran(*words(place, "cut", "--rl.max_tokens=2", "--rl.truncated=mask", "--rl.entropy=0.01",
                      "--rl.ratio=sequence", "--rl.correction=sequence_mask", "--rl.aggregate=sequence",
                      "--rl.updates=2", "--checkpoint.every=2", "--validation.every=0", "--optimizer.weight_decay=0"))
    for number in range(2):
        assert (f"batch {number}: the run does not train on it, because no answer ended within rl.max_tokens=2, and "
                'rl.truncated="mask" leaves such answers out') in done.out
    found = rows(place / "cut")
    assert [row["truncated"] for row in found[::2]] == [1.0, 1.0] and all("reward" in row for row in found[::2])
    assert {(row["loss"], row["grad_norm"], row["skipped"]) for row in found} == {(0.0, 0.0, False)}
    assert_same_bits(saved(place / "cut", 2)["params"], saved(place / "cut", 4)["params"])


def test_answers_of_one_token_teach_the_same_in_rows_of_their_own(place, home, drawn_and_trained):  # noqa: F811
    """A row then has one target; elsewhere, it has many."""
    (place / "digits.jsonl").write_text("".join(json.dumps({"prompt": str(i), "number": i}) + "\n" for i in range(9)))
    more = ["--rl.max_tokens=1", "--rl.ratio=sequence", "--rl.updates=2", "--rl.aggregate=sequence",
            f'--data.paths=["{place / "digits.jsonl"}"]', "--training.steps=2", "--validation.every=0"]
    ran(*words(place, "packed", *more))
    _, trained = drawn_and_trained
    packed = [sorted(step) for step in trained]
    trained.clear()
    ran(*words(place, "one-a-row", *more, "--data.seq_len=2"))
    assert [sorted(step) for step in trained] == packed
    assert all(len(prompt) == 2 and len(answer) == 1 for step in packed for prompt, answer in step)
    found, expected = (rows(place / name) for name in ("one-a-row", "packed"))
    assert found[0]["answer_tokens"] == found[0]["answer_tokens_max"] == 1 != found[1]["ratio"]
    # Adam's first step is the sign of a gradient, also where that is all rounding
    for row, other, bound in zip(found, expected, (1e-6, 1e-3), strict=True):
        assert row["mismatch_max"] < 1e-4
        for name in ("loss", "grad_norm", "entropy", "ratio"):
            assert row[name] == pytest.approx(other[name], rel=bound, abs=bound), name


def test_an_exported_run_goes_on_with_the_same_text_and_has_the_same_validation_reward(place, home):  # noqa: F811
    ran(*words(place, "exported", "--training.steps=2", "--checkpoint.export=last", "--validation.every=0",
               "--data.validation_fraction=0.2"))
    folder = place / "exported" / "export" / "2"
    asked = ("--prompt=49: ", "--max-tokens=12", "--mesh.tensor=1", "--json")
    done = [call(generate.main, where, "--data.tokenizer=bytes", *asked) for where in (place / "exported", folder)]
    assert done[0] == done[1] and len(json.loads(done[0].out)["completions"][0]["token_ids"]) > 3, done
    # a step that is too small to change a weight
    ran(*words(place, "begun", f"--checkpoint.init_from={folder}", "--training.steps=1", "--validation.every=0",
               "--optimizer.learning_rate=1e-30", "--data.validation_fraction=0.2"))
    found, expected = rows(place / "begun")[-1], rows(place / "exported")[-1]
    names = [name for name in expected if name.startswith("val_reward")]
    assert len(names) == 4 and [found[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize("planted", [pytest.param(planted, marks=sampling.GRID) for planted in (False, True)])
def test_the_sampler_and_the_step_round_alike_in_bfloat16(place, home, monkeypatch, planted):  # noqa: F811
    """Their log-probabilities are 0.0002 apart in the mean, those of the plant, a sampler in float32, 0.01."""
    made = samplers.make

    def in_float32(*args):
        sampler = made(*args)
        return dataclasses.replace(sampler, ex=with_numerics(sampler.ex, dtype=jnp.dtype("float32")))
    monkeypatch.setattr(samplers, "make", in_float32 if planted else made)
    name = f"rounds-{planted}"
    ran(*words(place, name, "--model.compute_dtype=bfloat16", "--model.num_layers=2", "--model.embed_dim=128",
               "--rl.max_tokens=40", "--data.seq_len=48", "--data.global_batch=16", "--training.steps=2",
               "--validation.every=0", "--data.validation_fraction=0"))
    for row in rows(place / name):
        assert (row["mismatch_mean"] > 0.003) == planted and row["mismatch_max"] < 0.1, row


@pytest.mark.parametrize("more", [["--rl.updates=2", "--rl.old=trainer"], pytest.param([], marks=sampling.GRID)])
def test_the_parts_of_a_runs_time_add_up(place, home, more):  # noqa: F811
    directory = place / f"time{len(more)}"
    done = ran(*words(place, directory.name, "--checkpoint.every=2", *more))
    _, *_, end = map(json.loads, (directory / "history.jsonl").read_text().splitlines())
    spent, found = end["spent_s"], rows(directory)
    assert sum(spent.values()) == pytest.approx(end["run_s"], abs=0.01)
    total = lambda *names: sum(row.get(name) or 0 for row in found for name in names)
    assert total("sample_s") > 0 < total("reward_s") and (total("score_s") > 0) == bool(more)
    for part, names in {"sampling": ("sample_s", "score_s"), "rewards": ("reward_s",), "sync": ("sync_s",),
                        "steps": ("train_s",)}.items():
        assert spent[part] == pytest.approx(total(*names), abs=0.05), part
    for told in (done.out, call(report.main, directory).out):
        assert re.search(" were steps; .*sampling", told) and re.search(" were steps; .*rewards", told), told
    assert spent["rest"] < 0.2 * end["run_s"], "nothing of a batch of answers is left to the rest"
