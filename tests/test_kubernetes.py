"""launch/kubernetes.yaml: what it says of hosts, names, ports and codes fits together and our own commands, and the API's schemas.

Nothing here talks to a cluster. The schemas are those of `pip install kubernetes-validate kubeflow-trainer-api`; without them
these tests are skipped.
"""
import re
from pathlib import Path

import pytest
import yaml

from meshtrain import config
from meshtrain.cluster import find
from meshtrain.run import stops

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "launch" / "kubernetes.yaml"
# What the JobSet controller's webhook and the CRD (v1alpha2) take; its Python types have them as strings.
ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts")
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


def arguments(jobset, index: int) -> list[str]:
    """The command line of host `index`, its variables filled in as kubelet and the JobSet controller do."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    name, where = jobset["metadata"]["name"], jobset["spec"]["coordinator"]
    told = {"metadata.annotations['jobset.sigs.k8s.io/coordinator']":
            f"{name}-{where['replicatedJob']}-{where['jobIndex']}-{where['podIndex']}.{name}",
            "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index)}
    values = {entry["name"]: told[entry["valueFrom"]["fieldRef"]["fieldPath"]] for entry in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["command"] + container["args"]]


def test_every_host_gets_a_command_line_of_ours_and_they_are_one_cluster(jobset, parts, monkeypatch):
    monkeypatch.chdir(ROOT)
    hosts = parts[1]["completions"]
    found = []
    for index in range(hosts):
        python, *words = arguments(jobset, index)
        at = words.index("-m")
        assert python == "python" and words[at + 1] == "meshtrain.train" and not any("$" in word for word in words)
        run = config.load(words[at + 2:])
        found.append(find.cluster(run.distributed, {}))
    assert [one.index for one in found] == list(range(hosts)) and {one.count for one in found} == {hosts}
    assert {one.host for one in found} == {"meshtrain-host-0-0.meshtrain"} and {one.local_devices for one in found} == {None}
    gpus = parts[3]["resources"]["limits"]["nvidia.com/gpu"]
    assert config.mesh_sizes(run, hosts * gpus)
    assert run.run.dir.startswith(tuple(mount["mountPath"] for mount in parts[3]["volumeMounts"])), "where all hosts can write"


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
    assert policy["maxRestarts"] > 0 and policy["restartStrategy"] in STRATEGIES
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet" in ACTIONS and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert set(rule["onJobFailureReasons"]) <= set(REASONS) and re.fullmatch(RULE_NAME, rule["name"])


def test_every_mount_has_its_volume_and_shared_memory_is_in_memory(parts):
    _, _, pod, container = parts
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and len(mounts) == len(volumes)


def test_the_comments_at_its_top_name_commands_for_these_labels(jobset):
    first, second = PATH.read_text().splitlines()[:2]
    assert first == "# kubectl apply -f launch/kubernetes.yaml"
    assert f"jobset.sigs.k8s.io/jobset-name={jobset['metadata']['name']},batch.kubernetes.io/job-completion-index=0" in second


def test_the_job_is_sound_by_kubernetes_strict_schema(jobset):
    validate = pytest.importorskip("kubernetes_validate")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "meshtrain-host-0"}, "spec": replicated["template"]["spec"]}
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
        return [place for i, (one, other) in enumerate(zip(manifest, kept, strict=True)) for place in lost(one, other, f"{at}[{i}]")]
    return [] if manifest == kept else [at]


def test_the_jobset_is_sound_by_its_types_and_has_no_key_that_they_lack(jobset):
    types = pytest.importorskip("kubeflow_trainer_api.models")

    def kept(manifest):
        return types.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    assert lost(jobset, kept(jobset)) == []
    wrong = {**jobset, "spec": {**jobset["spec"], "failurePolicy": {"maxRestart": 3}}}
    assert lost(wrong, kept(wrong)) == [".spec.failurePolicy.maxRestart"]
