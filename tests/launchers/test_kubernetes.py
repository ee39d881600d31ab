"""launch/kubernetes.yaml: what it says of hosts, names, ports and codes fits together and our own commands, and the
API's schemas.

Its command line is run here with what JobSet tells its pods, start after start. Nothing talks to a cluster. The schemas
are those of `pip install kubernetes-validate kubeflow-trainer-api`; without them these tests are skipped.
"""
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

from meshtrain.launch import pod as pods
from meshtrain.launch import restart, supervise
from meshtrain import config, elastic, run_files
from meshtrain.cluster import find
from meshtrain.cluster.lost import LOST_PEERS
from meshtrain.run import contents, stops

from tests import soak

ROOT = Path(__file__).resolve().parent.parent.parent
PATH = ROOT / "launch" / "kubernetes.yaml"
# What the JobSet controller's webhook and the CRD (v1alpha2) take; its Python types have them as strings.
ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
           "RestartJobAndIgnoreMaxRestarts")
REASONS = ("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
RULE_NAME = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
STRATEGIES = ("Recreate", "BlockingRecreate")
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@pytest.fixture(scope="module")
def jobset() -> dict:
    return yaml.safe_load(PATH.read_text())


@pytest.fixture
def parts(jobset):
    """The JobSet's spec, its Job's, its pod's, and the container."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return jobset["spec"], job, pod, container


def arguments(jobset, index: int, attempt: int = 0) -> list[str]:
    """The command line of host `index` after `attempt` restarts, its variables filled in as kubelet and the JobSet
    controller do."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    name, where = jobset["metadata"]["name"], jobset["spec"]["coordinator"]
    told = {"metadata.annotations['jobset.sigs.k8s.io/coordinator']":
            f"{name}-{where['replicatedJob']}-{where['jobIndex']}-{where['podIndex']}.{name}",
            "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index),
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(attempt)}
    values = {entry["name"]: told[entry["valueFrom"]["fieldRef"]["fieldPath"]] for entry in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word)
            for word in container["command"] + container["args"]]


def test_every_host_gets_a_command_line_of_ours_and_they_are_one_cluster(jobset, parts, monkeypatch):
    monkeypatch.chdir(ROOT)
    hosts = parts[1]["completions"]
    found = []
    for index in range(hosts):
        python, *words = arguments(jobset, index)
        at, ours = words.index("-m"), words.index("--")
        assert python == "python" and words[at + 1] == "meshtrain.launch.pod" and not any("$" in word for word in words)
        assert pods.COMMAND.read(words[at + 2:ours])["attempt"] == 0
        run = run_files.load(words[ours + 1:])
        found.append(find.cluster(run.distributed, {}))
    assert [one.index for one in found] == list(range(hosts)) and {one.count for one in found} == {hosts}
    assert {one.host for one in found} == {"meshtrain-host-0-0.meshtrain"} and {one.local_devices for one in found} == {
        None}
    gpus = parts[3]["resources"]["limits"]["nvidia.com/gpu"]
    assert config.mesh_sizes(run, hosts * gpus)
    assert run.run.dir.startswith(tuple(mount["mountPath"]
                                        for mount in parts[3]["volumeMounts"])), "where all hosts can write"


def test_the_port_of_the_coordinator_is_the_containers(jobset, parts):
    (port,) = {word.rpartition(":")[2] for word in arguments(jobset, 0) if "coordinator_address" in word}
    assert [entry["containerPort"] for entry in parts[3]["ports"]] == [int(port)]


def test_the_first_host_is_the_coordinator_and_has_a_name_before_it_is_ready(jobset, parts):
    spec = parts[0]
    assert spec["coordinator"] == {"replicatedJob": spec["replicatedJobs"][0]["name"], "jobIndex": 0, "podIndex": 0}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    for name in (jobset["metadata"]["name"], "meshtrain-host-0-99999"):
        assert re.fullmatch(DNS_LABEL, name)


def test_a_mistake_fails_the_job_at_once_and_every_other_failure_restarts_all_hosts(parts):
    spec, job, pod, container = parts
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob",
                    "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [stops.USER_ERROR]}}
    assert (job["backoffLimit"], pod["restartPolicy"], job["completionMode"]) == (0, "Never", "Indexed")
    assert job["completions"] == job["parallelism"]
    policy = spec["failurePolicy"]
    assert policy["maxRestarts"] >= 10_000 and policy["restartStrategy"] in STRATEGIES
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet" in ACTIONS and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert set(rule["onJobFailureReasons"]) <= set(REASONS) and re.fullmatch(RULE_NAME, rule["name"])


def test_every_mount_has_its_volume_and_shared_memory_is_in_memory(parts):
    _, _, pod, container = parts
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


def test_the_images_user_may_write_a_cache_that_outlives_a_pod(parts):
    _, _, pod, container = parts
    image = (ROOT / "launch/Dockerfile").read_text()
    uid, home = re.search(r"^RUN useradd --create-home --uid (\d+) (\w+) ", image, re.MULTILINE).groups()
    assert {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {int(uid)}
    assert f"USER {home}\n" in image
    cache = re.search(r"^ENV XDG_CACHE_HOME=(\S+)$", image, re.MULTILINE)[1]
    programs = run_files.load([]).run.compilation_cache.removeprefix("~/")
    assert programs.startswith(".cache/") and f"ln -s {cache} /home/{home}/.cache" in image
    (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == cache)
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert "emptyDir" not in volume and "readOnly" not in mount


def test_the_comments_at_its_top_name_commands_for_these_labels(jobset):
    first, second, *more = PATH.read_text().splitlines()
    assert first == "# kubectl apply -f launch/kubernetes.yaml"
    assert f"jobset.sigs.k8s.io/jobset-name={jobset['metadata']['name']},batch.kubernetes.io/job-completion-index=0" in second


def test_the_command_at_its_top_for_fewer_hosts_changes_all_that_counts_them(jobset, tmp_path):
    command = re.search(r"^#   (sed .*) \| kubectl apply -f -$", PATH.read_text(), re.MULTILINE)[1]
    said = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    fewer = yaml.safe_load(said)
    job = fewer["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (4, 4)
    words = arguments(fewer, 3)
    run = run_files.load(words[words.index("--") + 1:])
    assert find.cluster(run.distributed, {}).count == 4
    assert [line for line in said.splitlines() if line not in PATH.read_text()] != []
    shrunk, told = elastic.fit(run,
                               4 * job["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert shrunk.training.microbatches == 2 * run.training.microbatches and "32 of 64 devices" in told


# ---- the pods' command -----------------------------------------------------------------------------------------------

# Stands for meshtrain.train: as it is told for this start, by the number of starts that there were.
TRAIN = """
import json, os, sys, time
from pathlib import Path
home = Path(os.environ["HOME_OF_THE_TEST"])
index = next((word.rpartition("=")[2] for word in sys.argv if word.startswith("--distributed.process_id=")), "0")
with open(home / f"starts{index}", "a") as file:
    print(time.time(), file=file)
start = len(open(home / f"starts{index}").readlines())
exec(json.loads(os.environ["BODIES"])[int(index)])
"""
# The pod's command itself, but for shorter waits and the program that it starts.
POD = """
import runpy, subprocess, sys
from meshtrain.launch import restart
restart.FIRST_S = {first_s}
real = subprocess.Popen
def stand_in(argv, **options):
    assert argv[1:4] == ["-u", "-m", "meshtrain.train"], argv
    return real([argv[0], "-u", "-c", {train!r}, *argv[4:]], **options)
subprocess.Popen = stand_in
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Pods:
    """Pods of the manifest's command, started like JobSet does: all again, whatever failed, until all are done or one
    ended with 2."""

    def __init__(self, jobset, home: Path, *bodies: str, first_s: float = 0.2):
        self.jobset, self.home, self.count = jobset, home, len(bodies)
        self.code = POD.format(first_s=first_s, train=TRAIN)
        self.environ = os.environ | {"BODIES": json.dumps(bodies), "HOME_OF_THE_TEST": str(home),
                                     "PYTHONPATH": str(ROOT)}
        self.logs: list[list[str]] = []

    def begin(self, index: int, attempt: int) -> subprocess.Popen:
        words = arguments(self.jobset, index, attempt)
        words = [word.replace("--max-restarts=5", "--max-restarts=2")
                 for word in words[words.index("-m") + 1:] if "num_processes" not in word]
        return subprocess.Popen([sys.executable, "-u", "-c", self.code, *words,
                                 f"--distributed.num_processes={self.count}",
                                 f"--run.dir={self.home / 'run'}"], env=self.environ,
                                 cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def attempt(self, number: int) -> list[int]:
        """One start of all: their exit codes."""
        started = [self.begin(index, number) for index in range(self.count)]
        while all(child.poll() is None for child in started):
            time.sleep(0.02)
        if any(child.poll() == stops.USER_ERROR for child in started):      # FailJob: what is left of it is ended
            for child in started:
                child.terminate()
        self.logs.append([child.communicate(timeout=60)[0] for child in started])
        return [child.returncode for child in started]

    def starts(self, index: int = 0) -> list[float]:
        path = self.home / f"starts{index}"
        return [float(line) for line in path.read_text().split()] if path.exists() else []


def test_pods_that_fail_start_again_after_doubled_waits_and_are_given_up_with_the_last_words_of_each(jobset, tmp_path):
    ours = Pods(jobset, tmp_path, "time.sleep(0.3); sys.exit(1)", "sys.exit(f'bad weather {start}')", first_s=1)
    codes, begins = [], []
    for number in range(4):
        codes.append(ours.attempt(number))
        begins.append(restart.read(run_files.load([f"--run.dir={tmp_path / 'run'}"])).get("begins", 0))
    *failed, (judge, other) = codes
    assert failed == [[1, 1]] * 3 and judge == 2, "--max-restarts=2: the third failure is the last"
    assert other in (75, -signal.SIGTERM), "ended by the Job, while it waits or before it can take a signal"
    begun = ours.starts()
    assert len(begun) == 3
    for number in range(1, 3):
        wait_s = 2 ** (number - 1)
        assert f"starting again from the beginning in {wait_s:g} s (failure {number} without" in ours.logs[number][0]
        assert re.search(rf"the previous start ended: process \d .*exit code 1(; its last line: bad weather {number})?\n",
                         ours.logs[number][0])
        assert begun[number] - begun[number - 1] >= wait_s
        assert begun[number] >= begins[number]
        assert ours.starts(1)[number] >= begins[number], "not before the wait is over"
    assert "given up after 3 failures in a row without a checkpoint:" in ours.logs[3][0]
    assert len(re.findall(r"^  \d: process [01] \(pid \d+\) failed first, .*exit code 1",
                          ours.logs[3][0], re.MULTILINE)) == 3
    assert "bad weather" in ours.logs[3][0]


def test_a_newer_checkpoint_or_another_jobset_counts_anew(jobset, tmp_path):
    ours = Pods(jobset, tmp_path, "os.makedirs(home / 'run' / 'checkpoints' / str(start)); sys.exit(1)", first_s=0.05)
    assert [ours.attempt(number) for number in range(3)] == [[1]] * 3
    assert all(f"starting again from step {step}\n" in log for step, (log,) in enumerate(ours.logs[1:], 1))
    assert ours.attempt(0) == [1] and "starting again" not in ours.logs[-1][0]
    assert restart.read(run_files.load([f"--run.dir={tmp_path / 'run'}"])) == {}


def test_a_drained_host_is_no_failure_where_all_is_saved(jobset, tmp_path):
    ours = Pods(jobset, tmp_path, "os.makedirs(home / 'run' / 'checkpoints' / str(start)); sys.exit(75)", first_s=30)
    assert [ours.attempt(number) for number in range(2)] == [[75]] * 2
    assert all("the previous start ended: stopped on request" in log and "starting again" not in log
               for log, in ours.logs[1:])


def test_what_pods_leave_that_never_met_is_no_strangers(tmp_path):
    """Without a lock file: no process has come to claim the directory."""
    for name in (pods.LAST_WORDS, restart.KEPT, f"{restart.KEPT}.tmp"):
        (tmp_path / name).touch()
    assert contents.are_left_by_starts(set(os.listdir(tmp_path)), False)
    (tmp_path / "thesis.txt").touch()
    assert not contents.are_left_by_starts(set(os.listdir(tmp_path)), False)


def test_processes_of_a_start_are_told_which_one_it_is(jobset, tmp_path):
    """By it those of an older start, late, are strangers to those of this one."""
    ours = Pods(jobset, tmp_path, *["print('start', os.environ['MESHTRAIN_START']); sys.exit(start == 1)"] * 2)
    ours.attempt(0), ours.attempt(1)
    assert [[re.findall("^start (.*)$", log, re.M) for log in logs] for logs in ours.logs] == [[["0"]] * 2, [["1"]] * 2]


@pytest.mark.parametrize("code", [0, 2])
def test_the_code_of_a_run_that_is_over_is_the_pods(code, jobset, tmp_path):
    assert Pods(jobset, tmp_path, f"sys.exit({code})").attempt(0) == [code]


def test_a_pod_that_was_killed_leaves_no_word_and_its_victims_are_not_blamed(jobset, tmp_path):
    victim = f"print({LOST_PEERS.decode()!r}, file=sys.stderr); sys.exit(1)"
    ours = Pods(jobset, tmp_path, f"if start == 1: {victim}", "if start == 1: time.sleep(1000)", first_s=0.05)
    first, second = ours.begin(0, 0), ours.begin(1, 0)
    while not ours.starts(1):
        assert second.poll() is None
        time.sleep(0.05)
    second.kill()
    assert (first.wait(60), second.wait(60)) == (1, -signal.SIGKILL)
    assert ours.attempt(1) == [0, 0]
    assert "the previous start ended: no process failed by itself: a pod was killed, or its host is lost\n" in ours.logs[-1][0]


def test_a_process_that_was_stopped_and_killed_for_it_is_no_victim(capfd):
    child = supervise.Child(0, types.SimpleNamespace(pid=7), -1, called="process 3",
                            code=-signal.SIGKILL, forced=True, stopped=True)
    outcome = supervise.conclude([child])
    assert not outcome.secondary and outcome.words.startswith("process 3 (pid 7) failed first: it was stopped")


def test_a_pod_that_is_told_to_end_while_it_waits_ends_at_once_with_75_and_its_program_is_told_too(jobset, tmp_path):
    ours = Pods(jobset, tmp_path, "if start == 1: sys.exit(1)", first_s=300)
    ours.attempt(0)
    waiting = ours.begin(0, 1)
    assert any("in 300 s" in line for line in waiting.stdout)
    waiting.terminate()
    assert waiting.wait(60) == 75 and len(ours.starts()) == 1
    told = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready'); time.sleep(1000)"
    running = Pods(jobset, tmp_path / "other", told)
    running.home.mkdir()
    child = running.begin(0, 0)
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    assert child.wait(60) == 75


@pytest.mark.long
def test_a_real_run_whose_process_is_killed_in_its_pod_goes_on_when_jobset_has_started_all_again(jobset, tmp_path):
    soak.prepare(tmp_path)
    directory, port = tmp_path / "run", supervise.free_port()
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")} | {
        "PYTHONPATH": str(ROOT)}

    def begin(index: int, attempt: int) -> subprocess.Popen:
        own, given = (part.split() for part in " ".join(arguments(jobset, index, attempt)).split(" -- "))
        told = [word for word in given if word.startswith("--distributed.process_id")]
        return subprocess.Popen([sys.executable, *own[1:], "--", str(tmp_path / "run.toml"),
                                 *told, f"--run.dir={directory}",
                                 f"--distributed.coordinator_address=127.0.0.1:{port}",
                                 "--distributed.num_processes=2"],
                                env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    first = [begin(index, 0) for index in (0, 1)]
    deadline = time.monotonic() + soak.PATIENCE_S
    while not soak.steps(directory):
        assert all(pod.poll() is None for pod in first) and time.monotonic() < deadline
        time.sleep(0.01)
    (trains,) = map(int, Path(f"/proc/{first[1].pid}/task/{first[1].pid}/children").read_text().split())
    os.kill(trains, signal.SIGKILL)
    said = [pod.communicate(timeout=soak.PATIENCE_S)[0] for pod in reversed(first)][::-1]
    assert [pod.returncode for pod in first] == [1, 1], said
    second = [begin(index, 1) for index in (0, 1)]
    said = [pod.communicate(timeout=soak.PATIENCE_S)[0] for pod in second]
    assert [pod.returncode for pod in second] == [0, 0], said
    assert f"the previous start ended: process 1 (pid {trains}) failed first, " in said[0]
    assert "killed by SIGKILL (signal 9)" in said[0]
    assert re.search(r"starting again from step \d+ in 5 s \(failure 1 without a newer checkpoint; given up after 6\)",
                     said[0])
    assert "resuming after step" in said[0]
    assert [row["step"] for row in soak.rows(directory)] == list(range(1, soak.STEPS + 1))


# ---- the API ---------------------------------------------------------------------------------------------------------


def test_the_job_is_sound_by_kubernetes_strict_schema(jobset):
    validate = pytest.importorskip("kubernetes_validate")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "meshtrain-host-0"},
           "spec": replicated["template"]["spec"]}
    version = validate.latest_version()
    validate.validate(job, version, strict=True)
    broken = {**job, "spec": {**job["spec"], "backofLimit": 0}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


def lost(manifest, kept, at="") -> list[str]:
    """The places of a manifest that are not in what its types have kept of it (they also fill in defaults)."""
    if isinstance(manifest, dict) and isinstance(kept, dict):
        return [place for key, value in manifest.items() for place in lost(value, kept.get(key), f"{at}.{key}")]
    if isinstance(manifest, list) and isinstance(kept, list) and len(manifest) == len(kept):
        return [place for i, (one, other) in enumerate(zip(manifest, kept, strict=True))
                for place in lost(one, other, f"{at}[{i}]")]
    return [] if manifest == kept else [at]


def test_the_jobset_is_sound_by_its_types_and_has_no_key_that_they_lack(jobset):
    types = pytest.importorskip("kubeflow_trainer_api.models")

    def kept(manifest):
        return types.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert lost(jobset, kept(jobset)) == []
    wrong = {**jobset, "spec": {**jobset["spec"], "failurePolicy": {"maxRestart": 3}}}
    assert lost(wrong, kept(wrong)) == [".spec.failurePolicy.maxRestart"]
