"""Copies of local checkpoints on another host, so that a lost host costs no more than a lost process.

Each process has a partner, the one in its place on the next host, and sends it its files over the network (TCP), in the
background. A process whose host was replaced fetches its files from whoever holds them. Who connects shows a secret
that only the processes of this start have. Source: Gemini's in-memory checkpoints (SOSP 2023). This module knows no
array and no run.
"""
from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain import files
from meshtrain.run import say

SILENCE_S = 30.0        # of the other side, after which a transfer is given up
PAUSE_S = 1.0           # after an answer that could not begin
SECRET_BYTES = 32
LENGTH = struct.Struct(">Q")
MOST_HEADER_BYTES = 1 << 16
MOST_ADDRESSES = 16     # of one host


class TransferError(OSError):
    """Files could not be sent or fetched. The message says to or from where, and why."""


def host_of(directory: Path) -> list:
    """Equal in processes that see the same directory of the same host."""
    found = os.stat(directory)
    return [socket.gethostname(), found.st_dev, found.st_ino]


def partner_of(hosts: Sequence[list], index: int) -> int | None:
    """The process that keeps the files of process `index`; None where all are on one host. hosts: of each process."""
    distinct = list(dict.fromkeys(map(tuple, hosts)))
    if len(distinct) < 2:
        return None
    of = {host: [number for number, one in enumerate(hosts) if tuple(one) == host] for host in distinct}
    own = tuple(hosts[index])
    after = of[distinct[(distinct.index(own) + 1) % len(distinct)]]
    return after[of[own].index(index) % len(after)]


def own_addresses(first: str = "") -> list[str]:
    """Addresses by which other hosts may reach this one, the likeliest first: that of the interface which leads to the
    host `first`, of process 0; of the default route; of all other interfaces. Those of loopback only where there is no
    other: Debian gives a host's own name 127.0.1.1."""
    found = [address for host in (first, "192.0.2.1", "2001:db8::1") if host for address in _towards(host)]
    found += _of_interfaces()
    # IPv6's link-local addresses mean nothing without an interface of the other host's.
    usable = [address for address in dict.fromkeys(found) if not (":" in address and
                                                                  ipaddress.ip_address(address).is_link_local)]
    far = [address for address in usable if not ipaddress.ip_address(address).is_loopback]
    return (far or usable or ["127.0.0.1"])[:MOST_ADDRESSES]


def _towards(host: str) -> list[str]:
    """This host's addresses of the interfaces by which it would reach `host`; nothing is sent."""
    found = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found.append(probe.getsockname()[0])
    return found


def _of_interfaces() -> list[str]:
    """The addresses of this host's interfaces, those of IPv4 before those of IPv6. Linux only."""
    found = []
    with contextlib.suppress(OSError):
        found += re.findall(r"-- (\S+)\n.*/32 host LOCAL", Path("/proc/net/fib_trie").read_text(encoding="ascii"))
        found += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
                  for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    return list(dict.fromkeys(found))


class Exchange:
    """Takes and gives files of local checkpoints. place: (process, step) -> the directory of its files on this host.
    names: of the files in it, in the order in which they are written: the last makes it whole. secret: of this start.
    first: the host of process 0. tell: gets each reason why an answer failed, once. at: [address, port] by which others
    reach it.
    """

    def __init__(self, place: Callable[[int, int], Path], names: Sequence[str], secret: str, first: str = "",
                 tell: Callable[[str], None] = say.err):
        self.place, self.names, self.secret, self.tell = place, names, bytes.fromhex(secret), tell
        self._told: set[str] = set()
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        self._listening = socket.create_server(("", 0), **both)
        self.at = [[address, self._listening.getsockname()[1]] for address in own_addresses(first)]
        threading.Thread(target=self._serve, daemon=True, name="partner").start()

    # ---- asking ------------------------------------------------------------------------------------------------------

    def send(self, at: Sequence[list], process: int, step: int) -> None:
        """Sends the files of this host's `process` to where they are kept, too. at: of the other side. Raises:
        TransferError."""
        with self._asked(at, {"does": "keep", "process": process, "step": step}) as link:
            self._send(link, process, step)
            if _exactly(link, 1) != b"\1":
                raise OSError("it could not keep them")

    def fetch(self, at: Sequence[list], process: int, step: int) -> None:
        """Brings the files of `process` to this host. Raises: TransferError."""
        with self._asked(at, {"does": "give", "process": process, "step": step}) as link:
            self._receive(link, process, step)

    @contextlib.contextmanager
    def _asked(self, at: Sequence[list], header: dict):
        reasons = []
        for address, port in at:
            try:
                link = socket.create_connection((address, port), SILENCE_S)
                with link:
                    link.sendall(self.secret + LENGTH.pack(len(text := json.dumps(header).encode())) + text)
                    # of several addresses one may be another host's
                    if not hmac.compare_digest(_exactly(link, SECRET_BYTES), self.secret[::-1]):
                        raise OSError("another process answers there")
                    try:
                        yield link
                    except OSError as error:
                        raise TransferError(f"{address}:{port}: {files.said(error)}") from None
                    return
            except TransferError:
                raise
            except OSError as error:
                reasons.append(f"{address}:{port}: {files.said(error)}")
        raise TransferError("; ".join(reasons))

    # ---- answering ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._listening.fileno() >= 0:
            with contextlib.ExitStack() as refused:
                try:
                    link, _ = self._listening.accept()
                    refused.callback(link.close)
                    threading.Thread(target=self._answer, args=(link,), daemon=True, name="partner").start()
                    refused.pop_all()
                except Exception as error:      # too many files or threads are open
                    self._report(error)
                    time.sleep(PAUSE_S)

    def _answer(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(SILENCE_S)
                if not hmac.compare_digest(_exactly(link, SECRET_BYTES), self.secret):
                    return
                (size,) = LENGTH.unpack(_exactly(link, LENGTH.size))
                if size > MOST_HEADER_BYTES:
                    return
                asked = json.loads(_exactly(link, size))
                process, step = int(asked["process"]), int(asked["step"])
                link.sendall(self.secret[::-1])
                if asked["does"] == "keep":
                    self._receive(link, process, step)
                    link.sendall(b"\1")
                else:
                    self._send(link, process, step)
        except (ConnectionError, TimeoutError):     # the other side tells it, or is a stranger
            pass
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Tell a reason once; none after `close`."""
        if (reason := files.said(error)) not in self._told and self._listening.fileno() >= 0:
            self._told.add(reason)
            self.tell(f"a copy of a local checkpoint is not exchanged with another host: {reason}; training continues")

    def _send(self, link: socket.socket, process: int, step: int) -> None:
        for name in self.names:
            with open(self.place(process, step) / name, "rb") as file:
                link.sendall(LENGTH.pack(os.fstat(file.fileno()).st_size))
                link.sendfile(file)

    def _receive(self, link: socket.socket, process: int, step: int) -> None:
        place = self.place(process, step)
        made = place.with_name(f".coming-{step}-{secrets.token_hex(4)}")
        made.mkdir(parents=True)
        try:
            buffer = memoryview(bytearray(files.CHUNK_BYTES))
            for name in self.names:
                (left,) = LENGTH.unpack(_exactly(link, LENGTH.size))
                with open(made / name, "wb") as file:
                    while left:
                        count = link.recv_into(buffer[:min(left, len(buffer))])
                        if not count:
                            raise ConnectionError("the connection ended early")
                        left -= file.write(buffer[:count])
            files.remove(place)
            made.rename(place)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def close(self) -> None:
        self._listening.close()


def _exactly(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = link.recv(count - len(found))
        if not more:
            raise ConnectionError("the connection ended early")
        found += more
    return found
