"""Copies on another host: which process keeps whose, and what a stranger or a broken line can do."""
import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshtrain.checkpoint import partner


@pytest.mark.parametrize(("hosts", "partners"), [
    ("aaaa", [None] * 4), ("ab", [1, 0]), ("aabb", [2, 3, 0, 1]), ("abab", [1, 0, 3, 2]), ("aabbcc", [2, 3, 4, 5, 0, 1]),
    ("aaab", [3, 3, 3, 0])])
def test_the_partner_has_the_same_place_on_the_next_host(hosts, partners):
    found = [partner.partner_of([[host, 1, 2] for host in hosts], index) for index in range(len(hosts))]
    assert found == partners and all(hosts[other] != hosts[index] for index, other in enumerate(found) if other is not None)


@pytest.fixture
def two(tmp_path):
    secret = os.urandom(partner.SECRET_BYTES).hex()
    made = [partner.Exchange(lambda process, step, i=i: tmp_path / f"host{i}" / f"process-{process}" / str(step),
                             ("shards", "index.json"), secret) for i in range(2)]
    own = tmp_path / "host0" / "process-0" / "4"
    own.mkdir(parents=True)
    (own / "shards").write_bytes(os.urandom(9_000_000))
    (own / "index.json").write_text("{}")
    yield tmp_path, made
    for one in made:
        one.close()


def contents(place) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_files_are_kept_elsewhere_and_come_back(two):
    home, (zero, one) = two
    zero.send(one.at, 0, 4)
    zero.send(one.at, 0, 4)     # once more is the same
    own, copy = home / "host0" / "process-0" / "4", home / "host1" / "process-0" / "4"
    before = contents(own)
    assert contents(copy) == before and os.listdir(copy.parent) == ["4"]
    for path in own.iterdir():
        path.unlink()
    own.rmdir()
    zero.fetch(one.at, 0, 4)
    assert contents(own) == before
    with pytest.raises(partner.TransferError, match="ended early"):
        zero.fetch(one.at, 0, 5)        # it has none
    assert os.listdir(own.parent) == ["4"]


def test_a_stranger_gets_and_leaves_nothing(two):
    home, (zero, one) = two
    stranger = partner.Exchange(lambda process, step: home / "stranger", ("shards", "index.json"),
                                os.urandom(partner.SECRET_BYTES).hex())
    for act in (lambda: stranger.fetch(zero.at, 0, 4), lambda: zero.send(stranger.at, 0, 4)):
        with pytest.raises(partner.TransferError, match="early|another process|reset"):
            act()
    stranger.close()
    asked = b'{"does": "give", "process": 0, "step": 4}'
    for secret, size in ((os.urandom(partner.SECRET_BYTES), len(asked)), (zero.secret, 1 << 60)):
        with socket.create_connection(tuple(zero.at[-1])) as link:
            link.sendall(secret + partner.LENGTH.pack(size) + asked)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1) == b""
    assert not (home / "stranger").exists() and not (home / "host1").exists()


def test_a_transfer_that_breaks_off_leaves_the_copy_before(two, monkeypatch):
    home, (zero, one) = two
    zero.send(one.at, 0, 4)
    copy = home / "host1" / "process-0" / "4"
    before = contents(copy)
    (home / "host0" / "process-0" / "4" / "index.json").unlink()
    with pytest.raises(OSError, match="index.json"):
        zero.send(one.at, 0, 4)
    for _ in range(200):
        if os.listdir(copy.parent) == ["4"]:
            break
        __import__("time").sleep(0.02)
    assert contents(copy) == before and os.listdir(copy.parent) == ["4"]
    one.close()
    with pytest.raises(partner.TransferError):
        partner.Exchange(zero.place, zero.names, zero.secret.hex()).send([["127.0.0.1", 1]], 0, 4)


@pytest.mark.parametrize("broken", ["answer", "thread", "accept"])
def test_an_exchange_that_fails_here_is_told_once_and_the_next_is_answered(broken, two, monkeypatch):
    home, (zero, one) = two
    told, real = [], {"thread": threading.Thread.start, "accept": one._listening.accept}
    one.tell = told.append
    monkeypatch.setattr(partner, "PAUSE_S", 0.01)
    with monkeypatch.context() as patched:
        if broken == "answer":
            patched.setattr(one, "_receive", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        elif broken == "thread":
            def start(self):
                if self.name == "partner":
                    raise RuntimeError("can't start new thread")
                return real["thread"](self)
            patched.setattr(threading.Thread, "start", start)
        else:
            class Listening:
                fileno = one._listening.fileno

                def accept(self):
                    if len(told) < 1:
                        raise OSError(errno.EMFILE, "Too many open files")
                    return real["accept"]()
            patched.setattr(one, "_listening", Listening())
        for _ in range(2):
            with contextlib.suppress(partner.TransferError):
                zero.send(one.at, 0, 4)
    zero.send(one.at, 0, 4)
    assert contents(home / "host1" / "process-0" / "4") == contents(home / "host0" / "process-0" / "4")
    reason = {"answer": "No space left", "thread": "RuntimeError: can't start new thread", "accept": "Too many open files"}
    assert told == [f"a copy of a local checkpoint is not exchanged with another host: {reason[broken]}; training continues"]


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("towards", "interfaces", "told"), [
    ({"host0": ["10.1.0.5"], "192.0.2.1": ["10.2.0.5"]}, ["127.0.0.1", "10.2.0.5", "10.1.0.5", "::1", "fe80::1", "fd00::5"],
     ["10.1.0.5", "10.2.0.5", "fd00::5"]),
    ({"host0": ["127.0.1.1"]}, ["127.0.0.1", "10.1.0.5", "172.17.0.1"], ["10.1.0.5", "172.17.0.1"]),
    ({"host0": ["fd00::5", "fe80::1%eth0"], "2001:db8::1": ["fd01::5"]}, ["::1"], ["fd00::5", "fd01::5"]),
    ({"host0": ["127.0.0.1"]}, ["127.0.0.1", "::1"], ["127.0.0.1", "::1"]), ({}, [], ["127.0.0.1"])])
def test_the_address_that_leads_to_the_first_host_comes_first_and_loopback_alone_where_nothing_else_is(
        towards, interfaces, told, monkeypatch):
    monkeypatch.setattr(partner, "_towards", lambda host: towards.get(host, []))
    monkeypatch.setattr(partner, "_of_interfaces", lambda: interfaces)
    assert partner.own_addresses("host0") == told


def test_the_addresses_of_interfaces_are_this_hosts():
    found = partner._of_interfaces()
    assert "127.0.0.1" in found
    for address in found:
        if not address.startswith("fe80:"):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
                one.bind((address, 0))


def test_a_host_without_a_default_route_tells_by_what_it_is_reached():
    code = ("import json\nfrom meshtrain.checkpoint import partner\n"
            "print(json.dumps([partner.own_addresses(host) for host in ('', '10.78.0.9', 'fd78::9')]))")
    script = ("ip link set lo up && for i in 7 8; do ip link add a$i type veth peer name b$i && "
              "ip addr add 10.7$i.0.5/24 dev a$i && ip addr add fd7$i::5/64 dev a$i nodad && ip link set a$i up && "
              f"ip link set b$i up; done && exec {sys.executable} -c \"$CODE\"")
    space = ["unshare", "--net"] if os.getuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if not shutil.which("ip") or subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("needs ip and a network namespace")
    ran = subprocess.run([*space, "sh", "-c", script], capture_output=True, text=True, timeout=60,
                         env=os.environ | {"CODE": code, "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)})
    if ran.returncode and "RTNETLINK" in ran.stderr + ran.stdout:
        pytest.skip(f"no interface can be made here: {ran.stderr[-200:]}")
    assert ran.returncode == 0, ran
    alone, fourth, sixth = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(alone) == sorted(fourth) == sorted(sixth) == ["10.77.0.5", "10.78.0.5", "fd77::5", "fd78::5"]
    assert fourth[0] == "10.78.0.5" and sixth[0] == "fd78::5"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_files_are_sent_over_ipv6_too(two):
    home, (zero, one) = two
    zero.send([["::1", 9], ["::1", one.at[0][1]]], 0, 4)
    assert contents(home / "host1" / "process-0" / "4") == contents(home / "host0" / "process-0" / "4")
