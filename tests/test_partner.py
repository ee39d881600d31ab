"""Copies on another host: which process keeps whose, and what a stranger or a broken line can do."""
import contextlib
import os
import socket

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
