"""One rule of restarts in all launchers: what each shipped file of launch/ does after each exit code, and what the rule
does where run.dir does not answer for a moment."""
import errno
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from commands import Ran, call

from meshtrain.launch import local, pod, ray, restart, supervise
from meshtrain import config, files, run_files
from meshtrain.run import stops
from meshtrain.storage import messages, retries

import test_kubernetes
import test_sbatch

ROOT = Path(__file__).resolve().parent.parent.parent
SKYPILOT = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
MOST = 2        # restarts
# Exit code of every start, none of which saves anything -> number of starts. Schedulers start again what they stopped.
STARTS = {0: 1, 1: MOST + 1, 2: 1, 75: MOST + 1, 137: MOST + 1}


# ---- the shipped files -----------------------------------------------------------------------------------------------


def starts_under_slurm(code: int, home: Path, monkeypatch) -> int:
    monkeypatch.chdir(ROOT)
    for count in range(1, 10):
        job = test_sbatch.submitted(home, test_sbatch.ARGUMENTS, code, "configs/quickstart.toml", "--run.dir",
                                    str(home / "run"), MAX_RESTARTS=str(MOST), SLURM_RESTART_COUNT=str(count - 1))
        if "back into the queue" not in job.stdout:
            return count
    return -1


def starts_on_kubernetes(code: int, home: Path, monkeypatch) -> int:
    """JobSet restarts all pods unless one ended with 2, or all with 0."""
    jobset = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())
    pods = test_kubernetes.Pods(jobset, home, f"sys.exit({code})", first_s=0.01)
    for attempt in range(10):
        if pods.attempt(attempt)[0] in (stops.DONE, stops.USER_ERROR):
            break
    return len(pods.starts())


def starts_with_skypilot(code: int, home: Path, monkeypatch) -> int:
    """A managed job: exit codes of recover_on_exit_codes always start it again, others max_restarts_on_errors times."""
    rule = SKYPILOT["resources"]["job_recovery"]
    left = rule["max_restarts_on_errors"]
    for count in range(1, 10):
        ended = skypilot(code, home)
        if ended.returncode == 0 or ended.returncode not in rule["recover_on_exit_codes"] and not left:
            assert ended.returncode == (code if code in (0, 2) else 1), ended
            return count
        left -= ended.returncode not in rule["recover_on_exit_codes"]
    return -1


def skypilot(code: int, home: Path) -> subprocess.CompletedProcess:
    """The script of a host whose run ends with this code. The environment in its directory is used."""
    stand_ins = {".venv/bin/python": f"#!{sys.executable}\n{test_sbatch.RULE}\nsys.exit({code})\n",
                 "sleep": "#!/bin/sh\n"}
    (home / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name, text in stand_ins.items():
        (home / name).write_text(text)
        (home / name).chmod(0o755)
    environ = {"PATH": f"{home}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
               "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": os.environ.get("SKYPILOT_NODE_RANK", "0"),
               "RUN_FILE": str(ROOT / "configs/quickstart.toml"), "RUN_DIR": str(home / "run"),
               "MAX_RESTARTS": str(MOST), "HOME": str(home)}
    return subprocess.run(["bash", "-c", SKYPILOT["run"]], env=environ, cwd=home, capture_output=True, text=True)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (75, 1)])
def test_only_host_0_starts_a_job_of_skypilot_again(code, ends, tmp_path, monkeypatch):
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    assert skypilot(code, tmp_path).returncode == ends


def starts_on_this_machine(code: int, home: Path, monkeypatch) -> int:
    codes = []
    monkeypatch.setattr(supervise, "supervise", lambda *_, **__: codes.append(1) or supervise.LaunchOutcome(code))
    monkeypatch.setattr(restart, "wait", lambda seconds: None)
    local.main(["--processes", "1", "--max-restarts", str(MOST), "--", "--run.dir", str(home / "run")])
    return len(codes)


def starts_on_ray(code: int, home: Path, monkeypatch) -> int:
    class Ray:
        init = shutdown = staticmethod(lambda **options: None)
    codes = []
    monkeypatch.setattr(ray, "ray", Ray)
    monkeypatch.setattr(ray.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(ray.Room, "reserve", lambda room: True)
    monkeypatch.setattr(ray, "life", lambda *_: codes.append(1) or supervise.LaunchOutcome(code))
    monkeypatch.setattr(ray, "_sleep", lambda *_: None)
    ray.main(["--processes", "1", "--max-restarts", str(MOST), "--", "--run.dir", str(home / "run")])
    return len(codes)


@pytest.mark.parametrize("code", STARTS)
@pytest.mark.parametrize("starts", [starts_under_slurm, starts_on_kubernetes, starts_with_skypilot,
                                    starts_on_this_machine, starts_on_ray])
def test_every_launcher_starts_a_run_as_often_as_the_rule_says(starts, code, tmp_path, monkeypatch):
    unscheduled = starts in (starts_on_this_machine, starts_on_ray)
    assert starts(code, tmp_path, monkeypatch) == (1 if unscheduled and code == 75 else STARTS[code])


def test_every_shipped_file_is_one_of_these_and_has_the_rules_number_of_restarts():
    numbers = {path.name: re.findall(r"max.restarts\D{0,4}(\d+)$|MAX_RESTARTS:-?\s*(\d+)", path.read_text(),
                                     re.IGNORECASE | re.MULTILINE) for path in (ROOT / "launch").iterdir()
               if path.suffix in (".yaml", ".sbatch")}
    assert set(numbers) == {"kubernetes.yaml", "skypilot.yaml", "slurm.sbatch"}
    most = str(restart.COMMAND.options["max-restarts"].default)
    for name, found in numbers.items():
        assert most in {number for one in found for number in one}, (name, found)
    assert pod.COMMAND.options["max-restarts"].default == restart.COMMAND.options["max-restarts"].default == 5


# ---- moments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """Nothing can be written to a file any more."""
    def write(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    monkeypatch.setattr(files, "PAUSES_S", (0.01,))
    monkeypatch.setattr(files, "write", write)
    monkeypatch.setattr(restart, "wait", lambda seconds: None)


@pytest.fixture
def dead_bucket(monkeypatch):
    """Nobody answers there."""
    monkeypatch.setattr(retries, "PAUSES_S", (0.01,))
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{supervise.free_port()}", "ACCESS_KEY_ID": "id",
                        "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(restart, "wait", lambda seconds: None)
    return "s3://bucket/run"


@pytest.fixture(params=["dead", "refusing"])
def absent_bucket(request, dead_bucket, monkeypatch):
    """Nobody answers there, or the credentials have expired."""
    if request.param == "refusing":
        def refuse(self):
            self.send_error(403)
        handler = type("Refusing", (http.server.BaseHTTPRequestHandler,), {"log_message": lambda *_: None} | {
            f"do_{method}": refuse for method in ("GET", "PUT", "HEAD", "POST", "DELETE")})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    return dead_bucket, request.param == "dead"


def saved(home: Path, step: int) -> None:
    (home / "checkpoints" / str(step)).mkdir(parents=True)


def in_pod(home: object, attempt: int, monkeypatch, code: int = 0, *words: str) -> Ran:
    monkeypatch.setattr(supervise, "supervise", lambda *_, **__: supervise.LaunchOutcome(code))
    return call(pod.main, "--attempt", attempt, "--max-restarts", 2, "--", "--run.dir", home, *words)


@pytest.mark.parametrize("code", [0, 1])
def test_a_full_disk_does_not_end_a_jobset(code, full_disk, tmp_path, monkeypatch):
    saved(tmp_path, 20)
    ran = in_pod(tmp_path, 1, monkeypatch, code)
    assert ran.code == code and "No space left on device" in ran.err and "starting again from step 20" in ran.err
    assert "The scheduler's count of restarts, 1, is used instead" in ran.err


def test_starts_that_could_not_be_counted_are_failures_once_the_disk_has_room(tmp_path, monkeypatch):
    """By JobSet's count of restarts."""
    monkeypatch.setattr(restart, "wait", lambda seconds: None)
    assert in_pod(tmp_path, 1, monkeypatch, 1).code == 1
    ran = in_pod(tmp_path, 3, monkeypatch, 1)
    assert ran.code == 2 and "given up after 3 failures" in ran.err and f"  2: {restart.UNCOUNTED}\n" in ran.err


@pytest.mark.parametrize(("attempt", "code"), [(0, 1), (1, 0), (2, 0), (3, 1)])
def test_a_bucket_that_is_dead_or_refuses_does_not_end_a_jobset(attempt, code, absent_bucket, monkeypatch):
    """1: JobSet starts all pods again. Up to --max-restarts of its restarts the run itself finds out. A refusal at the
    first start is a mistake."""
    bucket, is_dead = absent_bucket
    ran = in_pod(bucket, attempt, monkeypatch)
    assert ran.code == (code if is_dead or attempt else 2), ran
    assert "the beginning" not in ran.err and "Traceback" not in ran.err
    assert (f"this is restart {attempt} of the scheduler" in ran.err) == (attempt in (1, 2))
    assert ("starting again from the newest checkpoint in" in ran.err) == (attempt in (1, 2))


def test_another_host_waits_for_the_word_while_the_endpoint_is_dead(dead_bucket, monkeypatch):
    monkeypatch.setattr(pod, "LOOK_S", 0.05)
    ran = in_pod(dead_bucket, 1, monkeypatch, 0, "--distributed.timeout_s", "1", "--distributed.process_id", "1",
                 "--distributed.num_processes", "2", "--distributed.coordinator_address", "127.0.0.1:1")
    assert ran.code == 0, ran


def asked(home: object, monkeypatch, restarts: int | None, most: int = 2) -> Ran:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}.items():
        monkeypatch.delenv(name, raising=False) if restarts is None else monkeypatch.setenv(name, value)
    return call(restart.main, 1, "--max-restarts", most, "--", "--run.dir", home)


def test_a_full_disk_does_not_end_a_job_of_slurm_and_is_told_to_other_scripts(full_disk, tmp_path, monkeypatch):
    saved(tmp_path, 20)
    assert [asked(tmp_path, monkeypatch, restarts).code for restarts in (None, 0, 7)] == [1, 0, 0]
    ran = asked(tmp_path, monkeypatch, None)
    assert ran.out == "" and "No space left on device" in ran.err and "is not started again until this is" in ran.err


@pytest.mark.parametrize(("restarts", "code", "out"), [(None, 1, ""), (0, 0, "5\n"), (1, 0, "10\n"), (2, 1, "")])
def test_a_bucket_that_is_dead_or_refuses_does_not_end_a_job_of_slurm_before_its_own_count_does(
        restarts, code, out, absent_bucket, monkeypatch):
    ran = asked(absent_bucket[0], monkeypatch, restarts)
    assert (ran.code, ran.out) == (code, out), ran
    assert "the beginning" not in ran.err


@pytest.mark.parametrize("answers_after", [2, None])
def test_a_scheduler_without_a_count_is_asked_to_wait_for_the_bucket(answers_after, absent_bucket, monkeypatch):
    """SkyPilot's: the waits are those between starts, and as many."""
    waits, real = [], messages.read
    monkeypatch.setattr(restart, "wait", waits.append)
    monkeypatch.setattr(messages, "read", lambda *words: None if len(waits) == answers_after else real(*words))
    monkeypatch.setattr(messages, "write", lambda *words: None)
    monkeypatch.setattr(restart, "newest", lambda run: 0)
    ran = call(restart.main, 1, "--scheduled", "--max-restarts", 3, "--", "--run.dir", absent_bucket[0])
    assert (ran.code, ran.out, waits) == ((0, "5\n", [5, 10]) if answers_after else (1, "", [5, 10, 20])), ran
    assert "; trying again in 5 s" in ran.err and "Traceback" not in ran.err


def test_a_launcher_goes_on_while_the_newest_checkpoint_is_not_known_and_does_not_give_up(
        absent_bucket, monkeypatch, capfd):
    failures = restart.Failures(run_files.load(["--run.dir", absent_bucket[0]]), 2, step=20)
    assert [failures.wait_s(1), failures.wait_s(1)] == [5, 10] and failures.step == 20
    with pytest.raises(files.FileSystemError):
        failures.wait_s(1)
    told = capfd.readouterr().err
    assert told.count("starting again from the newest checkpoint in") == 2 and "given up after 3 failures" not in told


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_directory_that_cannot_be_listed_is_not_step_0(number, tmp_path, monkeypatch):
    saved(tmp_path, 20)
    run = run_files.load(["--run.dir", str(tmp_path)])
    monkeypatch.setattr(files, "PAUSES_S", ())

    def refuse(*_):
        raise OSError(number, "refused")
    monkeypatch.setattr(restart.contents.os, "listdir", refuse)
    kind = config.ConfigError if number == errno.EACCES else files.FileSystemError
    for act in (lambda: restart.newest(run), lambda: pod._remove(run, bool)):
        with pytest.raises(kind, match="refused"):
            act()


def test_a_message_that_cannot_be_read_is_not_a_missing_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PAUSES_S", (0.01,))
    assert messages.read(str(tmp_path), "none") is None and messages.names(str(tmp_path / "x"), "none") == []
    messages.write(str(tmp_path), "some/one", json.dumps(1))
    (tmp_path / "some/one").unlink()
    (tmp_path / "some/one").mkdir()
    with pytest.raises(messages.StorageError, match="cannot be read"):
        messages.read(str(tmp_path), "some/one")
