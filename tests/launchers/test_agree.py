"""What several processes decide together: who looks, who fails, and where all of them stop."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshtrain.commands import train
from meshtrain.cluster import agree, meet

ROOT = Path(__file__).resolve().parent.parent.parent
COUNT = 3
CHILD = '''
import json, sys, time
import jax
from meshtrain.cluster import agree, find, meet
from meshtrain.config import ConfigError
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
address, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
meet.start(find.Cluster(address, count, index), 45, 30)
said = {"devices": len(jax.devices())}

def raised(name, call):
    try:
        said[name] = ["returned", call()]
    except Exception as error:
        said[name] = [type(error).__name__, str(error), agree.first_reports(error)]

def fail(error):
    raise error

calls = []
raised("first", lambda: agree.on_first(lambda: calls.append(1) or {"index": index, "text": "ü" * 5000, "x": 0.1}))
said["calls"] = len(calls)
raised("config", lambda: agree.on_first(lambda: fail(ConfigError("one", "two"))))
raised("value", lambda: agree.on_first(lambda: fail(ValueError("three"))))
raised("other", lambda: agree.on_first(lambda: fail(OSError("four"))))
raised("unfit", lambda: agree.on_first(lambda: object()))
raised("all", lambda: agree.everywhere(lambda: index * 10))
raised("some", lambda: agree.everywhere(lambda: fail(ConfigError("no file")) if index else 0))
raised("value of all", lambda: agree.everywhere(lambda: fail(ValueError("a bug"))))
raised("same fault", lambda: agree.everywhere(lambda: fail(ConfigError("no file"))))
raised("lone", lambda: agree.everywhere(lambda: fail(KeyError("k")) if index == 1 else 0))
raised("same", lambda: agree.same_everywhere("data", "abc"))
raised("differ", lambda: agree.same_everywhere("data", "a\\nsteps = 6\\nb" if index != 1 else "a\\nsteps = 7\\nb"))
agreement, late = agree.StopAgreement(), []
#              on time, one late, all late, far too late, not known, a step later
for lates in [(0, 0, 0), (0, 0, 0.25), (0.5, 0.1, 0.2), (0, 1e6, 0), (None,) * 3, (0, 0, 0), (0, 0, 0)]:
    assert not agreement.ask(False, lates[index])
    late.append(agreement.late)
agreement.ask(index == 1, 0.125 * (index == 2))
assert agreement.ask(False, 0.0) and agreement.late[1] == 0.125
said["late"] = late
agreement = agree.StopAgreement()
for step in range(1, 1000):
    if agreement.ask(index == 2 and step == 20):
        break
said["stopped"] = step
from types import SimpleNamespace as Any
from meshtrain.run import loop, rundir
lost = rundir.LostClaimError("another start has it") if index == 1 else None
stop = loop.Stop(lambda: index == 2, Any(lost=lost))
raised("lost", lambda: [stop.must_stop(), stop.must_stop()])
if index == 2:
    time.sleep(4)       # it does not come
else:
    with agree.wait_at_most(lambda: 2.0):
        raised("missing", lambda: agree.exchange(index))
print("SAID " + json.dumps(said), flush=True)
if index == 1:
    raise RuntimeError("alone")     # the others wait for it in jax's orderly end
'''


@pytest.fixture(scope="module")
def children():
    """Three real processes with two devices each; the second fails when all is said. Their proxy is nowhere: clusters
    set one for downloads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS", "no_grpc_proxy", "no_proxy")}
    environ |= dict.fromkeys(("grpc_proxy", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    children = [subprocess.Popen([sys.executable, "-c", CHILD, address, str(COUNT), str(index)], text=True,
                                 env=environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
                for index in range(COUNT)]
    yield children
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def said(children) -> list[dict]:
    """What the three have found, in their order."""
    lines = [next((line for line in child.stdout if line.startswith("SAID")), None) for child in children]
    assert all(lines), [child.stderr.read() for child in children if child.poll() is not None]
    return [json.loads(line[5:]) for line in lines]


def test_processes_that_met_are_one_jax(said):
    assert [one["devices"] for one in said] == [2 * COUNT] * COUNT


def test_what_the_first_finds_all_know_and_only_it_looks(said):
    assert [one["first"] for one in said] == [["returned", {"index": 0, "text": "ü" * 5000, "x": 0.1}]] * COUNT
    assert [one["calls"] for one in said] == [1, 0, 0]


def test_what_fails_in_the_first_fails_in_all(said):
    for index, one in enumerate(said):
        assert one["config"] == ["ConfigError", "one\ntwo", index != 0]
        assert one["value"] == ["ValueError", "three", index != 0]
        assert one["other"] == (["OSError", "four", False] if index == 0 else
                                ["PeerError", "process 0: OSError: four", True])
        assert one["unfit"][0] == ("TypeError" if index == 0 else "PeerError")


def test_what_fails_in_some_fails_in_all_by_name(said):
    for index, one in enumerate(said):
        assert one["all"] == ["returned", index * 10]
        assert one["some"][:2] == ["PeerError",
                                   "processes 1 and 2: no file"], "what process 0 sees is not there on their hosts alone"
        assert one["same fault"][:2] == ["ConfigError", "no file"]
        assert one["lone"] == (["KeyError", "'k'", True] if index == 1 else
                               ["PeerError", "process 1: KeyError: 'k'", index != 0])
        assert one["value of all"][:2] == (["ValueError", "a bug"] if index == 0 else
                                           ["PeerError", "ValueError: a bug"])


def test_what_differs_is_told_with_who_has_which(said):
    for one in said:
        assert one["same"] == ["returned", None]
        assert one["differ"][0] == "ConfigError"
        assert one["differ"][1].startswith(
            "data is not the same in every process (processes 0 and 2: steps = 6; process 1: steps = 7)")


def test_all_stop_after_the_same_step_when_one_wants_to(said):
    assert [one["stopped"] for one in said] == [21] * COUNT


def test_a_claim_that_one_has_lost_outweighs_a_request_and_stops_all_at_the_same_step(said):
    assert [one["lost"] for one in said] == [
        ["LostClaimError", "run.dir was taken over by another start" if index != 1 else "another start has it",
         index > 0] for index in range(COUNT)]


def test_all_processes_know_who_came_last_and_by_how_much(said):
    for one in said:
        assert one["late"] == [None, [2, 0.0], [2, 0.25], [0, pytest.approx(0.4)], [1, 65.535], None, [2, 0.0]]


def test_who_does_not_come_to_an_agreement_is_named_and_nobody_waits_for_ever(said):
    for one in said[:2]:
        assert one["missing"][:2] == ["PeerError",
                                      "process 2 of 3 did not answer within 2 s; read its output"]


def test_a_process_that_fails_alone_ends_at_once(children, said):
    """jax's own orderly end would wait for the others, who wait for this one."""
    assert children[1].wait(10) == 1 and "RuntimeError: alone" in children[1].stderr.read()


@pytest.mark.parametrize("index", [0, 1])
def test_an_internal_error_that_all_raise_has_its_traceback_in_process_0_alone(index, monkeypatch, capfd):
    def load(argv):
        raise agree.mark_agreed(ValueError("a bug in process 0"))
    monkeypatch.setattr(train.run_files, "load", load)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    if index:
        assert train.main([]) == 1 and capfd.readouterr() == ("", "")
    else:
        with pytest.raises(ValueError, match="a bug in process 0"):
            train.main([])


def test_one_process_decides_alone():
    assert agree.on_first(lambda: (1, 2)) == agree.everywhere(lambda: (1, 2)) == (1, 2)
    with pytest.raises(KeyError):
        agree.on_first(lambda: {}["k"])
    agree.same_everywhere("data", "abc")
    assert agree.StopAgreement().ask(True) and not agree.StopAgreement().ask(False)
    assert not agree.first_reports(ValueError())
    meet.leave(1, ValueError())
