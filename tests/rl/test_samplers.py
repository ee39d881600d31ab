"""Samplers apart (rl.lag): exact versions, the same tokens whoever draws them and whoever is killed, and answers of
another version are not learned from. Threads stand for sampler processes where a process has nothing more to show."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoints import assert_same_bits
from commands import ROOT, call, home, in_a_directory_of_its_own, refused  # noqa: F401
from test_lora_runs import saved
from test_rl import drawn, killed_at, place, ran, rows, timeless, words  # noqa: F401

from meshtrain import config, files, run_files
from meshtrain.commands import sample, train
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.inference.generate import Completion
from meshtrain.journal.journal import Journal
from meshtrain.launch import samplers
from meshtrain.rl import exchange, groups, separate, work_queue
from meshtrain.rl.orders import ArrivingAnswers, Orders, SentWeights
from meshtrain.run import loop, stops, trees

ALONE = ["--mesh.simulated_devices=8", "--mesh.data=1", "--mesh.fsdp=1", "--mesh.tensor=1", "--run.compilation_cache="]
FEW = ["--checkpoint.every=2", "--validation.every=0", "--training.steps=5"]
GRID = [pytest.mark.long, pytest.mark.cell]


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(exchange, "LAPSED_S", 3.0)
    monkeypatch.setattr(exchange, "MISSING_S", 1.0)
    monkeypatch.setattr(exchange, "LOOK_S", 0.02)


class Beside:
    """Samplers of a run while a context lasts."""

    def __init__(self, directory: Path, count: int = 1):
        self.codes = []
        self.threads = [threading.Thread(target=lambda: self.codes.append(sample.serve(directory, ALONE)), daemon=True)
                        for _ in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        for thread in self.threads:
            thread.join(60)
        assert error[0] or self.codes == [0] * len(self.threads), "they end with the run"


def versions(directory: Path) -> list[int]:
    found = []
    for path in sorted((directory / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = path.read_text().splitlines()
        (one,) = {json.loads(line)["version"] for line in lines}
        found.append(one)
    return found


def same(directory: Path, other: Path, first: int = 0) -> None:
    """The same answers, of batches from the first on, and metrics, times aside, and the same weights to the bit."""
    assert list(map(timeless, rows(directory))) == list(map(timeless, rows(other)))
    for batch in range(first, 5):
        assert drawn(directory, batch) == drawn(other, batch)
    assert_same_bits(saved(directory, 5)["params"], saved(other, 5)["params"])


@pytest.fixture(scope="module")
def two_behind(place, home):  # noqa: F811
    """A run with rl.lag=2 that nothing has disturbed."""
    with pytest.MonkeyPatch.context() as patched, Beside(place / "lag2"):
        patched.setattr(exchange, "LOOK_S", 0.02)
        ran(*words(place, "lag2", "--rl.lag=2", *FEW))
    return place / "lag2"


def test_a_batch_is_drawn_with_the_weights_of_lag_batches_before_it(place, two_behind):  # noqa: F811
    assert versions(two_behind) == [0, 0, 0, 1, 2]
    found = rows(two_behind)
    assert found[0]["mismatch_max"] < 1e-4 and all(row["mismatch_max"] > 1e-3 for row in found[1:]), "they are stale"
    assert all(row["ratio"] == pytest.approx(1, abs=1e-5) for row in found), "to log-probabilities that are computed anew"
    ran(*words(place, "beside", "--training.steps=1", "--validation.every=0"))
    assert drawn(place / "beside", 0) == drawn(two_behind, 0), "samplers apart draw what the trainer would"
    left = {int(path.name) for path in (two_behind / "samplers" / "weights").iterdir()}
    assert left == {0, 1, 2}, "later ones draw nothing"


def test_two_samplers_draw_the_same_and_a_killed_trainer_goes_on_bit_for_bit(
        place, two_behind, monkeypatch):  # noqa: F811
    directory, more = place / "killed", ["--rl.lag=2", *FEW]
    with Beside(directory, 2):
        # in the fourth step: behind the checkpoint of the second, whose queue holds answers with versions 0 and 1
        killed_at(monkeypatch, Journal, "add_step", 4, True, words(place, "killed", *more))
        position = json.loads((directory / "checkpoints" / "2" / "metadata.json").read_text())["data"]["position"]
        assert [one[:2] for one in position["queue"]] == [[2, 0], [3, 1]]
        shutil.rmtree(directory / "rollouts")
        shutil.rmtree(directory / "samplers" / "weights" / "0")     # older than those that are kept
        ran(*words(place, "killed", *more))
    same(directory, two_behind, 2)


PLACES = {
    "before anything is ordered": (Orders, "offer", 4, False), "with all that is ordered": (
        Orders, "offer", 4, True),
    "before an order": (Orders, "_write_order", 5, False), "after an order": (Orders, "_write_order", 5, True),
    "before the weights are saved": (Checkpoints, "save", 4, False), "while they are": (Checkpoints, "save", 4, True),
    "with some answers": (ArrivingAnswers, "_read", 13, True), "with all of a batch": (
        ArrivingAnswers, "complete", 4, True),
    "before old files go": (Orders, "_drop_before", 4, False),
    "before a checkpoint has its queue": (Orders, "queue", 2, False)}


@pytest.mark.parametrize("where", [pytest.param(where, marks=GRID) for where in PLACES])
def test_a_trainer_that_is_killed_goes_on_bit_for_bit(place, two_behind, monkeypatch, where):  # noqa: F811
    owner, name, count, after = PLACES[where]
    directory = place / where.replace(" ", "-")
    more = words(place, directory.name, "--rl.lag=2", *FEW)
    with Beside(directory):
        killed_at(monkeypatch, owner, name, count, after, more)
        ran(*more)
    same(directory, two_behind)
    assert versions(directory) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("name, more", [pytest.param(name, more, marks=GRID)
                                        for name, more in {
    "bfloat16": ["--model.compute_dtype=bfloat16"], "stop": ['--rl.stop=["a", "7"]'], "slots": ["--rl.slots=4"],
    "lora": ["--lora.rank=2", "--checkpoint.init_from={lag2}", "--rl.kl=0.1"]}.items()])
def test_samplers_apart_draw_what_the_trainer_would(place, two_behind, name, more):  # noqa: F811
    more = [*(one.format(lag2=two_behind) for one in more), "--training.steps=1", "--validation.every=0"]
    with Beside(place / name):
        ran(*words(place, name, "--rl.lag=1", *more))
    ran(*words(place, f"{name}-beside", *more))
    assert drawn(place / name, 0) == drawn(place / f"{name}-beside", 0)
    assert rows(place / name)[0]["mismatch_max"] < (0.1 if name == "bfloat16" else 1e-4)


@pytest.mark.long
def test_of_a_run_with_adapters_only_they_are_sent_with_each_version(place, two_behind):  # noqa: F811
    directory, there = place / "adapters", exchange.SamplerFiles(place / "adapters")
    more = words(place, "adapters", "--rl.lag=1", "--lora.rank=2", f"--checkpoint.init_from={two_behind}",
                 "--validation.every=0")
    with Beside(directory):
        ran(*more, "--training.steps=3")
    assert versions(directory) == [0, 0, 1] and rows(directory)[0]["mismatch_max"] < 1e-4
    sent, kept = (set(trees.leaves_of(Checkpoints(DirectoryStore(path), read_only=True).arrays(number)))
                  for path, number in ((there.weights, 1), (there.frozen, exchange.FROZEN)))
    assert len(sent) == 14 and all("/lora/" in name for name in sent) and not any("/lora/" in one for one in kept)
    assert sent | kept == set(trees.leaves_of(Checkpoints(DirectoryStore(directory / "checkpoints"), read_only=True).arrays(
        3, only_params=True)))


def test_frozen_weights_are_written_once_and_again_where_they_are_others(tmp_path):
    orders = Orders.__new__(Orders)
    orders.place = exchange.SamplerFiles(tmp_path)
    frozen = SentWeights(Checkpoints(DirectoryStore(orders.place.frozen), keep=1), lambda params: params, {})
    written = []
    for value in (1.0, 1.0, 2.0):
        digest = orders._save_frozen(frozen, {"w": jnp.full(3, value)})
        assert digest == orders.place.checksum_of_frozen()
        written.append((digest, (orders.place.frozen / "0" / "metadata.json").stat().st_ino))
    assert written[0] == written[1] and written[1][0] != written[2][0]
    assert [path.name for path in orders.place.frozen.iterdir()] == ["0"]


@pytest.mark.long
def test_stale_answers_raise_the_reward_with_a_correction(place, home):  # noqa: F811
    rewards = {}
    for correction in ("token_truncate", "none"):
        directory = place / f"learns-{correction}"
        with Beside(directory, 2):
            ran(*words(place, directory.name, "--rl.lag=2", f"--rl.correction={correction}", "--training.steps=40",
                       "--validation.every=0"))
        rewards[correction] = [row["reward"] for row in rows(directory)]
    print({name: (found[:3], found[-3:]) for name, found in rewards.items()})
    found = rewards["token_truncate"]
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.2, found


@pytest.mark.long
def test_batches_whose_weights_are_gone_are_drawn_with_newer_ones_and_that_is_told(
        place, two_behind, monkeypatch):  # noqa: F811
    directory = place / "gone"
    more = words(place, "gone", "--rl.lag=2", *FEW)
    with Beside(directory):
        killed_at(monkeypatch, Journal, "add_step", 4, True, more)
        shutil.rmtree(directory / "rollouts")
        for path in (directory / "samplers" / "weights").iterdir():
            shutil.rmtree(path)
        for path in (directory / "samplers" / "answers").iterdir():
            path.unlink()
        done = ran(*more)
    assert ("batch 2 is sampled with the weights of version 2: the weights of version 0 and the answers sampled with "
            "them no longer exist") in done.err
    assert versions(directory)[-3:] == [2, 2, 2] and rows(directory)[2]["mismatch_max"] < 1e-4


def test_a_run_with_several_updates_of_a_batch_counts_batches_and_not_steps(place, home):  # noqa: F811
    with Beside(place / "updates"):
        ran(*words(place, "updates", "--rl.lag=1", "--rl.updates=2", "--rl.correction=token_truncate", *FEW[1:]))
    assert versions(place / "updates") == [0, 0, 1]


def test_a_run_that_is_asked_to_stop_while_it_waits_saves_and_ends(place, home, monkeypatch):  # noqa: F811
    """There is no sampler for its second batch."""
    asked, real = [], ArrivingAnswers._wait_for_parts
    monkeypatch.setattr(loop.Stop, "must_stop", lambda self, late_s=None: bool(asked))

    def waiting(self, missing):
        if self.order.batch == 1:
            asked.append(1)
            return []
        return real(self, missing)
    monkeypatch.setattr(ArrivingAnswers, "_wait_for_parts", waiting)
    monkeypatch.setattr(exchange, "LOST_S", 20.0)      # how long the sampler waits behind a run that has ended
    directory = place / "asked"
    thread = threading.Thread(target=sample.serve, args=(directory, ALONE), daemon=True)
    thread.start()
    done = call(train.main, *words(place, "asked", "--rl.lag=1", *FEW))
    assert done.code == stops.STOPPED and "stopped after step 1" in done.out, done
    assert [int(path.name) for path in (directory / "checkpoints").iterdir()] == [1]
    monkeypatch.undo()
    ran(*words(place, "asked", "--rl.lag=1", *FEW))
    thread.join(60)
    assert versions(directory) == [0, 0, 1, 2, 3]


# ---- orders and claims -----------------------------------------------------------------------------------------------

ORDER = exchange.Order(3, 1, "sum", {"samples": 2, "seed": 0}, 16, 2, [[1], [2], [3]])


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A run.dir with one order, whose weights are there."""
    place = exchange.SamplerFiles(tmp_path)
    for path in (place.orders, place.heartbeats, place.answers(0, 0).parent, place.weights / "1"):
        path.mkdir(parents=True)
    (place.weights / "1" / "metadata.json").write_text('{"weights": "sum"}')
    place.order(3).write_text(ORDER.text)
    return tmp_path


def taker(desk) -> work_queue.WorkQueue:
    one = work_queue.WorkQueue(desk)
    one.begin()
    return one


def answers(part: int, token: int = 5) -> list[Completion]:
    return [Completion([], [token, row], "stop", [-0.5, -0.25], [1.0, 2.0]) for row in ORDER.rows(part) for _ in "ab"]


def test_each_part_is_taken_once_and_that_of_a_dead_sampler_again(desk):
    first, second = taker(desk), taker(desk)
    assert first.next() == (ORDER, 0) and second.next() == (ORDER, 1)
    third = taker(desk)
    assert third.next() is None, "both are at work"
    first._write()
    first._beat.close()     # kill -9: its heartbeat stops
    deadline = time.monotonic() + 20
    while (taken := third.next()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert taken == (ORDER, 0), "and not that of the second, which is alive"
    third.deliver(ORDER, 0, answers(0), "cpu")
    second.deliver(ORDER, 1, answers(1), "cpu")
    assert taker(desk).next() is None
    first.deliver(ORDER, 0, answers(0), "cpu")      # it was only slow: the same answers


def test_a_claim_is_left_alone_while_its_name_is_written_or_it_is_released(desk):
    one = taker(desk)
    claim = one.place.answers(3, 0).with_suffix(".claim")
    claim.touch()
    assert one.next() == (ORDER, 1), "of part 0 somebody is writing a name"
    deadline = time.monotonic() + 20
    while (taken := one.next()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert taken == (ORDER, 0), "its sampler died before it wrote a name"
    one.release()
    claim.symlink_to("gone")        # it exists, and when it is read it does not
    assert one.next() is None
    claim.unlink()
    assert one.next() == (ORDER, 0)


def test_a_sampler_that_hangs_is_named_and_its_part_drawn_by_another_and_counted_once(desk, capfd):
    """Its heartbeat goes on, because its main thread alone sleeps."""
    first, second = taker(desk), taker(desk)
    first._parts_s.append(0.1)      # it has drawn parts before
    assert first.next() == (ORDER, 0) and second.next() == (ORDER, 1)
    deadline = time.monotonic() + 30
    trainer = exchange.Heartbeats(first.place)
    while (taken := second.next()) is None:
        assert time.monotonic() < deadline
        assert trainer.any(), "the second works"
        time.sleep(0.05)
    assert taken == (ORDER, 0) and (first.place.heartbeats / first.name).exists()
    assert capfd.readouterr().err.count(f"sampler {first.name} hangs: it is alive but has sampled nothing for 3 s") >= 1
    second.deliver(ORDER, 0, answers(0), "cpu")
    written = first.place.answers(3, 0).stat()
    first.deliver(ORDER, 0, answers(0), "cpu")      # late, the same answers
    assert first.place.answers(3, 0).stat() == written and second.next() is None
    first.progress()
    first._write()
    assert second.heartbeats.alive(first.name), "it works again"


HANGS = """
import sys, time
from meshtrain.commands import sample
from meshtrain.cluster import watch
from meshtrain.rl import exchange, separate, work_queue
watch.LOOK_S, exchange.LAPSED_S, work_queue.FIRST_S, exchange.LOOK_S = 0.1, {lapsed_s}, {first_s}, 0.02
real = work_queue.WorkQueue.__init__

def init(queue, directory):
    real(queue, directory)
    queue._parts_s.extend({parts_s})
work_queue.WorkQueue.__init__ = init
{where} = lambda *_: time.sleep(100)
sys.exit(sample.main([sys.argv[1]]))
"""


@pytest.mark.parametrize("where, lapsed_s, first_s, parts_s, phase", [
    ("separate.OrderSampler.answers", 2, 100, [0.1], "part 0 of batch 3"),
    ("separate.OrderSampler.answers", 100, 2, [], "part 0 of batch 3"),
    ("work_queue.WorkQueue.next", 100, 2, [0.1], "waiting for orders")])
def test_a_sampler_that_hangs_is_ended_within_the_limit_of_the_others(where, lapsed_s, first_s, parts_s, phase, desk):
    code = HANGS.format(where=where, lapsed_s=lapsed_s, first_s=first_s, parts_s=parts_s)
    done = subprocess.run([sys.executable, "-c", code, desk], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == stops.FAILED, done
    assert "process 0 of 1" in done.stderr and f"hangs in {phase} since" in done.stderr, done.stderr
    assert "more than a sampler's limit allows (2 s)" in done.stderr


def test_a_sampler_that_works_slowly_and_one_that_waits_do_not_hang(desk):
    first, second = taker(desk), taker(desk)
    for queue in (first, second):
        queue._parts_s.append(0.1)
    assert first.next() == (ORDER, 0) and second.next() == (ORDER, 1)
    for _ in range(20):     # for longer than LAPSED_S
        time.sleep(0.25)
        first.progress()
        assert second.next() is None
        assert first.heartbeats.alive(second.name) and second.heartbeats.alive(first.name)
    first._parts_s.append(1000.0)
    assert first.most_s == 10_000.0
    first.slow = True
    assert first.most_s == work_queue.FIRST_S


@pytest.mark.parametrize("fields", [{"made_by": "meshtrain 0.0.1, jax 0.1"}, {"made_by": None},
                                    {"new": 1, "made_by": "meshtrain 9, jax 9"}])
def test_an_order_of_another_version_is_refused_by_one_message(desk, capfd, monkeypatch, fields):
    place = exchange.SamplerFiles(desk)
    other = {name: value for name, value in {**json.loads(ORDER.text), **fields}.items() if value is not None}
    queue = taker(desk)
    place.order(3).write_text(json.dumps(other))
    assert queue.next() is None and queue.next() is None, "it may be from before an update, and be replaced"
    told = f"was written by {other.get('made_by', 'an earlier version')}, and this process runs meshtrain "
    assert capfd.readouterr().err.count(told) == 1
    place.order(4).write_text(json.dumps(other | {"batch": 4}))
    with pytest.raises(config.ConfigError, match=told):
        queue.next()
    monkeypatch.setattr(exchange, "LOST_S", 0.3)
    done = call(sample.main, desk)
    assert done.code == 2 and done.err.count("error: ") == 1 and f"{told}" in done.err.split("error: ")[1], done
    assert "Traceback" not in done.err
    orders = Orders.__new__(Orders)
    orders.place = place
    orders._write_order(ORDER)
    assert place.read(3) == ORDER, "a trainer replaces it"


def test_an_answer_of_another_version_is_refused_with_both_versions(desk, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(exchange, "versions", lambda: "meshtrain 0.0.1, jax 0.1")
        other = dataclasses.replace(ORDER, made_by=exchange.versions())
        files.write(exchange.SamplerFiles(desk).answers(3, 0), exchange.pack_answers(other, 0, answers(0), "someone", "cpu"))
    orders = Orders.__new__(Orders)
    orders.place = exchange.SamplerFiles(desk)
    with pytest.raises(groups.RolloutError, match=r"by someone \(meshtrain 0.0.1, jax 0.1\).* by meshtrain "):
        ArrivingAnswers(orders, ORDER)._read(0)


def test_two_answers_to_one_order_are_compared(desk, capfd):
    one, other = taker(desk), taker(desk)
    one.deliver(ORDER, 0, answers(0), "cpu")
    with pytest.raises(groups.RolloutError, match="gave other answers than .* one of the two hosts computes wrongly"):
        other.deliver(ORDER, 0, answers(0, 6), "cpu")
    other.deliver(ORDER, 0, answers(0, 6), "gpu")
    assert "meshes round differently" in capfd.readouterr().err
    assert groups.unflat(*groups.unpack_arrays(one.place.answers(3, 0))) == answers(0), "the first are kept"


def test_answers_of_another_version_are_refused(desk):
    stale = dataclasses.replace(ORDER, version=0, weights="old")
    exchange.SamplerFiles(desk).order(3).write_text(stale.text)
    taker(desk).deliver(stale, 0, answers(0), "cpu")
    orders = Orders.__new__(Orders)
    orders.place = exchange.SamplerFiles(desk)
    with pytest.raises(groups.RolloutError, match=r"sampled with version 0 \(old\).* must be sampled with version 1 \(sum\)"):
        ArrivingAnswers(orders, ORDER)._read(0)
    orders._write_order(ORDER)
    assert not list(orders.place.of_batch(3)) and orders.place.read(3) == ORDER, "removed with the order"


def test_an_order_waits_for_its_weights_and_an_answer_to_a_replaced_one_is_dropped(desk):
    one = taker(desk)
    metadata = one.place.weights / "1" / "metadata.json"
    metadata.write_text('{"weights": "others"}')
    assert one.next() is None
    metadata.write_text('{"weights": "sum"}')
    order, part = one.next()
    one.place.order(3).write_text(dataclasses.replace(ORDER, room=99).text)
    one.deliver(order, part, answers(part), "cpu")
    assert not list(one.place.of_batch(3))


def test_weights_that_are_not_those_of_the_order_draw_nothing(place, two_behind, tmp_path):  # noqa: F811
    shutil.copytree(two_behind / "samplers", tmp_path / "samplers")
    there = exchange.SamplerFiles(tmp_path)
    order = dataclasses.replace(there.read(4), weights="another sum")
    with pytest.raises(groups.RolloutError, match="has other weights .* nothing is sampled"):
        separate.OrderSampler(tmp_path, ALONE, work_queue.WorkQueue(tmp_path)).answers(order, 0)


def test_a_sampler_that_waits_for_a_run_finds_all_of_its_directories(tmp_path, monkeypatch):
    orders, make = Orders.__new__(Orders), Path.mkdir
    orders.place = exchange.SamplerFiles(tmp_path)

    def looked(path, *args, **keys):
        make(path, *args, **keys)
        if orders.place.orders.is_dir():        # for which `sample.serve` waits
            queue = taker(tmp_path)
            assert queue.next() is None
            queue.leave()
    monkeypatch.setattr(Path, "mkdir", looked)
    orders._make_folders()
    assert orders.place.orders.is_dir()


def test_what_a_checkpoint_needs_stays(desk):
    """Answers of batches that the queue of a checkpoint holds; other old ones go."""
    orders = Orders.__new__(Orders)
    orders.place, orders.directory = exchange.SamplerFiles(desk), desk
    orders.rl = type("Rl", (), {"updates": 2, "lag": 2})
    orders.run = type("Run", (), {"checkpoint": type("C", (), {"local_every": 0})})
    for batch in range(12):
        files.write(orders.place.order(batch), "")
        files.write(orders.place.answers(batch, 0), "")
    for name in ("8", ".14.saving"):        # of steps: behind batch 4, and behind batch 7
        (desk / "checkpoints" / name).mkdir(parents=True)
    orders._drop_before(11)
    left = sorted(int(path.stem) for path in orders.place.orders.iterdir())
    assert left == [4, 5, 7, 8, 9, 10, 11]
    assert sorted(int(path.stem[:-2]) for path in orders.place.answers(0, 0).parent.iterdir()) == left


def test_a_run_without_samplers_says_so_and_ends(place, home, monkeypatch):  # noqa: F811
    monkeypatch.setattr(exchange, "LOST_S", 1.5)
    monkeypatch.setattr(exchange, "TOLD_EVERY_S", 0.5)
    done = call(train.main, *words(place, "nobody", "--rl.lag=1", *FEW))
    assert done.code == 1 and "no sampler was alive for 1.5 s: start python -m meshtrain.sample" in done.err
    assert "waiting for 4 of 4 parts of the answers of batch 0, and no sampler is alive" in done.err
    assert "Traceback" not in done.err and done.err.count("error:") == 1


# ---- command lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more, told", [
    (["--rl.lag=1", "--rl.filter=equal"], "rl.lag=1 chooses prompts before the rewards of earlier ones are known"),
    (["--rl.lag=1", "--rl.rules=sharding_rules/zero3.toml"], "rl.lag=1: separate processes generate answers"),
    (["--rl.lag=-1"], "rl.lag=-1"),
    (["--rl.lag=1", "--rl.old=sampler", "--rl.correction=token_mask"], "rl.correction=\"token_mask\" compares"),
])
def test_faults_are_told_by_name(place, more, told):  # noqa: F811
    refused(call(train.main, *words(place, "faulty", *more)), told)


def test_a_sampler_tells_a_mistake_before_it_waits(tmp_path):
    refused(call(sample.main, tmp_path / "nowhere", "--mesh.tensors=2"), "mesh.tensors")
    refused(call(sample.main, tmp_path / "nowhere", "--rl.lag=2"), "rl.lag has no effect here")
    assert not (tmp_path / "nowhere").exists()


def test_launchers_give_samplers_gpus_of_their_own(monkeypatch):
    run = run_files.load(["--mesh.simulated_devices=0"]).replace(rl={"lag": 1})
    given = samplers.COMMAND.read(["--samplers=2", "--sampler-gpus=2"])
    assert samplers.read_options(run, given) == (2, 2)
    mine, theirs = samplers.divide_gpus(run, 2, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"})
    assert mine["CUDA_VISIBLE_DEVICES"] == "0,1" and theirs["CUDA_VISIBLE_DEVICES"] == "2,3,4,5"
    with pytest.raises(config.ConfigError, match="use all 4 GPUs and leave none to the trainer"):
        samplers.divide_gpus(run, 2, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    with pytest.raises(config.ConfigError, match="with rl.lag=0 the trainer generates"):
        samplers.read_options(run.replace(rl={"lag": 0}), given)


# ---- processes -------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from meshtrain.rl import exchange, work_queue
real, calls = work_queue.WorkQueue.deliver, []
def deliver(self, *given):
    calls.append(1)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, *given)
work_queue.WorkQueue.deliver = deliver
from meshtrain.commands import sample
sys.exit(sample.main(sys.argv[1:]))
"""
OTHER = """
import sys
from meshtrain.rl import exchange, work_queue
exchange.LAPSED_S, exchange.MISSING_S = 3.0, 1.0
from meshtrain.commands import sample
sys.exit(sample.main(sys.argv[1:]))
"""


def process(*words) -> subprocess.Popen:
    """With the flags of this process, with which programs round as they do here."""
    return subprocess.Popen([sys.executable, *map(str, words)], text=True,
                            env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.long
def test_a_sampler_that_is_killed_with_an_order_under_way_changes_nothing(place, two_behind):  # noqa: F811
    directory = place / "dead"
    one, found = process("-c", KILLED, directory, *ALONE), []

    def another():
        one.communicate(timeout=200)
        found.append(process("-c", OTHER, directory, *ALONE))
    thread = threading.Thread(target=another)
    thread.start()
    ran(*words(place, "dead", "--rl.lag=2", *FEW))
    thread.join()
    out, err = found[0].communicate(timeout=60)
    assert one.returncode == -signal.SIGKILL and found[0].returncode == 0, err
    assert "batch 1, part 2 of 4" in out, "that which was under way"
    assert "is finished" in out and not list((directory / "samplers" / "heartbeats").glob("*"))
    same(directory, two_behind)


@pytest.mark.long
def test_a_sampler_stops_when_it_is_asked_and_leaves_its_part_to_others(place, two_behind, tmp_path):  # noqa: F811
    shutil.copytree(two_behind / "samplers", tmp_path / "samplers")
    there = exchange.SamplerFiles(tmp_path)
    there.finished.unlink()
    one = process("-m", "meshtrain.sample", tmp_path, *ALONE)
    deadline = time.monotonic() + 60
    while not list(there.heartbeats.iterdir()):
        assert time.monotonic() < deadline and one.poll() is None
        time.sleep(0.1)
    one.send_signal(signal.SIGTERM)
    out, err = one.communicate(timeout=60)
    assert one.returncode == stops.STOPPED, err
    assert not list(there.heartbeats.iterdir())


def killing_a_sampler(one, directory, limit_s: float) -> tuple[str, int]:
    """(stderr of a launcher that ends well, the pid of the first sampler that it started, which is killed)."""
    heartbeats, killed = directory / "samplers" / "heartbeats", 0
    deadline = time.monotonic() + limit_s
    while one.poll() is None and time.monotonic() < deadline:
        if not killed and heartbeats.is_dir() and (names := [path.name for path in heartbeats.iterdir()]):
            killed = int(names[0].split("-")[-2])
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.05)
    _, err = one.communicate(timeout=60)
    assert one.returncode == 0 and killed, err
    return err, killed


@pytest.mark.long
def test_the_launcher_starts_samplers_again_and_ends_them(place, two_behind):  # noqa: F811
    directory = place / "launched"
    one = process("-m", "meshtrain.launch.local", "--processes=1", "--samplers=2", "--",
                  *words(place, "launched", "--rl.lag=2", *FEW))
    err, killed = killing_a_sampler(one, directory, 240)
    assert f"(pid {killed}) was killed by SIGKILL; it is started again in 5 s" in err
    same(directory, two_behind)
    assert not subprocess.run(["pgrep", "-f", f"meshtrain.sample {directory}"], capture_output=True).stdout


@pytest.mark.long
def test_two_trainer_processes_learn_from_the_same_answers(place, two_behind):  # noqa: F811
    directory = place / "two"
    one = process("-m", "meshtrain.launch.local", "--processes=2", "--samplers=1", "--",
                  *words(place, "two", "--rl.lag=2", *FEW))
    out, err = one.communicate(timeout=300)
    assert one.returncode == 0, err
    for batch in range(5):
        assert drawn(directory, batch) == drawn(two_behind, batch)
    for row, other in zip(rows(directory), rows(two_behind), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.long
def test_ray_starts_samplers_again(place, two_behind, monkeypatch):  # noqa: F811
    pytest.importorskip("ray", reason="extra `ray` is not installed")
    directory = place / "ray"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = process("-m", "meshtrain.launch.ray", "--processes=1", "--samplers=1", "--",
                  *words(place, "ray", "--rl.lag=2", *FEW))
    err, killed = killing_a_sampler(one, directory, 400)
    assert "sampler 0 was killed by SIGKILL; it is started again in 5 s" in err
    same(directory, two_behind)
