"""Which CPUs a process is bound to, in trees like those of the kernel, and when it is left as it is."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.cluster import numa

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Two sockets of four CPUs; GPUs by PCI address, minors in another order, as on real boards.
GPUS = {"0000:1b:00.0": (1, 0), "0000:43:00.0": (0, 0), "0000:9d:00.0": (3, 1), "0000:c4:00.0": (2, 1)}
CPUS = {0: "0-1,4-5", 1: "2-3,6-7"}
FIRST, SECOND = {0, 1, 4, 5}, {2, 3, 6, 7}


@pytest.fixture
def tree(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    write("sys/devices/system/cpu/online", "0-7\n")
    for number, (address, (minor, node)) in enumerate(GPUS.items()):
        write(f"proc/driver/nvidia/gpus/{address}/information",
              f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\nGPU UUID: \t GPU-{number}abc-def\n"
              f"Video BIOS: \t 96.00\nDevice Minor: \t {minor}\n")
        write(f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
        write(f"sys/bus/pci/devices/{address}/local_cpulist", f"{CPUS[node]}\n")
        write(f"dev/nvidia{minor}", "")
    return tmp_path


@pytest.fixture
def bound(tree, monkeypatch):
    """bind -> the CPUs that all threads were given, or None. allowed: those that the process has."""
    def bind(local_devices=None, allowed=frozenset(range(8)), **environ):
        given = {}
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: given.update({thread: cpus}))
        said = numa.bind(local_devices, environ, tree)
        assert bool(said) == bool(given) and (not given or os.getpid() in given)
        return next(iter(given.values()), None)
    return bind


@pytest.mark.parametrize("local, visible, cpus", [
    ((0,), None, FIRST), ((3,), None, SECOND),         # srun, torchrun: all are visible, and one is its own
    ((2, 3), None, SECOND),                             # two GPUs of one socket each
    (None, "1", FIRST), (None, "2", SECOND),            # launch.local: its own alone are visible
    ((0,), "3,0", SECOND),                              # the first of what the user shows
    (None, "GPU-2abc", SECOND),                         # a UUID, or its beginning, as the kubelet names it
    (None, None, None), ((1, 2), None, None),           # all GPUs of the host, and GPUs of both sockets
    (None, "MIG-2abc", None), (None, "7", None), (None, "", None), ((5,), None, None)])
def test_a_process_gets_the_cpus_of_its_gpus(bound, local, visible, cpus):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert bound(local, **environ) == cpus


@pytest.mark.parametrize("allowed", [{0, 1}, {2, 3, 6, 7}, {0, 1, 2, 3, 4, 5, 6}])
def test_a_binding_of_the_user_slurm_or_the_kubelet_stays(bound, allowed):
    assert bound((0,), allowed=allowed) is None


def test_gpus_of_two_models_are_counted_by_address_only_if_cuda_is_told_to(bound, tree):
    """By default CUDA counts the fastest first, and which one that is nobody knows from here."""
    information = tree / "proc/driver/nvidia/gpus/0000:1b:00.0/information"
    information.write_text(information.read_text().replace("H100 80GB HBM3", "T400"))
    assert bound((3,)) is None
    assert bound((3,), CUDA_DEVICE_ORDER="PCI_BUS_ID") == SECOND
    assert bound(None, CUDA_VISIBLE_DEVICES="GPU-3abc") == SECOND


def test_gpus_that_a_container_does_not_have_are_not_counted(bound, tree):
    """Its first GPU is the third of the host, which /proc lists nevertheless."""
    for minor in (0, 1):
        (tree / f"dev/nvidia{minor}").unlink()
    assert bound((0,)) == SECOND


@pytest.mark.parametrize("path, text", [
    ("sys/bus/pci/devices/0000:1b:00.0/numa_node", "-1\n"), ("sys/devices/system/cpu/online", None),
    ("sys/bus/pci/devices/0000:1b:00.0/local_cpulist", "0-7\n"), ("sys/bus/pci/devices/0000:1b:00.0/numa_node", None),
    ("proc/driver/nvidia/gpus/0000:1b:00.0/information", ""), ("sys/bus/pci/devices/0000:1b:00.0/local_cpulist", "\n")])
def test_a_machine_that_does_not_tell_is_left_alone(bound, tree, path, text):
    (tree / path).unlink() if text is None else (tree / path).write_text(text)
    assert bound((0,)) is None or "information" in path and bound((0,)) == FIRST, "the next GPU counts as the first"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_all_threads_of_the_process_are_bound(tree):
    """Also those that were there before, and those that come."""
    cpus = sorted(os.sched_getaffinity(0))
    (tree / "sys/devices/system/cpu/online").write_text(",".join(map(str, cpus)))
    (tree / "sys/bus/pci/devices/0000:1b:00.0/local_cpulist").write_text(f"{cpus[0]}\n")
    code = ("import os, pathlib, sys, threading\nfrom meshtrain.cluster import numa\nwait = threading.Event()\n"
            "threading.Thread(target=wait.wait).start()\nsaid = numa.bind((0,), {}, pathlib.Path(sys.argv[1]))\n"
            "threading.Thread(target=wait.wait).start()\n"
            "print(said, [os.sched_getaffinity(int(t)) for t in os.listdir('/proc/self/task')])\nwait.set()")
    ran = subprocess.run([sys.executable, "-c", code, str(tree)], env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                         text=True, capture_output=True, timeout=60)
    assert "runs on the 1 CPUs of NUMA node 0" in ran.stdout, ran
    assert ran.stdout.count(f"{{{cpus[0]}}}") >= 3, ran.stdout
