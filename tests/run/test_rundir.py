"""The directory of a run: claimed by one run alone, on any file system, seen by all processes, and usable after any
kill."""
import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshtrain import files, run_files
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.launch import restart
from meshtrain.run import contents, rundir

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(files, "PAUSES_S", (0.01, 0.01))


def run_in(directory, *more):
    return run_files.load(["--run.dir", str(directory), *more])


def left(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


HOLD = """
import sys
from meshtrain import config, run_files
from meshtrain.run import rundir
run = run_files.load(["--run.dir", sys.argv[1]])
if len(sys.argv) > 2:
    import errno, fcntl, os
    def no_locks(*_):
        raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
    fcntl.flock = no_locks
with rundir.claim(run):
    print("held", flush=True)
    sys.stdin.readline()
print("free", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def another(directory, *more):
    """Another process that holds the directory."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(directory), *map(str, more)], text=True, cwd=ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_second_run_in_the_directory_is_refused_and_told_who_is_there(tmp_path):
    with another(tmp_path / "run") as child:
        with pytest.raises(ConfigError,
                           match=rf"in use by another run \(pid {child.pid} on {socket.gethostname()}, since 20"):
            with rundir.claim(run_in(tmp_path / "run")):
                pass
    with rundir.claim(run_in(tmp_path / "run")) as claim:     # it died without a word
        assert claim.directory == tmp_path / "run"


def without_locks(monkeypatch, code=errno.ENOTSUP):
    def refuse(*_):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, code, capfd):
    without_locks(monkeypatch, code)
    with rundir.claim(run_in(tmp_path / "run")):
        pass
    told = capfd.readouterr().err
    assert "file system without locks" in told and "in use" not in told


def test_without_locks_a_second_run_on_this_host_is_noticed_while_the_first_lives(tmp_path, monkeypatch, capfd):
    without_locks(monkeypatch)
    with another(tmp_path / "run", errno.ENOTSUP) as child:
        for _ in range(2):      # and the refused one has not put itself in its place
            with pytest.raises(ConfigError, match=rf"in use by another run \(pid {child.pid} on"):
                with rundir.claim(run_in(tmp_path / "run")):
                    pass
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "free\n"
        with rundir.claim(run_in(tmp_path / "run")):      # it has left in order, and lives on
            pass
    with another(tmp_path / "killed", errno.ENOTSUP) as child:
        pass
    with rundir.claim(run_in(tmp_path / "killed")):
        pass
    assert f"The last run in it (pid {child.pid} on" in capfd.readouterr().err
    # Another process that has got its number since then is another process.
    owner = {"host": socket.gethostname(), "pid": os.getppid(), "began": "1", "time": 0.0, "nonce": ""}
    (tmp_path / "killed" / ".lock").write_text(json.dumps(owner))
    with rundir.claim(run_in(tmp_path / "killed")):
        pass


def test_a_lock_that_fails_otherwise_is_not_called_in_use(tmp_path, monkeypatch):
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(files.FileSystemError, match="cannot be locked: Input/output error"):
        with rundir.claim(run_in(tmp_path / "run")):
            pass


# ---- what a kill leaves ----------------------------------------------------------------------------------------------


KILLED = """
import os, pathlib, sys
from meshtrain import config, run_files
from meshtrain.run import rundir

def begin(run, kill_at):
    calls = []
    def killing(real):
        def call(*args, **options):
            calls.append(real)
            if len(calls) == kill_at:
                os._exit(9)
            return real(*args, **options)
        return call
    os.fsync, pathlib.Path.replace = killing(os.fsync), killing(pathlib.Path.replace)
    pathlib.Path.write_text = killing(pathlib.Path.write_text)
    with rundir.claim(run) as claim:
        rundir.write_settings(run, claim.directory, "# rules")

for kill_at in range(1, 9):
    run = run_files.load(["--run.dir", f"{sys.argv[1]}/{kill_at}"])
    if os.fork() == 0:      # no backend runs yet
        begin(run, kill_at)
        os._exit(0)
    os.wait()
    print(*sorted(os.listdir(run.run.dir)))
    with rundir.claim(run):
        pass
"""


def test_a_directory_is_usable_after_a_kill_at_any_moment_of_its_first_writes(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[0] == ".lock" and found[-1] == ".lock config.toml rules.toml"
    assert ".lock config.toml.tmp rules.toml" in found and len(found) == 8


def test_what_is_not_ours_is_refused_and_stays(tmp_path):
    for name in ("thesis.txt", "config.toml.tmp"):      # without our lock file that is nobody's leftover
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).write_text("years of work")
        with pytest.raises(ConfigError, match="is not the directory of a run"):
            with rundir.claim(run_in(directory)):
                pass
        assert left(directory) == [name]


@pytest.mark.parametrize("name", ["config.toml", "rules.toml", ".lock", "metrics.jsonl", "checkpoints"])
def test_a_directory_named_as_a_file_of_ours_is_refused_and_a_file_named_checkpoints(name, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "config.toml").touch()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.touch() if name == "checkpoints" else path.mkdir()
    before = left(tmp_path)
    with pytest.raises(ConfigError, match=f"is not the directory of a run: {name} in it is a "):
        with rundir.claim(run_in(tmp_path)):
            pass
    assert left(tmp_path) == before


def with_checkpoints(directory: Path, **metadata: str) -> Path:
    """A run directory without config.toml. metadata: step -> text of its metadata.json."""
    for step, text in metadata.items():
        place = directory / "checkpoints" / step.removeprefix("step")
        place.mkdir(parents=True)
        (place / "metadata.json").write_text(text)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    return directory


def test_checkpoints_with_the_run_file_make_a_run_of_ours_and_config_toml_is_written_anew(tmp_path, capfd):
    text = '[run]\nname = "mine"\n'
    directory = with_checkpoints(tmp_path / "run", step4=json.dumps({"run_file": "older"}),
                                 step12=json.dumps({"run_file": text}), step20='{"torn')
    (directory / "checkpoints/25.damaged").mkdir()
    with pytest.raises(ConfigError, match='already holds a run, and checkpoint.resume="never"'):
        with rundir.claim(run_in(directory, "--checkpoint.resume", "never")):
            pass
    assert left(directory) == ["checkpoints", "metrics.jsonl"]
    with rundir.claim(run_in(directory)):
        assert (directory / "config.toml").read_text() == text
    assert f"{directory} has checkpoints but no config.toml: config.toml is restored" in capfd.readouterr().err
    with rundir.claim(run_in(directory)):
        pass
    assert "written anew" not in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_file"', '"run_file"', "7", '{"run": {}}'])
def test_checkpoints_of_another_program_are_not_ours(text, tmp_path):
    directory = with_checkpoints(tmp_path / "run", step4=text)
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        with rundir.claim(run_in(directory)):
            pass
    assert left(directory) == ["checkpoints", "metrics.jsonl"]


def test_metadata_that_cannot_be_read_for_a_moment_is_not_taken_for_no_run(tmp_path, monkeypatch):
    directory, real = with_checkpoints(tmp_path / "run", step4='{"run_file": ""}'), Path.read_bytes

    def read_bytes(path):
        if path.name == "metadata.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(files.FileSystemError, match="Stale file handle"):
        with rundir.claim(run_in(directory)):
            pass


# ---- one directory for all -------------------------------------------------------------------------------------------


def test_a_process_that_sees_another_directory_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "exchange", lambda mine: [mine, ["b", "No such file or directory", True]])
    with pytest.raises(ConfigError,
                       match=rf"run.dir=.*/run is not one directory for all processes: process 1 on b \(No such "
                       rf"file.* cannot see what process 0 on {socket.gethostname()} wrote there; give a directory "
                       rf"on a file"):
        with rundir.claim(run_in(tmp_path / "run")):
            pass
    assert left(tmp_path) == []


def test_a_process_that_is_refused_a_look_has_met_a_moment_of_the_file_system_and_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "exchange", lambda mine: [mine, ["b", "Stale file handle", False]])
    with pytest.raises(files.FileSystemError,
                       match=r"run.dir=.*/run: process 1 on b \(Stale file handle\) cannot see what process 0 on "
                             r".* check "):
        with rundir.claim(run_in(tmp_path / "run")):
            pass


def test_a_file_that_is_seen_late_is_waited_for(tmp_path, monkeypatch):
    """As an NFS client that still has the directory, or an older file, in its cache."""
    read, seen = Path.read_text, []

    def late(path, *args, **options):
        text = read(path, *args, **options)
        if path.name == ".lock" and len(seen) < 2:
            seen.append(path)
            if len(seen) == 1:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return '{"nonce": "an older one"}'
        return text
    monkeypatch.setattr(Path, "read_text", late)
    with rundir.claim(run_in(tmp_path / "run")):
        assert len(seen) == 2


TWO = """
import os, sys
from meshtrain import config, run_files
from meshtrain import files
from meshtrain.cluster import find, meet
from meshtrain.config import ConfigError
from meshtrain.run import rundir
import jax
jax.config.update("jax_platforms", "cpu")
index = int(sys.argv[1])
meet.start(find.Cluster(sys.argv[2], 2, index), 60, 30)
os.chdir(sys.argv[3 + index])
files.PAUSES_S = (0.01,)
try:
    with rundir.claim(config.Run(run=dict(dir="run"))):
        print("claimed", flush=True)
except ConfigError as error:
    print(error.agreed, error, flush=True)
"""


@pytest.mark.parametrize("shared", [True, False])
def test_two_processes_claim_a_shared_directory_and_refuse_one_that_is_not(tmp_path, shared):
    homes = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    for home in homes:
        home.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    children = [subprocess.Popen([sys.executable, "-c", TWO, str(index), address, *map(str, homes)],
                                 text=True, cwd=ROOT,
                                 env=env | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for index in range(2)]
    said = [child.communicate(timeout=100) for child in children]
    for out, err in said:
        if shared:
            assert out.endswith("claimed\n"), err
        else:
            assert out.splitlines()[-1].startswith("True run.dir=run is not one directory for all processes: process 1 "
                                                   "on "), out + err
    assert left(homes[0]) == (["run"] if shared else []) and (shared or left(homes[1]) == [])


# ---- a lock whose owner may be a host that is lost -------------------------------------------------------------------


@contextlib.contextmanager
def held_by(directory, host):
    """The lock file is held, and names an owner on another host, as after that host's loss of power."""
    directory.mkdir()
    with open(directory / ".lock", "w") as lock:
        lock.write(json.dumps({"host": host, "pid": 5, "began": "1", "time": 0.0, "nonce": "old"}))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def test_a_lock_of_another_host_is_waited_for_and_told(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rundir, "LOOK_S", 0.05)
    with held_by(tmp_path / "run", "node-17") as lock:
        threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with rundir.claim(run_in(tmp_path / "run")) as claim:
            claim.check()
    assert capfd.readouterr().err.count("in use by another run (pid 5 on node-17, since 19") == 1


def test_a_lock_of_another_host_that_does_not_come_free_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "LOOK_S", 0.05)
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.2)
    with held_by(tmp_path / "run", "node-17"):
        with pytest.raises(files.FileSystemError,
                           match=r"in use by another run \(pid 5 on node-17, .*did not release it within 0.2 s"):
            with rundir.claim(run_in(tmp_path / "run")):
                pass
        assert json.loads((tmp_path / "run/.lock").read_text())["nonce"] == "old"


def test_who_lost_its_claim_is_told_and_leaves_the_successors_name(tmp_path):
    with pytest.raises(rundir.LostClaimError, match=r"taken over by another start \(pid 5 on node-17"):
        with rundir.claim(run_in(tmp_path / "run")) as claim:
            claim.check()
            successor = {"host": "node-17", "pid": 5, "began": "1", "time": 0.0, "nonce": "new"}
            (tmp_path / "run/.lock").write_text(json.dumps(successor))
            claim.check()
    assert json.loads((tmp_path / "run/.lock").read_text()) == successor


@pytest.mark.parametrize("code, kind", [(errno.EIO, files.FileSystemError), (errno.ESTALE, files.FileSystemError),
                                        (errno.ENOSPC, files.FileSystemError), (errno.EROFS, ConfigError)])
@pytest.mark.parametrize("where", ["mkdir", "open", "fsync"])
def test_what_refuses_the_claim_is_a_mistake_or_a_moment(tmp_path, monkeypatch, code, kind, where):
    real, calls = {"mkdir": Path.mkdir, "open": open, "fsync": os.fsync}[where], []

    def refuse(*args, **options):
        if where == "open" and not str(args[0]).endswith(".lock"):
            return real(*args, **options)
        calls.append(args)
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(*{"mkdir": (Path, "mkdir"), "open": ("builtins.open",), "fsync": (os, "fsync")}[where], refuse)
    with pytest.raises(kind, match=f"run.dir=.*/run cannot be written: {os.strerror(code)}"):
        with rundir.claim(run_in(tmp_path / "run")):
            pass
    assert len(calls) == (1 if kind is ConfigError else 3)


def test_every_name_that_a_start_leaves_is_in_the_table(tmp_path):
    from meshtrain.data import sources
    from meshtrain.checkpoint import local
    from meshtrain.journal import history
    from meshtrain.run import dpo_reference
    assert {history.HISTORY, contents.ALIVE, contents.STACKS, sources.CACHE,
            dpo_reference.FILE} <= contents.BEFORE_THE_FIRST_STEP
    assert (restart.LINEAGE, restart.INDEX) == (local.LINEAGE, local.INDEX)
    for name in (".lock", "reference.npy", "reference.npy.17.tmp", "rules.toml", "history.jsonl",
                 ".alive.tmp", ".nfs0001"):
        (tmp_path / name).touch()
    with rundir.claim(run_in(tmp_path)):
        pass
