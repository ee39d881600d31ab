"""Runs that learn from rewards, by the command: they learn, go on bit for bit wherever they are killed, draw the same
answers on every mesh, and tell mistakes before anything is compiled."""
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import sampling
from checkpoints import assert_same_bits
from commands import (answers, call, check_sums_of_answers, home, in_a_directory_of_its_own, ran,  # noqa: F401
                      refused, rows)
from commands import ROOT
from test_lora_runs import saved

from meshtrain import files
from meshtrain.commands import evaluate, report, train
from meshtrain.inference.generate import Generator
from meshtrain.inspection import measured
from meshtrain.journal.journal import Journal
from meshtrain.rl import groups, rollouts
from meshtrain.run import loop

REWARD = '''
def score(prompt, answer, example):
    return {"reward": sum(ord(one) % 2 for one in answer) / 6, "length": len(answer), "of": example["number"]}
'''
COLUMNS = {"reward", "reward_std", "answer_tokens", "truncated", "entropy", "kl", "clip_low", "clip_high",
           "mismatch_max", "sample_s", "reward_s", "sync_s", "train_s", "equal_groups", "reward_failed", "reward/length"}
TIMES = ("time", "elapsed_s", "goodput", "tokens_per_s")
OTHER = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", "--sharding.rules=sharding_rules/zero3.toml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("rl")
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i * i}: ", "number": i}) + "\n"
                                                 for i in range(21)))
    (place / "rewards.py").write_text(REWARD)
    return place


def words(place, name: str, *more) -> list[str]:
    values = {"run.dir": place / name, "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8,
              "sharding.rules": "sharding_rules/ddp.toml", "optimizer.name": "adamw", "model.vocab_size": 257, "model.embed_dim": 32,
              "model.num_layers": 1, "model.num_heads": 2, "model.mlp_dim": 64, "model.compute_dtype": "float32",
              "data.source": "prompts", "data.paths": json.dumps([str(place / "prompts.jsonl")]), "data.seq_len": 32,
              "data.global_batch": 8, "training.objective": "rl", "training.microbatches": 1, "training.steps": 4,
              "optimizer.learning_rate": 0.01, "optimizer.schedule": "constant", "rl.prompts": 4, "rl.samples": 4,
              "rl.max_tokens": 6, "rl.reward": f"{place / 'rewards.py'}:score", "rl.reward_workers": 1,
              "validation.every": 2, "metrics.tensorboard": "false", "run.compilation_cache": place / "cache"}
    return [f"--{key}={value}" for key, value in values.items()] + list(more)


def timeless(row: dict) -> dict:
    return {key: value for key, value in row.items() if key not in TIMES and not key.endswith("_s")}


def drawn(directory, batch: int) -> list[tuple]:
    lines = (directory / "rollouts" / f"{batch}.jsonl").read_text().rstrip("\n").split("\n")
    return [(one["prompt"], one["answer"], one["reward"]) for one in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(place, home):  # noqa: F811
    ran(*words(place, "undisturbed", "--checkpoint.every=2"))
    return place / "undisturbed"


def test_a_run_learns_and_tells_what_it_drew(place, undisturbed):
    found = rows(undisturbed)
    assert all(COLUMNS <= row.keys() for row in found)
    assert all(row["ratio"] == 1.0 and row["clip_low"] == row["clip_high"] == 0 for row in found), "one update: exactly"
    assert all(0 < row["mismatch_max"] < 1e-4 for row in found), "the sampler reads what the trainer does"
    assert {"val_reward", "val_reward_error"} <= found[1].keys() and "val_reward" not in found[0]
    lines = [json.loads(line) for line in (undisturbed / "rollouts" / "3.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and len({line["prompt"] for line in lines}) == 4
    assert all(line["reward"] == sum(ord(c) % 2 for c in line["answer"]) / 6 for line in lines)
    assert all(line["of"] ** 2 == int(line["prompt"][:-2]) for line in lines), "the reward has the prompt's line"
    assert found[3]["reward"] == pytest.approx(np.mean([line["reward"] for line in lines]))
    assert len({line["answer"] for line in lines}) > 12, "samples of a prompt differ"
    done = call(report.main, undisturbed, "--html", undisturbed / "report.html")
    assert done.code == 0 and "Rewards and answers" in (undisturbed / "report.html").read_text()


def test_its_loss_on_documents_is_evaluated_without_the_prompts_that_it_holds_out(place, home):  # noqa: F811
    """Documents of other keys than its prompts' lines, and fewer than a sequence."""
    (place / "documents.jsonl").write_text('{"text": "1 is odd"}\n{"text": "and 3"}\n')
    (place / "held_out.jsonl").write_text('{"prompt": "2500: ", "number": 50}\n')
    ran(*words(place, "held-out", "--training.steps=1",
               f"--data.validation_paths={json.dumps([str(place / 'held_out.jsonl')])}"))
    refused(call(evaluate.main, place / "held-out"), "--data.source and --data.paths")
    done = call(evaluate.main, place / "held-out", "--json", "--data.source=jsonl",
                f"--data.paths={json.dumps([str(place / 'documents.jsonl')])}")
    assert done.code == 0 and json.loads(done.out)["tokens"] == 8 + 5 + 2, done


def test_a_run_goes_on_between_the_updates_of_a_batch_of_which_nothing_is_learned(place, undisturbed):
    """All answers have the same reward: the filter leaves none."""
    (place / "constant.py").write_text("def score(prompt, answer, line):\n    return 1.0\n")
    more = ["--rl.filter=equal", "--rl.updates=2", f"--rl.reward={place / 'constant.py'}:score", "--validation.every=0",
            f"--checkpoint.init_from={undisturbed}"]
    ran(*words(place, "nothing", *more, "--training.steps=3"))
    ran(*words(place, "nothing", *more, "--training.steps=4"))
    assert [row["step"] for row in rows(place / "nothing")] == [1, 2, 3, 4]


def test_answers_with_line_separators_are_shown(tmp_path):
    (tmp_path / "rollouts").mkdir()
    line = dict(prompt="a\u2028b", answer="\x85\u2029\x0c", reward=None, tokens=3, stopped="stop")
    (tmp_path / "rollouts" / "10.jsonl").write_text(json.dumps(line, ensure_ascii=False) + '\n{"another": 1}\n')
    (tmp_path / "rollouts" / "9.jsonl").write_text("broken")
    assert measured._answers(tmp_path, 10) == {"batch": 10, "lines": [line]}
    assert measured._answers(tmp_path, 8) is measured._answers(tmp_path, 9) is None, "later, or broken"


def test_longer_learning_raises_the_reward(place, home):  # noqa: F811
    ran(*words(place, "longer", "--training.steps=40", "--validation.every=0"))
    found = [row["reward"] for row in rows(place / "longer")]
    assert np.mean(found[-5:]) > np.mean(found[:5]) + 0.3, found


PLACES = {
    "before the answers": (Generator, "complete", False), "after the answers": (Generator, "complete", True),
    "before the rewards are read": (rollouts.Rollouts, "_check_failures", False),
    "before the batch is kept": (groups.Kept, "write", False),
    "after the batch is kept": (groups.Kept, "write", True),
    "while text is kept": (groups, "_drop_before", False), "after the step": (Journal, "add_step", True)}


def killed_at(monkeypatch, owner, name: str, count: int, after: bool, words) -> None:
    """Runs the command until the function is called for the so manieth time; after: until it has done its work."""
    real, calls = getattr(owner, name), []

    def killed(*args, **keys):
        calls.append(1)
        if len(calls) == count:
            if after:
                real(*args, **keys)
            raise KeyboardInterrupt
        return real(*args, **keys)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            call(train.main, *words)


GRID = [pytest.mark.long, pytest.mark.cell]


@pytest.mark.parametrize("where", [pytest.param(where, marks=GRID * (where != "after the batch is kept"))
                                   for where in PLACES])
def test_a_run_that_is_killed_goes_on_bit_for_bit(place, undisturbed, monkeypatch, where):
    owner, name, after = PLACES[where]
    directory = place / where.replace(" ", "-")
    # in the fourth step, behind the checkpoint of the second, or nearly
    killed_at(monkeypatch, owner, name, 4, after, words(place, directory.name, "--checkpoint.every=2"))
    ran(*words(place, directory.name, "--checkpoint.every=2"))
    assert list(map(timeless, rows(directory))) == list(map(timeless, rows(undisturbed)))
    assert_same_bits(saved(directory, 4)["params"], saved(undisturbed, 4)["params"])
    assert drawn(directory, 3) == drawn(undisturbed, 3)


def test_a_run_that_is_to_stop_draws_no_more_answers(place, undisturbed, monkeypatch):
    """Of several processes that agree one step later, a batch of answers may take minutes."""
    asked = itertools.count()

    def reached(stop, *late):       # the loop says how late the host came, and the feed asks twice before a batch
        stop.agreed = stop.agreed or not late and next(asked) == 5
        return stop.agreed
    with monkeypatch.context() as patched:
        patched.setattr(loop.Stop, "must_stop", reached)
        done = call(train.main, *words(place, "stopping", "--checkpoint.every=0"))
    assert done.code == 75 and "stopped after step 2, saved" in done.out, done.out
    ran(*words(place, "stopping", "--checkpoint.every=0"))
    assert list(map(timeless, rows(place / "stopping"))) == list(map(timeless, rows(undisturbed)))


@pytest.mark.parametrize("behind", [pytest.param(0, marks=GRID), 1])
def test_a_run_that_is_to_stop_waits_for_no_scores_and_keeps_its_answers(place, undisturbed, monkeypatch, behind):
    """In its third batch of answers, or in the validation before it."""
    directory, drawn, stop_at = place / f"scores{behind}", [], 4 - behind
    directory.mkdir()
    (directory / "rewards.py").write_text(f"import os, time\n{REWARD.rstrip()}\n".replace("return", f"""
    while os.path.exists({str(directory / "waits")!r}):
        time.sleep(0.1)
    return""".lstrip()))
    more = [f"--rl.reward={directory / 'rewards.py'}:score", "--rl.reward_timeout_s=600", "--checkpoint.every=0"]
    real = Generator.complete

    def complete(self, *args, **keys):
        drawn.append(len(args[0]))
        if len(drawn) == stop_at:
            (directory / "waits").touch()
        return real(self, *args, **keys)
    with monkeypatch.context() as patched:
        patched.setattr(Generator, "complete", complete)
        patched.setattr(loop.Stop, "must_stop", lambda stop, *_: setattr(
            stop, "agreed", (directory / "waits").exists()) or stop.agreed)
        begun = time.monotonic()
        done = call(train.main, *words(place, f"scores{behind}/run", *more))
        assert done.code == 75 and "stopped after step 2, saved" in done.out and time.monotonic() - begun < 60
        assert behind == ("the validation was interrupted" in done.out)
        (directory / "waits").unlink()
        drawn.clear()
        stop_at = None
        patched.undo()
        patched.setattr(Generator, "complete", complete)
        ran(*words(place, f"scores{behind}/run", *more))
    assert len(drawn) == 3 + behind, "not the third batch: the fourth, a validation and the text at the end"
    found, expected = (list(map(timeless, rows(one))) for one in (directory / "run", undisturbed))
    if behind:
        expected[1] = {key: x for key, x in expected[1].items() if not key.startswith("val_reward")}
    assert found == expected


def test_a_run_that_went_back_shows_no_later_answers(place, undisturbed):
    shutil.copytree(undisturbed, place / "back")
    ran(*words(place, "back", "--checkpoint.step=2", "--training.steps=3", "--checkpoint.every=2",
               "--optimizer.learning_rate=0.02"))
    assert (place / "back" / "rollouts" / "3.jsonl").exists() and measured.of(place / "back")["answers"]["batch"] == 2


def test_a_prompt_that_just_fits_is_answered_to_the_end_and_learned_in_a_row_that_it_fills(place, undisturbed):
    """6 tokens with an answer of 6: the last one is not read. With a position less the prompt is refused, see
    `test_faults_are_told_by_name`."""
    told = ran(*words(place, "border", "--data.seq_len=11", "--data.global_batch=16", "--training.steps=1",
               "--validation.every=0")).err
    assert "the sampler computes" not in told
    assert drawn(place / "border", 0) == drawn(undisturbed, 0)
    found, expected = rows(place / "border")[0], rows(undisturbed)[0]
    for name in ("loss", "grad_norm", "entropy", "answer_tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert found["mismatch_max"] < 1e-4 and found["answer_tokens_max"] == 6
    assert max(len(prompt) for prompt, _, _ in drawn(place / "border", 0)) == 5, "and the token that begins a document"


def test_prompts_that_were_held_out_are_not_trained_on_later(place, undisturbed):
    (place / "others.jsonl").write_text('{"prompt": "1", "number": 1}\n')
    later = f'--data.validation_paths=["{place / "others.jsonl"}"]'
    done = call(train.main, *words(place, "undisturbed", later, "--training.steps=5"))
    assert done.code == 2 and "held-out prompts would be trained on" in done.err, done.err


def test_half_a_file_of_answers_is_drawn_again(place, undisturbed):
    directory = place / "half"
    shutil.copytree(undisturbed, directory)
    shutil.rmtree(directory / "checkpoints" / "4")
    kept = directory / "rollouts" / "2.npz"
    kept.write_bytes(kept.read_bytes()[:-100])
    ran(*words(place, "half", "--checkpoint.every=2"))
    assert list(map(timeless, rows(directory))) == list(map(timeless, rows(undisturbed)))


def test_answers_of_other_weights_are_not_taken(place, undisturbed):
    """Of the same seed and run file, but for the learning rate: the weights after a step are others."""
    directory = place / "others"
    (directory / "rollouts").mkdir(parents=True)
    shutil.copy(undisturbed / "rollouts" / "1.npz", directory / "rollouts" / "1.npz")
    (directory / ".lock").touch()
    ran(*words(place, "others", "--optimizer.learning_rate=0.2", "--training.steps=2", "--validation.every=0"))
    assert (directory / "rollouts" / "1.jsonl").exists(), "answers that are taken are not told again"
    assert drawn(directory, 0) == drawn(undisturbed, 0) and drawn(directory, 1) != drawn(undisturbed, 1)


@pytest.mark.parametrize("name, old, new", [("prompts.jsonl", '": "', '": "0'), ("rewards.py", "% 2", "% 3")])
def test_kept_answers_are_those_to_these_prompts_by_this_reward(place, undisturbed, name, old, new):
    """Who mends the data or the reward and starts again is not given what was drawn before."""
    directory, text = place / f"mended-{name}", (place / name).read_text()
    (directory / "rollouts").mkdir(parents=True)
    shutil.copy(undisturbed / "rollouts" / "0.npz", directory / "rollouts" / "0.npz")
    (directory / ".lock").touch()
    (place / name).write_text(text.replace(old, new))
    try:
        ran(*words(place, directory.name, "--training.steps=1", "--validation.every=0"))
    finally:
        (place / name).write_text(text)
    before, now = ([(answer, reward) for _, answer, reward in drawn(one, 0)] for one in (undisturbed, directory))
    if name == "rewards.py":
        assert now == [(answer, sum(ord(c) % 3 for c in answer) / 6) for answer, _ in before]
    else:
        assert [answer for answer, _ in now] != [answer for answer, _ in before]


def test_a_reward_whose_file_changes_between_two_starts_is_told_and_recorded(place):
    text, more = (place / "rewards.py").read_text(), (place, "rewarded", "--validation.every=0")
    ran(*words(*more, "--training.steps=1"))
    (place / "rewards.py").write_text(text.replace("% 2", "% 3"))
    try:
        assert f'from step 2 on: rl.reward="{place}/rewards.py:score (' in ran(*words(*more, "--training.steps=2")).out
        assert "rl.reward=" not in ran(*words(*more, "--training.steps=3")).out
    finally:
        (place / "rewards.py").write_text(text)
    change, = (json.loads(line) for line in (place / "rewarded/changes.jsonl").read_text().splitlines()
               if "reward" in line)
    assert (change["step"], change["key"]) == (1, "rl.reward") and change["from"] != change["to"]


@pytest.mark.parametrize("more", [pytest.param(OTHER, marks=GRID), (*OTHER, "--training.microbatches=2",
                                                                    "--rl.slots=8")])
def test_other_meshes_draw_the_same_answers(place, undisturbed, more):
    name = f"mesh{len(more)}"
    ran(*words(place, name, *more))
    for batch in range(4):
        assert drawn(place / name, batch) == drawn(undisturbed, batch)
    for one, other in zip(rows(place / name), rows(undisturbed), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["mismatch_max"] < 1e-4


SHARES = """import os
def score(prompt, answer, line):
    return {"reward": sum(ord(one) % 2 for one in answer) / 6, "process": os.getppid()}
"""


@pytest.fixture(scope="module")
def of_many_lengths(place, home):  # noqa: F811
    """(words, directory) of a run in this process: one slot a device, answers of 1 to 24 tokens."""
    (place / "shares.py").write_text(SHARES)
    more = [f"--rl.reward={place / 'shares.py'}:score", "--rl.max_tokens=24", "--rl.slots=8", "--training.steps=2",
            "--data.seq_len=64", "--run.sample_tokens=0",
            f"--rl.stop={json.dumps([chr(one) for one in range(32, 80)])}"]
    ran(*words(place, "alone", *more))
    return more, place / "alone"


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=GRID)])
def test_processes_draw_the_same_and_wait_for_the_one_that_has_the_longest_answer(place, of_many_lengths, processes):
    """Each scores its share, of validations too."""
    more, alone = of_many_lengths
    name = f"processes-{processes}"
    environment = {key: x for key, x in os.environ.items() if key != "NPROC"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "meshtrain.launch.local", "--processes", str(processes), "--",
                           *words(place, name, *more)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for batch in range(2):
        found, expected = answers(place / name, batch), answers(alone, batch)
        assert len({one.pop("process") for one in found}) == processes
        assert [one.pop("process") for one in expected] and found == expected
        lengths = [one["tokens"] for one in found]
        assert min(lengths) == 1 and max(lengths) > 8, "most slots are done early"
    check_sums_of_answers(place / name, 2)
    for one, other in zip(rows(place / name), rows(alone), strict=True):
        assert one.keys() == other.keys()
        for key, wanted in timeless(other).items():
            assert wanted is None or key.endswith("/process") or one[key] == pytest.approx(
                wanted, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("name, more", [
    pytest.param("updates", ["--rl.updates=2"], marks=sampling.GRID), ("kl", ["--rl.kl=0.1", "--rl.updates=2"]),
    pytest.param("lora", ["--rl.kl=0.1", "--lora.rank=2"], marks=sampling.GRID)])
def test_a_stop_between_the_updates_of_a_batch_changes_nothing(place, undisturbed, monkeypatch, name, more):
    more = [*more, "--training.steps=5", "--validation.every=0", f"--checkpoint.init_from={undisturbed}",
            "--checkpoint.every=3"]
    ran(*words(place, f"{name}-one", *more))
    killed_at(monkeypatch, Journal, "add_step", 5, True, words(place, name, *more))
    ran(*words(place, name, *more))
    assert list(map(timeless, rows(place / name))) == list(map(timeless, rows(place / f"{name}-one")))
    found = rows(place / name)
    if "--rl.kl=0.1" in more:
        assert abs(found[0]["kl"]) < 1e-6 < found[-1]["kl"], "it begins at its reference, and departs from it"
    if "--rl.updates=2" in more:
        assert found[0]["ratio"] == pytest.approx(1, abs=1e-5) and found[1]["ratio"] != 1
        assert "reward" in found[2] and "reward" not in found[1]
        assert all(row["mismatch_max"] < 1e-4 for row in found), "of the weights that drew"


@pytest.mark.long
@pytest.mark.cell
def test_a_run_that_goes_on_measures_to_the_weights_that_it_started_from(place, undisturbed):
    more = ["--rl.kl=0.1", "--training.steps=1", "--validation.every=0"]
    ran(*words(place, "reference", f"--checkpoint.init_from={undisturbed}", *more))
    shutil.copytree(undisturbed, place / "trained-on")
    shutil.rmtree(place / "trained-on" / "checkpoints" / "4")
    more[1] = "--training.steps=2"
    done = call(train.main, *words(place, "reference", f"--checkpoint.init_from={place / 'trained-on'}", *more))
    assert done.code == 2 and "has other weights than the run in" in done.err, done.err
    ran(*words(place, "reference", f"--checkpoint.init_from={undisturbed}", *more))
    once = rows(place / "reference")[1]
    ran(*words(place, "reference", f"--checkpoint.init_from={undisturbed}", *more, "--checkpoint.step=1"))
    assert timeless(rows(place / "reference")[1]) == timeless(once) and once["kl"] > 0, "a step of this run, not of that"
    # Also where rl.kl is set later.
    ran(*words(place, "later", f"--checkpoint.init_from={undisturbed}", more[2], "--training.steps=1"))
    done = call(train.main, *words(place, "later", f"--checkpoint.init_from={place / 'trained-on'}", *more))
    assert done.code == 2 and "has other weights than the run in" in done.err, done.err
    ran(*words(place, "later", f"--checkpoint.init_from={undisturbed}", *more))
    assert timeless(rows(place / "later")[1])["kl"] == once["kl"]


def test_a_sampler_with_old_weights_is_seen_in_the_row(place, home, monkeypatch):  # noqa: F811
    """The plant: weights that are laid out once, and never again."""
    from meshtrain.rl import samplers
    real, kept = samplers.LocalSampler.generator, []

    def stale(self, params):
        kept[:] = kept or [jax.tree.map(lambda x: x.copy(), params)]
        return real(self, kept[0])
    monkeypatch.setattr(samplers.LocalSampler, "generator", stale)
    told = ran(*words(place, "stale", "--validation.every=0")).err
    found = [row["mismatch_max"] for row in rows(place / "stale")]
    assert found[0] < 1e-4 and min(found[1:]) > 1e-3
    assert told.count("the sampler computes") == 1, told
    assert f"step 2: mismatch_max={found[1]:.2g}, but rounding explains at most 0.001" in told, told


def test_a_reward_that_fails_leaves_its_answer_out(place, home):  # noqa: F811
    (place / "failing.py").write_text('''
def score(prompt, answer, example):
    if example["number"] == 3 and len(answer) % 2:
        raise ValueError("odd")
    return float(len(answer))
''')
    reward = f"--rl.reward={place / 'failing.py'}:score"
    few = ["--rl.prompts=10", "--rl.samples=2", "--data.global_batch=16", "--training.steps=6", "--validation.every=0",
           "--data.validation_fraction=0"]
    ran(*words(place, "drop", reward, *few))
    lines = [json.loads(line) for batch in range(6)
             for line in (place / "drop" / "rollouts" / f"{batch}.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line.get("failure")]
    assert failed and all(line["reward"] is None and "ValueError: odd" in line["failure"] for line in failed)
    assert sum(row["reward_failed"] for row in rows(place / "drop")) == len(failed)
    check_sums_of_answers(place / "drop", 6)
    done = call(train.main, *words(place, "stop", reward, "--rl.reward_failures=stop", *few))
    assert done.code == 1 and "ValueError: odd" in done.err and "Traceback" not in done.err


def test_rewards_that_are_all_equal_leave_the_weights_as_they_were(place, home):  # noqa: F811
    (place / "same.py").write_text("def score(prompt, answer, example):\n    return 1\n")
    ran(*words(place, "same", f"--rl.reward={place / 'same.py'}:score", "--validation.every=0",
               "--optimizer.weight_decay=0", "--training.steps=2", "--checkpoint.every=1"))
    found = rows(place / "same")
    assert [row["equal_groups"] for row in found] == [1.0, 1.0] and [row["grad_norm"] for row in found] == [0.0, 0.0]
    assert not any(row["skipped"] for row in found)
    assert {row[name] for row in found for name in ("entropy", "ratio", "mismatch_max")} == {None}, "of no tokens"
    assert_same_bits(saved(place / "same", 1)["params"], saved(place / "same", 2)["params"])


def test_groups_with_equal_rewards_are_replaced(place, home):  # noqa: F811
    (place / "some.py").write_text('''
def score(prompt, answer, example):
    return 1.0 if example["number"] % 2 else float(len(answer))
''')
    ran(*words(place, "filter", f"--rl.reward={place / 'some.py'}:score", "--rl.filter=equal", "--training.steps=3",
               "--validation.every=0", "--checkpoint.every=2"))
    for batch in range(3):
        rewards = {}
        for prompt, _, reward in drawn(place / "filter", batch):
            rewards.setdefault(prompt, set()).add(reward)
        assert all(len(found) > 1 for found in rewards.values())
    shutil.rmtree(place / "filter" / "checkpoints" / "3")
    before = drawn(place / "filter", 2)
    (place / "filter" / "rollouts" / "2.npz").unlink()
    ran(*words(place, "filter", f"--rl.reward={place / 'some.py'}:score", "--rl.filter=equal", "--training.steps=3",
               "--validation.every=0", "--checkpoint.every=2"))
    assert drawn(place / "filter", 2) == before, "how many prompts were drawn before is part of the checkpoint"


def test_a_disk_that_takes_no_answers_costs_no_run(place, home, monkeypatch):  # noqa: F811
    real = files.replace

    def full(path, *args, **keys):
        if "rollouts" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *args, **keys)
    monkeypatch.setattr(files, "replace", full)
    done = ran(*words(place, "full", "--training.steps=1", "--validation.every=0"))
    assert "the answers could not be saved" in done.err


@pytest.mark.parametrize("more, told", [
    (["--data.source=stdlib", "--data.paths=[]"], 'training.objective="rl" and data.source="prompts" need each other'),
    (["--training.objective=next_token"], 'only training.objective="rl" reads section [rl], not "next_token"'),
    (["--rl.reward="], "rl.reward is empty"),
    (["--rl.reward=exakt"], "exakt"),
    (["--rl.reward=nowhere.py:score"], "nowhere.py"),
    (["--rl.stop=[\"\"]"], "rl.stop has an empty string"),
    (["--rl.rules=nowhere.toml"], "rl.rules=\"nowhere.toml\" is not a file"),
    (["--data.validation_paths=[\"nowhere.jsonl\"]"], "data.validation_paths: 'nowhere.jsonl' matches no file"),
    (["--rl.samples=1"], "rl.samples=1: an advantage compares the answers of a group"),
    (["--rl.max_tokens=33"], "leaves no room for a prompt"),
    (["--rl.prompts=16"], "data.global_batch=8 sequences of data.seq_len=32 may be too few for the 64 answers"),
    (["--rl.updates=3"], "rl.updates=3 does not divide rl.prompts=4"),
    (["--rl.kl=0.1"], "rl.kl=0.1 is a divergence from the initial weights, which are random here"),
    (["--rl.old=sampler", "--rl.correction=token_mask"], "rl.correction=\"token_mask\" compares old log-probabilities"),
    (["--rl.top_k=5"], "rl.top_k"),
    (["--model.matmul_dtype=float8"], "answers are generated without it, and log-probabilities differ"),
    (["--model.residual_dropout=0.1"], "generates answers without dropout"),
    (["--training.z_loss=0.1"], 'training.z_loss=0.1 is not part of training.objective="rl"'),
    (["--training.loss_spike=skip"], "training.loss_spike=\"skip\""),
    (["--data.packing=whole"], "data.packing=\"whole\" is not read by"),
    (["--data.seq_len=10"], "11 prompts longer than the 5 tokens that data.seq_len=10 leaves after an answer of "
     "rl.max_tokens=6 ({place}/prompts.jsonl, line 11 has 6, "),
    (["--mesh.stage=2", "--mesh.data=4", "--model.num_layers=2"], "pipelines do not support training.objective"),
])  # fmt: skip
def test_faults_are_told_by_name(place, more, told):
    done = call(train.main, *words(place, "faulty", *more))
    assert done.code == 2 and told.format(place=place) in done.err and "Traceback" not in done.err, done.err
    assert not (place / "faulty" / "metrics.jsonl").exists()
