"""Copies local checkpoints to another host, so that a lost host costs no more than a lost process.

Each process has a partner: the process at the same position on the next host. A process sends its files to its partner
over TCP, in the background. A process whose host was replaced fetches its files from the process that holds them. A
client sends a secret that only the processes of this start know. Source: Gemini's in-memory checkpoints (SOSP 2023).
This module knows no array and no run.
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

SILENCE_S = 30.0        # a transfer fails after this long without data from the other side
PAUSE_S = 1.0           # pause after an error, before the next connection is accepted
SECRET_BYTES = 32
LENGTH = struct.Struct(">Q")
MOST_HEADER_BYTES = 1 << 16
MOST_ADDRESSES = 16     # tried for one host


class TransferError(OSError):
    """Files could not be sent or fetched. The message has the address and the reason."""


def host_of(directory: Path) -> list:
    """Return [host name, device, inode] of a directory, equal in processes that see the same directory on one host."""
    status = os.stat(directory)
    return [socket.gethostname(), status.st_dev, status.st_ino]


def partner_of(hosts: Sequence[list], index: int) -> int | None:
    """Return which process keeps the files of process `index`; None if all are on one host. hosts: by `host_of`."""
    distinct = list(dict.fromkeys(map(tuple, hosts)))
    if len(distinct) < 2:
        return None
    of = {host: [number for number, host_parts in enumerate(hosts) if tuple(host_parts) == host] for host in distinct}
    own = tuple(hosts[index])
    after = of[distinct[(distinct.index(own) + 1) % len(distinct)]]
    return after[of[own].index(index) % len(after)]


def own_addresses(first: str = "") -> list[str]:
    """Return addresses by which other hosts may reach this one, the likeliest first: the interface that leads to the
    host `first` (of process 0), the interface of the default route, then all others. Loopback addresses are returned
    only if the host has no other address: Debian maps a host's own name to 127.0.1.1."""
    all_addresses = [address for host in (first, "192.0.2.1", "2001:db8::1") if host for address in _towards(host)]
    all_addresses += _of_interfaces()
    # An IPv6 link-local address is of no use without the name of the other host's interface.
    usable = [address for address in dict.fromkeys(all_addresses) if not (":" in address and
                                                                  ipaddress.ip_address(address).is_link_local)]
    far = [address for address in usable if not ipaddress.ip_address(address).is_loopback]
    return (far or usable or ["127.0.0.1"])[:MOST_ADDRESSES]


def _towards(host: str) -> list[str]:
    """Return this host's addresses on the interfaces that lead to `host`. Nothing is sent."""
    addresses = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                addresses.append(probe.getsockname()[0])
    return addresses


def _of_interfaces() -> list[str]:
    """Return the addresses of this host's interfaces, IPv4 before IPv6. Linux only."""
    addresses = []
    with contextlib.suppress(OSError):
        addresses += re.findall(r"-- (\S+)\n.*/32 host LOCAL", Path("/proc/net/fib_trie").read_text(encoding="ascii"))
        addresses += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
                  for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    return list(dict.fromkeys(addresses))


class Exchange:
    """Sends, receives and serves files of local checkpoints.

    place: (process, step) -> the directory of that process's files on this host. names: names of the files in it, in
    the order in which they are written; the directory is complete with the last one. secret: the secret of this start,
    in hexadecimal. first: the host of process 0. tell: receives each reason of a failed transfer once. at: list of
    [address, port] at which this process listens.
    """

    def __init__(self, place: Callable[[int, int], Path], names: Sequence[str], secret: str, first: str = "",
                 tell: Callable[[str], None] = say.err):
        self.place, self.names, self.secret, self.tell = place, names, bytes.fromhex(secret), tell
        self._told: set[str] = set()
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        self._listening = socket.create_server(("", 0), **both)
        self.at = [[address, self._listening.getsockname()[1]] for address in own_addresses(first)]
        threading.Thread(target=self._serve, daemon=True, name="partner").start()

    # ---- client ------------------------------------------------------------------------------------------------------

    def send(self, at: Sequence[list], process: int, step: int) -> None:
        """Send the files of `process` on this host to another process, which keeps a copy. at: the addresses of the
        other process. Raises: TransferError."""
        with self._ask(at, {"does": "keep", "process": process, "step": step}) as link:
            self._send(link, process, step)
            if _exactly(link, 1) != b"\1":
                raise OSError("the other host could not keep the files")

    def fetch(self, at: Sequence[list], process: int, step: int) -> None:
        """Fetch the files of `process`. at: the addresses of the process that has them. Raises: TransferError."""
        with self._ask(at, {"does": "give", "process": process, "step": step}) as link:
            self._receive(link, process, step)

    @contextlib.contextmanager
    def _ask(self, at: Sequence[list], header: dict):
        reasons = []
        for address, port in at:
            try:
                link = socket.create_connection((address, port), SILENCE_S)
                with link:
                    link.sendall(self.secret + LENGTH.pack(len(text := json.dumps(header).encode())) + text)
                    # one of several addresses may belong to another host
                    if not hmac.compare_digest(_exactly(link, SECRET_BYTES), self.secret[::-1]):
                        raise OSError("another process answers there")
                    try:
                        yield link
                    except OSError as error:
                        raise TransferError(f"{address}:{port}: {files.describe(error)}") from None
                    return
            except TransferError:
                raise
            except OSError as error:
                reasons.append(f"{address}:{port}: {files.describe(error)}")
        raise TransferError("; ".join(reasons))

    # ---- server ------------------------------------------------------------------------------------------------------

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
        except (ConnectionError, TimeoutError):     # the other side reports it, or is no process of this run
            pass
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Report a reason once; report nothing after `close`."""
        if (reason := files.describe(error)) not in self._told and self._listening.fileno() >= 0:
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
    received = b""
    while len(received) < count:
        more = link.recv(count - len(received))
        if not more:
            raise ConnectionError("the connection ended early")
        received += more
    return received
