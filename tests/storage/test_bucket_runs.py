"""Runs whose directory is in a bucket: the same curve as in a directory, from an empty machine, whatever ended the start
before."""
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import test_several_processes
from commands import call, home, in_a_directory_of_its_own, ran, refused, rows, tiny  # noqa: F401
from test_storage_runs import with_secrets

from tests import conversations, injected, soak, tiny_run

pytest.importorskip("obstore", reason="buckets need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, Fault, environment as stores_environment, server, surroundings  # noqa: E402, F401

from meshtrain.launch import restart, supervise  # noqa: E402
from meshtrain import config, files, run_files  # noqa: E402
from meshtrain.commands import convert, evaluate, generate, report, train  # noqa: E402
from meshtrain.run import bucket, contents  # noqa: E402
from meshtrain.storage import addresses, buckets, copies, messages, mirror, retries  # noqa: E402

SIX = ("--training.steps", "6", "--checkpoint.every", "2", "--run.sample_tokens", "0")


def kept_rows(address: str) -> list[dict]:
    """Of metrics.jsonl as the bucket has it."""
    text = buckets.read(addresses.parse(f"{address}/metrics.jsonl")).decode()
    return [json.loads(line) for line in text.splitlines()]


def curve(found: list[dict]) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in found]


def keys(address: str) -> list[str]:
    place = addresses.parse(address)
    return sorted(one.address.path.removeprefix(f"{place.path}/") for one in buckets.list_files(place))


def another_machine() -> None:
    """Nothing of earlier starts is left on this host."""
    shutil.rmtree(copies.home(), ignore_errors=True)


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.long)])
def test_a_run_in_a_bucket_has_the_curve_of_one_in_a_directory_and_goes_on_on_another_machine(
        scheme, server, tiny, tmp_path):
    there = f"{scheme}://{BUCKET}/{scheme}/run"
    ran(*tiny, *SIX, "--run.dir", "here")
    ran(*tiny, *SIX, "--run.dir", there, "--training.steps", "4")
    before = kept_rows(there)
    assert curve(before) == curve(rows(tmp_path / "here"))[:4]
    another_machine()
    # the run file that it has written, another mesh
    done = ran(f"{there}/config.toml", "--training.steps", "6", "--mesh.data", "2", "--mesh.fsdp", "4")
    assert "resuming after step 4" in done.out and "mesh.fsdp=4 (was 1)" in done.out and f"written: {there}/" in done.out
    losses = lambda found: [row["loss"] for row in found]
    assert kept_rows(there)[:4] == before
    assert losses(kept_rows(there)) == pytest.approx(losses(rows(tmp_path / "here")), rel=1e-5)
    saved = {name.split("/")[1].partition(".")[0] for name in keys(there) if name.startswith("checkpoints/")}
    assert saved == {"4", "6"} and buckets.read(addresses.parse(f"{there}/.lock")) == b""
    assert {"changes.jsonl", "config.toml", "cost.json", "history.jsonl", "rules.toml"} < set(keys(there))
    assert with_secrets(tmp_path) == [] and not any(b"aws-secret" in buckets.read(addresses.parse(f"{there}/{name}"))
                                                   for name in keys(there))
    another_machine()
    told = call(report.main, there)
    assert told.code == 0 and "step 6 of 6" in told.out and "2 starts" in told.out and "finished" in told.out
    assert json.loads(call(report.main, there, "--json").out)["checkpoints"] == [4, 6]


@pytest.mark.full
def test_code_of_ones_own_is_kept_in_the_bucket_and_its_change_is_told(server, tiny, tmp_path):
    there, code = f"s3://{BUCKET}/own", tmp_path / "mine.py"
    words = (*tiny, *SIX, "--run.dir", there, "--model.activation", "mine.py:reglu", "--data.source", "mine.py:read")
    code.write_text("import jax\ndef reglu(gate, up): return jax.nn.relu(gate) * up\n"
                    "def read(path): return open(path).read().splitlines()\n")
    ran(*words, "--training.steps", "4")
    code.write_text(code.read_text().replace("relu(gate)", "relu(gate + 1)"))
    another_machine()
    done = ran(*words)
    assert "resuming after step 4" in done.out and "from step 5 on: run.code=" in done.out
    changes = map(json.loads, buckets.read(addresses.parse(f"{there}/changes.jsonl")).decode().splitlines())
    (change,) = [row for row in changes if row["key"] == "run.code"]
    assert change["from"] != change["to"]
    kept = [name for name in keys(there) if name.startswith("code/")]
    assert kept == sorted(f"code/{line.split()[1]}/mine.py" for line in (*change["from"], *change["to"]))
    code.unlink()
    another_machine()
    words = ("--prompt", "line", "--max-tokens", "3", "--mesh.simulated_devices", "8", "--mesh.data", "8")
    for step in (4, 6):
        assert call(generate.main, there, "--step", step, *words).code == 0
    scored = call(evaluate.main, there, *words[4:])
    assert scored.code == 0, scored.err


@pytest.mark.long
@pytest.mark.cell
def test_commands_on_a_trained_model_read_a_bucket(server, tiny, tmp_path):
    there = f"s3://{BUCKET}/trained"
    ran(*tiny, *SIX, "--run.dir", "here")
    ran(*tiny, *SIX, "--run.dir", there)
    another_machine()
    words = ("--prompt", "line", "--max-tokens", "6", "--json", "--mesh.simulated_devices", "8", "--mesh.data", "8")
    assert call(generate.main, there, *words).out == call(generate.main, "here", *words).out
    assert call(convert.main, there, "out").code == call(convert.main, "here", "own").code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()
    refused(call(convert.main, there, "other", "--step", "3"), "--step 3", f"{there}/checkpoints has steps 4, 6")
    first = ("--training.steps", "1", "--checkpoint.init_optimizer", "true")
    for source, name in ((there, "from-there"), ("here", "from-here")):
        assert f"weights and optimizer from step 6 of {source}" in ran(
            *tiny, *SIX, *first, "--checkpoint.init_from", source, "--run.dir", name).out
    assert curve(rows(tmp_path / "from-there")) == curve(rows(tmp_path / "from-here"))
    refused(call(train.main, *tiny, "--run.dir", there, "--checkpoint.init_from", there), "is this run's own run.dir")


def test_a_step_to_go_back_to_sets_the_later_ones_aside(server, tiny):
    there = f"s3://{BUCKET}/back"
    ran(*tiny, *SIX, "--run.dir", there, "--checkpoint.keep", "9")
    done = ran(*tiny, *SIX, "--run.dir", there, "--checkpoint.step", "2", "--optimizer.learning_rate", "1e-3")
    assert "later checkpoints are kept as 4.aside, 6.aside" in done.out
    assert contents.steps(there) == [4, 6] and "metrics.aside.jsonl" in keys(there)
    assert {"checkpoints/4", "checkpoints/4.aside", "checkpoints/6", "checkpoints/6.aside"} < set(keys(there))


def exported(address: str) -> dict[str, bytes]:
    return {name: buckets.read(addresses.parse(f"{address}/export/{name}")) for name in keys(f"{address}/export")}


def test_exports_are_model_folders_of_the_bucket(server, tiny, tmp_path, monkeypatch):
    there, words = f"s3://{BUCKET}/exports", ("--checkpoint.export", "every", "--checkpoint.keep", "9")
    ran(*tiny, *SIX, *words, "--run.dir", "here")
    real, failing, left = buckets.create, ["export/4/model"], []

    def create(address, path):
        if failing and failing[0] in address.path:
            left.append(keys(f"{there}/export/4"))
            raise files.FileSystemError("the bucket is full")
        return real(address, path)
    monkeypatch.setattr(buckets, "create", create)
    done = call(train.main, *tiny, *SIX, *words, "--run.dir", there, "--training.steps", "4")
    assert done.code == 1 and "export of step 4 failed: " in done.err and "the bucket is full" in done.err and left
    assert {name.split("/")[0] for name in exported(there)} == {"2"}
    server.put("exports/export/6/model-00001-of-00002.safetensors", b"of a killed start")
    failing.clear()
    another_machine()
    ran(*tiny, *SIX, *words, "--run.dir", there)
    local = {str(path.relative_to(tmp_path / "here/export")): path.read_bytes()
             for path in (tmp_path / "here/export").rglob("*") if path.is_file()}
    assert exported(there) == local and not list(copies.home().rglob("exports/*/*"))
    done = ran(*tiny, *SIX, *words, "--run.dir", there, "--checkpoint.step", "2", "--optimizer.learning_rate", "1e-3")
    assert "exports of later steps are kept as export/4.aside, export/6.aside" in done.out
    kept = exported(there)
    assert {name.split("/")[0] for name in kept} == {"2", "4", "4.aside", "6", "6.aside"}
    assert kept["6.aside/model.safetensors"] == local["6/model.safetensors"] != kept["6/model.safetensors"]
    told = ("--prompt", "line", "--max-tokens", "4", "--json", "--mesh.simulated_devices", "8",
            "--mesh.data", "8", "--data.tokenizer", "bytes")
    assert call(generate.main, f"{there}/export/2", *told).out == call(generate.main, "here/export/2", *told).out != ""


def test_a_model_folder_is_written_into_a_bucket_and_never_over_another(server, tiny, tmp_path, monkeypatch):
    ran(*tiny, *SIX, "--run.dir", "here")
    out = f"s3://{BUCKET}/models/mine"
    assert f"{out}: the weights of step 6 of here" in call(convert.main, "here", out).out
    assert call(convert.main, "here", "out").code == 0
    assert {name: buckets.read(addresses.parse(f"{out}/{name}")) for name in keys(out)} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused(call(convert.main, "here", out), f"{out} exists already and is not overwritten")
    for name in ("hf://owner/name", f"s3://{BUCKET}", "https://host/x"):
        refused(call(convert.main, "here", name), "cannot be written; give a directory, or a folder in a bucket")
    server.put("models/half/model.safetensors", b"of a killed command")
    refused(call(convert.main, "here", f"s3://{BUCKET}/models/half"), "has files but no config.json")
    server.faults += [Fault("models/other/config.json", 10**6, 403)]
    refused(call(convert.main, "here", f"s3://{BUCKET}/models/other"), "models/other/config.json is refused with 403")
    assert keys(f"s3://{BUCKET}/models/other") == []


def test_a_checkpoint_has_its_rows_in_the_bucket(server, tiny, monkeypatch):
    """Whatever ends the run then: a start on another machine cuts rows, and could not make them again."""
    there, seen, real = f"s3://{BUCKET}/rows", {}, buckets.write_if
    monkeypatch.setattr(mirror, "EVERY_S", 60.0)

    def write_if(address, *rest, **keys):
        if "/checkpoints/" in str(address):
            seen[int(str(address).rpartition("/")[2])] = [row["step"] for row in kept_rows(there)]
        return real(address, *rest, **keys)
    monkeypatch.setattr(buckets, "write_if", write_if)
    ran(*tiny, *SIX, "--run.dir", there)
    assert seen.keys() == {2, 4, 6} and all(set(range(1, step)) <= set(rows) for step, rows in seen.items()), seen


def test_a_bucket_that_fails_is_told_and_ends_no_run(server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/failing"
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,) * 2)
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    monkeypatch.setattr(files.notices, "_written_at", {})
    lasts = lambda: any("metrics" in line for line in server.asked("PUT", "failing/metrics"))
    server.faults += [Fault("failing/metrics", 4, 503), Fault("failing/checkpoints/2.", 30, 503),
                      Fault("failing/checkpoints/4.", 1, 500)]
    done = ran(*tiny, *SIX, "--run.dir", there)
    assert "step 2 not saved" in done.err and "503" in done.err and lasts()
    assert done.err.count("the server answers 503 (SlowDown); retrying") == 1      # in a minute
    assert done.err.count("the server answers 500 (SlowDown); retrying") == 1
    assert [row["step"] for row in kept_rows(there)] == [1, 2, 3, 4, 5, 6] and contents.steps(there) == [4, 6]


@pytest.mark.parametrize(("ending", "last"), [("three refused", 8), ("the last two refused", 6), ("the last refused", 4)])
def test_while_a_bucket_takes_no_checkpoint_the_state_is_kept_on_the_host(ending, last, server, tiny):
    """An expired token: the next start, with a new one, goes on from the newest state and not from the bucket's."""
    there, undisturbed = f"s3://{BUCKET}/refusing{last}", f"s3://{BUCKET}/undisturbed{last}"
    words = (*tiny, *SIX[:1], "12", *SIX[2:])
    server.faults += [Fault(f"refusing{last}/checkpoints/{step}.", 10**6, 403) for step in range(4, last + 1, 2)]
    done = call(train.main, *words, "--run.dir", there, *(("--training.steps", str(last)) if last < 8 else ()))
    kept = f"step {last}, which these hosts have in {copies.home()}"
    assert done.code == 1 and kept in done.err and "nothing is saved since step 2" in done.err, done.err
    assert contents.steps(there) == [2]
    server.faults.clear()
    again = ran(*words, "--run.dir", there)
    assert f"resuming after step {last}, kept in {copies.home()}" in again.out, again.out
    ran(*words, "--run.dir", undisturbed)
    assert curve(kept_rows(there)) == curve(kept_rows(undisturbed)) and contents.steps(there)[-1] == 12
    assert [path for path in (copies.home() / "states").rglob("*") if path.is_file()] == []


def test_rows_that_a_bucket_refused_are_sent_by_the_next_start(server, tiny, monkeypatch):
    there, undisturbed = f"s3://{BUCKET}/rows-kept", f"s3://{BUCKET}/rows-undisturbed"
    words = (*tiny, *SIX[:1], "12", *SIX[2:])
    with monkeypatch.context() as patched:
        patched.setattr(mirror, "EVERY_S", 0.05)
        tampering(patched, lambda: [time.sleep(0.5), server.faults.extend(
            Fault(f"rows-kept/{name}", 10**6, 403) for name in ("metrics", "history", "checkpoints"))])
        done = call(train.main, *words, "--run.dir", there)
    step = re.search(r"resumes from step (\d+), which these hosts have", done.err)
    server.faults.clear()
    assert done.code == 1 and step and len(kept_rows(there)) < int(step[1]), done.err
    again = ran(*words, "--run.dir", there)
    assert f"resuming after step {step[1]}, kept in {copies.home()}" in again.out
    assert f"{there} lacks the end of " in again.err and "metrics.jsonl" in again.err
    ran(*words, "--run.dir", undisturbed)
    assert curve(kept_rows(there)) == curve(kept_rows(undisturbed))


def test_a_last_step_that_the_bucket_refused_is_saved_by_the_next_start(server, tiny):
    there, undisturbed = f"s3://{BUCKET}/last-step", f"s3://{BUCKET}/last-step-undisturbed"
    words = (*tiny, *SIX, "--checkpoint.export", "last")
    server.faults += [Fault(f"last-step/checkpoints/{step}.", 10**6, 403) for step in (4, 6)]
    done = call(train.main, *words, "--run.dir", there)
    assert done.code == 1 and f"step 6, which these hosts have in {copies.home()}" in done.err, done.err
    assert call(train.main, *words, "--run.dir", there).code == 1, "it is not finished before the bucket has it"
    server.faults.clear()
    again = ran(*words, "--run.dir", there)
    assert f"resuming after step 6, kept in {copies.home()}" in again.out and "is finished" in again.out
    ran(*words, "--run.dir", undisturbed)
    assert contents.steps(there)[-1] == 6 and curve(kept_rows(there)) == curve(kept_rows(undisturbed))
    assert soak.state(there) == soak.state(undisturbed)
    assert soak.exports(undisturbed).items() <= soak.exports(there).items()
    assert [path for path in (copies.home() / "states").rglob("*") if path.is_file()] == []


def test_a_state_that_another_run_at_the_address_kept_is_not_taken(server, tiny):
    there = f"s3://{BUCKET}/anew"
    server.faults += [Fault("anew/checkpoints/", 10**6, 403)]
    assert call(train.main, *tiny, *SIX, "--run.dir", there).code == 1
    server.faults.clear()
    buckets.remove([one.address for one in buckets.list_files(addresses.parse(there))])
    again = ran(*tiny, *SIX, "--run.dir", there)
    assert "resuming after" not in again.out and contents.steps(there) == [4, 6]
    assert [path for path in (copies.home() / "states").rglob("*") if path.is_file()] == []


def tampering(monkeypatch, act, step: int = 3):
    """Calls act() in the midst of that step's row."""
    from meshtrain.journal.metrics import MetricsWriter
    real = MetricsWriter.write
    monkeypatch.setattr(MetricsWriter, "write", lambda self, row: [real(self, row), row["step"] == step and act()])


@pytest.mark.parametrize("mend", [True, False])
def test_a_cache_that_is_emptied_under_a_run_takes_nothing_from_the_bucket(mend, server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/emptied{mend}"
    monkeypatch.setattr(mirror, "EVERY_S", 0.01)
    before = []

    def empty():
        time.sleep(0.1)
        before.extend(keys(there))
        another_machine()
        time.sleep(0.1)
    tampering(monkeypatch, empty)
    done = call(train.main, *tiny, *SIX, "--run.dir", there)
    assert done.code == 1 and "does not have the end of the files: No such file or directory" in done.err
    assert done.err.count(f" cannot be copied to {there}: ") == 1 and "the files of " in done.err
    assert {name for name in before if not name.startswith("checkpoints/")} <= set(keys(there))
    assert "config.toml" in before and contents.steps(there) == [4, 6]
    monkeypatch.undo()
    for name, value in stores_environment(server, copies.home().parent).items():
        monkeypatch.setenv(name, value)
    if not mend:        # as a version left it that removed what was gone
        gone = [name for name in keys(there) if not name.startswith("checkpoints")]
        buckets.remove([addresses.parse(f"{there}/{name}") for name in gone])
    done = ran(*tiny, *SIX, "--run.dir", there, "--training.steps", "8")
    assert "resuming after step 6" in done.out and contents.steps(there)[-1] == 8
    assert ("has checkpoints but no config.toml: config.toml is restored" in done.err) == (not mend)
    assert [row["step"] for row in kept_rows(there)][-2:] == [7, 8] and "config.toml" in keys(there)


def test_files_of_others_in_the_directory_hold_up_no_checkpoint(server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/others-files"
    place = mirror.directory(there)
    tampering(monkeypatch, lambda: [(place / "wandb").mkdir(), (place / "wandb/a\nb").write_text("x"),
                                    os.mkfifo(place / "wandb/pipe"), (place / "wandb/c").symlink_to("c")])
    done = ran(*tiny, *SIX, "--run.dir", there)
    assert contents.steps(there) == [4, 6] and done.err.count("wandb/a\\nb of ") == 1
    assert "wandb/c of " in done.err        # a link to itself


def test_the_last_send_that_fails_is_exit_code_1(server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/last-send"
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    monkeypatch.setattr(mirror, "EVERY_S", 60.0)
    tampering(monkeypatch, lambda: server.faults.append(Fault("last-send/history.jsonl", 10**6, 503)), step=6)
    done = call(train.main, *tiny, *SIX, "--run.dir", there)
    assert done.code == 1 and contents.steps(there) == [4, 6]
    assert f"error: {there} does not have the end of history.jsonl: " in done.err and "tried again" not in done.err
    server.faults.clear()
    assert "is finished" in ran(*tiny, *SIX, "--run.dir", there).out


@pytest.mark.parametrize("saves", [10**6, 2])
def test_a_start_that_was_taken_over_stops_at_its_next_step(saves, server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/taken{saves}"
    place, seen = addresses.parse(there), {}
    monkeypatch.setattr(mirror, "BEAT_S", 0.02)
    monkeypatch.setattr(mirror, "EVERY_S", 0.02)
    owner = {"host": "node-17", "pid": 5, "began": "1", "time": 0.0, "space": "other", "nonce": "theirs"}
    other = mirror.Lease(place.below(".lock"))

    def take():
        time.sleep(0.5)     # what was saved last is there
        while other._thread is None:
            with contextlib.suppress(mirror.LeaseHeld):     # a beat came between
                other.take(json.dumps(owner), lambda text: True)
        seen.update({name: buckets.read(place.below(name)) for name in keys(there) if name != ".lock"})
        time.sleep(0.3)
    tampering(monkeypatch, take, step=5)
    done = call(train.main, *tiny, *SIX, "--run.dir", there, "--training.steps", "1000", "--checkpoint.every", saves)
    assert done.code == 1 and done.err.count("was taken over by another start (pid 5 on node-17") == 1
    assert "this start stops and writes nothing more" in done.err and "tried again" not in done.err
    assert rows(mirror.directory(there))[-1]["step"] <= 7
    assert {name: buckets.read(place.below(name)) for name in keys(there) if name != ".lock"} == seen
    assert '"end"' not in (mirror.directory(there) / "history.jsonl").read_text()
    assert json.loads(mirror.text_of(buckets.read(place.below(".lock"))))["nonce"] == "theirs"
    other.leave()


@pytest.mark.long
@pytest.mark.cell
def test_a_second_start_is_refused_while_the_first_is_at_work_and_may_go_on_after_it_was_killed(server, tmp_path):
    there = f"s3://{BUCKET}/two"
    (tmp_path / "corpus.txt").write_text("some text\n" * 2000)
    (tmp_path / "run.toml").write_text(tiny_run.text(run__dir=there, checkpoint__every=5,
                                                     data__paths=[str(tmp_path / "corpus.txt")]))
    first = _started(tmp_path / "run.toml")
    _until(lambda: contents.steps(there), first)
    log = json.loads(buckets.read(addresses.parse(f"{there}/.lock")).split(b"\n")[0])
    assert log["pid"] == first.pid
    told = call(report.main, there)
    assert f"at work: pid {first.pid}" in told.out
    second = _started(tmp_path / "run.toml")
    said, _ = second.communicate(timeout=100)
    assert second.returncode == 2 and f"run.dir={there} is in use by another run (pid {first.pid}" in said, said
    first.send_signal(signal.SIGKILL)
    first.wait()
    at = contents.steps(there)[-1]
    again = _started(tmp_path / "run.toml", "--training.steps", at + 3)
    said, _ = again.communicate(timeout=100)
    assert again.returncode == 0 and f"resuming after step {at}" in said and "is in use" not in said, said
    assert "killed" in call(report.main, there).out


def _started(path, *words) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "meshtrain.train", str(path), *map(str, words)],
                            env=test_several_processes.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def _until(true, process: subprocess.Popen) -> None:
    until = time.monotonic() + 100
    while not true():
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.05)


def _hosts(home, port, *words, homes=(0, 1), fault: str = "", environ) -> list[subprocess.Popen]:
    """Two processes that have nothing in common but the bucket; each on the host of that number."""
    started = []
    for index, number in enumerate(homes):
        environ["XDG_CACHE_HOME"] = str(home / f"host{number}")
        place = (f"--distributed.coordinator_address=127.0.0.1:{port}", "--distributed.num_processes=2",
                 f"--distributed.process_id={index}")
        with open(home / f"process{index}.log", "w") as log:
            started.append(injected.started(home, home / "run", ["meshtrain.train"], (*place, *words), fault, log,
                                            environ))
    return started


@pytest.fixture
def ran_on(server, tmp_path):
    """Runs two such processes to their end: what each said."""
    injected.prepare(tmp_path)
    environ = stores_environment(server, tmp_path)

    def ran_on(there, *more, homes=(0, 1), fault="", codes=(0, 0)):
        found = _hosts(tmp_path, supervise.free_port(), "--run.dir", there, "--checkpoint.every", 2, "--training.steps",
                       *more, homes=homes, fault=fault, environ=environ)
        try:
            ended = tuple(child.wait(timeout=100) for child in found)
        finally:
            for child in found:
                child.kill()
        said = [(tmp_path / f"process{i}.log").read_text() for i in range(2)]
        assert ended == codes, said
        return said
    return ran_on


def test_hosts_that_share_only_the_bucket_train_and_go_on(ran_on, server, tmp_path):
    there, export = f"s3://{BUCKET}/hosts", ("--checkpoint.export", "every")
    ran_on(there, 4, *export)
    assert "resuming after step 4" in ran_on(there, 8, *export, homes=(1, 0))[0]
    assert [row["step"] for row in kept_rows(there)] == list(range(1, 9)) and contents.steps(there)[-1] == 8
    assert {name.split("/")[0] for name in exported(there)} == {"2", "4", "6", "8"}
    alone = injected.started(tmp_path, tmp_path / "alone", ["meshtrain.train"], ("--training.steps", 8), "",
                             subprocess.DEVNULL, stores_environment(server, tmp_path))
    assert alone.wait(timeout=100) == 0
    assert [row["loss"] for row in kept_rows(there)] == pytest.approx([row["loss"] for row in rows(tmp_path / "alone")],
                                                                      rel=1e-5)


@pytest.mark.long
def test_hosts_keep_their_parts_of_the_state_while_the_bucket_takes_none(ran_on, server, tmp_path):
    there = f"s3://{BUCKET}/refused"
    server.faults += [Fault(f"refused/checkpoints/{step}.", 10**6, 403) for step in (4, 6, 8)]
    assert "step 8, which these hosts have in" in ran_on(there, 12, codes=(1, 1))[0]
    server.faults.clear()
    assert "resuming after step 8, kept in" in ran_on(there, 12)[0]
    server.faults += [Fault(f"refused/checkpoints/{step}.", 10**6, 403) for step in (14, 16, 18)]
    ran_on(there, 20, codes=(1, 1))
    server.faults.clear()
    # a host that was replaced has no part, and all go on from the bucket
    assert "resuming after step 12" in (said := ran_on(there, 20, homes=(0, 2))[0]) and "is not used" in said
    assert [row["step"] for row in kept_rows(there)] == list(range(1, 21)) and contents.steps(there)[-1] == 20


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_of_hosts_that_share_only_the_bucket_the_one_that_hangs_is_named(victim, ran_on, tmp_path):
    told = ran_on(f"s3://{BUCKET}/hangs{victim}", 100, "--training.step_timeout_s", 6, fault=f"{victim} step:8 sleep",
                  codes=(1, 1))
    assert f"error: the culprit is process {victim}: it hangs in step 8 since" in told[0], told
    left = tmp_path / "host0/meshtrain-files"
    assert [path.name for path in sorted(left.rglob("stacks/process-*.txt"))] == ["process-0.txt", "process-1.txt"]


@pytest.mark.long
def test_what_the_reference_prefers_goes_to_all_hosts_and_only_some_may_have_kept_it(ran_on, tmp_path):
    pairs = [{"prompt": f"{i}?", "chosen": f"{i} yes", "rejected": f"no {i}"} for i in range(23)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ("--training.objective", "dpo", "--data.source", "preferences", "--data.paths",
             json.dumps([str(tmp_path / "pairs.jsonl")]), "--data.tokenizer",
             conversations.folder(tmp_path, "chatml") / "tokenizer.json", "--data.bos_token", "<s>",
             "--model.vocab_size", 1024, "--data.seq_len", 96)
    ran_on(f"s3://{BUCKET}/pairs", 3, *words)
    assert "resuming after step 3" in ran_on(f"s3://{BUCKET}/pairs", 5, *words, homes=(1, 0))[0]
    shutil.rmtree(tmp_path / "host1")
    ran_on(f"s3://{BUCKET}/again", 3, *words)
    assert [kept_rows(f"s3://{BUCKET}/again")[i]["loss"] for i in range(3)] == [
        row["loss"] for row in kept_rows(f"s3://{BUCKET}/pairs")[:3]]


def test_a_lease_whose_host_is_lost_ends_by_itself(server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/lost"
    monkeypatch.setattr(mirror, "LEASE_S", 1.5)
    monkeypatch.setattr(bucket, "LOOK_S", 0.1)
    owner = {"host": "node-17", "pid": 5, "began": "1", "time": 0.0, "space": "other", "nonce": "theirs"}
    buckets.write(addresses.parse(f"{there}/.lock"), f"{json.dumps(owner)}\n1.0".encode())
    done = ran(*tiny, *SIX, "--run.dir", there, "--training.steps", "1")
    assert f"run.dir={there} is in use by another run (pid 5 on node-17" in done.err and "waiting" in done.err


def test_a_run_of_another_host_that_goes_on_giving_signs_is_not_taken(server, tiny, monkeypatch):
    there = f"s3://{BUCKET}/others"
    monkeypatch.setattr(mirror, "BEAT_S", 0.05)
    monkeypatch.setattr(mirror, "LEASE_S", 1.0)
    monkeypatch.setattr(bucket, "LOOK_S", 0.1)
    monkeypatch.setattr(bucket, "ENDING_S", 2.0)
    other = mirror.Lease(addresses.parse(f"{there}/.lock"))
    owner = {"host": "node-17", "pid": 5, "began": "1", "time": 0.0, "space": "other", "nonce": "theirs"}
    other.take(json.dumps(owner), lambda text: False)
    refused_after = time.monotonic()
    done = call(train.main, *tiny, *SIX, "--run.dir", there)
    assert done.code == 2 and "is in use by another run (pid 5 on node-17" in done.err.splitlines()[-1]
    assert time.monotonic() - refused_after > 2.0
    threading.Timer(1.0, other.leave).start()       # it has saved, and ends
    monkeypatch.setattr(bucket, "ENDING_S", 60.0)
    other._done.clear()
    ran(*tiny, *SIX, "--run.dir", there, "--training.steps", "1")


@pytest.mark.parametrize(("there", "before", "words", "parts"), [
    ("strangers", "thesis.txt", (), ("has files but is not the directory of a run", "another run.name")),
    ("own", "", ("--checkpoint.resume", "never"), ("already holds a run", 'resume="auto"')),
    ("new", "", ("--data.seq_len", "40000"), ("data.seq_len",)),
])
def test_a_mistake_leaves_the_bucket_as_it_was(there, before, words, parts, server, tiny):
    address = f"s3://{BUCKET}/mistakes/{there}"
    if there == "own":
        ran(*tiny, *SIX, "--run.dir", address, "--training.steps", "1")
    if before:
        server.put(f"mistakes/{there}/{before}", b"mine")
    kept = [(name, buckets.read(addresses.parse(f"{address}/{name}"))) for name in keys(address)]
    refused(call(train.main, *tiny, "--run.dir", address, *words), *parts)
    assert [(name, buckets.read(addresses.parse(f"{address}/{name}"))) for name in keys(address)] == kept


def test_a_bucket_that_may_not_be_written_is_one_message(server, tiny):
    server.faults += [Fault("refusing", 10**6, 403)]
    refused(call(train.main, *tiny, "--run.dir", f"s3://{BUCKET}/refusing"), "run.dir: ", "403", "AWS_ACCESS_KEY_ID")


@pytest.mark.parametrize("start", ["MESHTRAIN_START", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize(("number", "code"), [("0", 2), ("1", 1)])
def test_credentials_that_are_refused_are_a_mistake_at_the_first_start_alone(
        start, number, code, server, tiny, monkeypatch):
    """At a restart they have expired; the code lets a launcher start again."""
    monkeypatch.setenv(start, number)
    server.faults += [Fault(BUCKET, 10**6, 403)]
    for words in (("--run.dir", f"s3://{BUCKET}/expired"), ("--data.paths", f'["s3://{BUCKET}/expired/*.txt"]'),
                  ("--checkpoint.init_from", f"s3://{BUCKET}/expired")):
        done = call(train.main, *tiny, *words)
        assert done.code == code and "refused with 403" in done.err and "AWS_ACCESS_KEY_ID" in done.err, done.err
        assert f"error: {words[0].removeprefix('--')}: " in done.err and "Traceback" not in done.err


def test_launchers_count_failures_and_leave_words_in_the_bucket(server, tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "PAUSES_S", (0.01,))
    there = f"s3://{BUCKET}/launched"
    run = run_files.load([f"--run.dir={there}"])
    assert restart.newest(run) == 0 and restart.read(run) == {}
    assert restart.count(restart.Failures(run, 2), 1, "a device failed") == restart.FIRST_S
    assert restart.count(restart.Failures(run, 2), 1) == 2 * restart.FIRST_S
    assert restart.read(run)["said"] == ["a device failed", "exit code 1"]
    buckets.write(addresses.parse(f"{there}/checkpoints/4"), b"{}")
    assert restart.newest(run) == 4 and restart.count(restart.Failures(run, 2), 1) == 0
    messages.write(there, "last_words/0-1", "out of memory")
    assert messages.names(there, "last_words") == ["last_words/0-1"]
    assert messages.read(there, "last_words/0-1") == "out of memory" and messages.read(there, "last_words/0-2") is None
    server.faults += [Fault("launched/restarts.json", 10**6, 503)]
    with pytest.raises(files.FileSystemError, match="restarts.json cannot be read: .*503"):
        restart.count(restart.Failures(run, 2), 1)
    server.faults[-1].status = 403
    with pytest.raises(files.FileSystemError, match="restarts.json is refused with 403"):      # they expire
        restart.count(restart.Failures(run, 2), 1)
    with pytest.raises(config.ConfigError, match="checkpoints.* is refused with 403"):
        server.faults.append(Fault(BUCKET, 10**6, 403))
        restart.newest(run)


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "count", "kills"), [("s3", 1, 20), ("s3", 2, 5), ("gs", 1, 20)])
def test_kills_at_any_moment_on_empty_machines_leave_one_curve(scheme, count, kills, server, tmp_path):
    """Each start is killed at a random moment, and the next one knows nothing of it but the bucket: of two, one before
    anything is saved or while it is, and one after it has saved more."""
    there = f"{scheme}://{BUCKET}/{scheme}-killed{count}"
    (tmp_path / "run.toml").write_text(tiny_run.text(
        run__dir=there, checkpoint__every=3, mesh__data=1, mesh__fsdp=2, sharding__rules="sharding_rules/zero3.toml",
        data__paths=[str(tmp_path / "corpus.txt")], run__compilation_cache=str(tmp_path / "programs")))
    (tmp_path / "corpus.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(3000)))
    rng, newest = random.Random(count), lambda: (contents.steps(there) or [0])[-1]
    start = [sys.executable, "-m", *(("meshtrain.train",) if count == 1 else ("meshtrain.launch.local", "--processes=2", "--")),
             str(tmp_path / "run.toml")]

    def began(number: int, *words: str) -> subprocess.Popen:
        environ = test_several_processes.environment() | {"XDG_CACHE_HOME": str(tmp_path / f"machine{number}")}
        with open(tmp_path / "said", "w") as said:
            return subprocess.Popen([*start, *words], env=environ, stdout=said, stderr=said, start_new_session=True)
    for number in range(kills):
        before, run = newest(), began(number)
        until = time.monotonic() + (rng.uniform(0.5, 8) if number % 2 else 100)
        while newest() <= before + 3 and time.monotonic() < until:
            assert run.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 0.5))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        assert newest() > before or number % 2, (tmp_path / "said").read_text()
    steps = newest() + 4
    last = began(kills, "--training.steps", str(steps))
    assert last.wait(timeout=100) == 0, (tmp_path / "said").read_text()
    undisturbed = _started(tmp_path / "run.toml", "--run.dir", tmp_path / "undisturbed", "--training.steps", steps)
    assert undisturbed.wait(timeout=100) == 0
    losses = [row["loss"] for row in rows(tmp_path / "undisturbed")]
    assert [row["loss"] for row in kept_rows(there)] == (losses if count == 1 else pytest.approx(losses, rel=1e-5))
