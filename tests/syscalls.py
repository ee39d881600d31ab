"""A child process whose system calls on files are seen, one by one, before the kernel does them, and fail as a test
says.

The kernel itself hands them over (seccomp's user notification, Linux 5.5 and later, without privileges): those of every
thread, of Python as of C++ (orbax writes through tensorstore), of every program that the child turns into. It takes
neither a compiler, as a library that is loaded before libc would, nor ptrace, which containers forbid and which stops
at every system call; and Python's own functions, replaced, would not see what C++ writes. x86-64 and aarch64. This
module knows nothing of meshtrain.
"""
import ctypes
import dataclasses
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# name: (number on x86-64, number on aarch64, what its arguments are: p a path, d the directory that it is relative to,
# f an open file, . anything else). What is done by it: see `Call`.
TABLE = {
    "open": (2, None, "p."), "openat": (257, 56, "dp."), "creat": (85, None, "p"), "mkdir": (83, None, "p"),
    "mkdirat": (258, 34, "dp"),
    "rename": (82, None, "pp"), "renameat": (264, 38, "dpdp"), "renameat2": (316, 276, "dpdp"),
    "link": (86, None, "pp"),
    "linkat": (265, 37, "dpdp"), "symlink": (88, None, ".p"), "symlinkat": (266, 36, ".dp"), "unlink": (87, None, "p"),
    "unlinkat": (263, 35, "dp"), "rmdir": (84, None, "p"), "truncate": (76, 45, "p"),
    "stat": (4, None, "p"), "lstat": (6, None, "p"),
    "newfstatat": (262, 79, "dp"), "statx": (332, 291, "dp"), "access": (21, None, "p"), "faccessat": (269, 48, "dp"),
    "faccessat2": (439, 439, "dp"), "read": (0, 63, "f"), "pread64": (17, 67, "f"), "readv": (19, 65, "f"),
    "write": (1, 64, "f"),
    "pwrite64": (18, 68, "f"), "writev": (20, 66, "f"), "pwritev": (296, 70, "f"), "fsync": (74, 82, "f"),
    "fdatasync": (75, 83, "f"),
    "ftruncate": (77, 46, "f"), "flock": (73, 32, "f"), "getdents64": (217, 61, "f")}
KINDS = {"openat": "open", "mkdirat": "mkdir", "renameat": "rename", "renameat2": "rename",
         "linkat": "link", "symlinkat": "symlink",
         "unlinkat": "unlink", "rmdir": "unlink", "ftruncate": "truncate", "lstat": "stat",
         "newfstatat": "stat", "statx": "stat",
         "access": "stat", "faccessat": "stat", "faccessat2": "stat", "pread64": "read",
         "readv": "read", "pwrite64": "write",
         "writev": "write", "pwritev": "write", "fdatasync": "fsync", "getdents64": "list", "flock": "lock"}
ARM = platform.machine() == "aarch64"
NUMBERS = {entry[ARM]: (name, entry[2]) for name, entry in TABLE.items() if entry[ARM] is not None}
SECCOMP, PRCTL_NO_NEW_PRIVS = 277 if ARM else 317, 38
SET_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 1 << 3, 1 << 5
ALLOW, NOTIFY, CONTINUE = 0x7FFF0000, 0x7FC00000, 1
RECEIVE, SEND = 0xC0502100, 0xC0182101      # ioctls of the listener
AT_FDCWD, PAGE = -100, 4096


@dataclasses.dataclass(frozen=True)
class Call:
    """A system call that is about to be done. kind: open (to read), create (an open that may make or change a file),
    mkdir, rename, unlink, truncate, write, read, fsync, lock, stat, list, link or symlink. other: the second path of a
    rename or link."""
    kind: str
    path: str
    other: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """code: the exit code, negative for a signal; None: it was killed because it did not end in time. silent_s: the
    longest time in which its output did not grow, to a second."""
    code: int | None
    seconds: float
    silent_s: float


class Silence:
    """The longest time in which a file did not grow, looked at once a second."""

    def __init__(self, path: Path):
        self.path, self.bytes, self.longest_s = path, 0, 0.0
        self.grown = self.looked = time.monotonic()

    def look(self, now: float) -> None:
        self.looked = now
        if (size := os.stat(self.path).st_size if self.path.exists() else 0) != self.bytes:
            self.bytes, self.grown = size, now
        self.longest_s = max(self.longest_s, now - self.grown)


def run(body: Callable[[], int] | list[str], log: Path, decide: Callable[[Call], int],
        limit_s: float = 120.0, **options) -> Ended:
    """Runs a forked child to its end, whose output goes to `log`.

    body: a function whose value is the exit code, or a command (options: environ, cwd). decide: asked before each call;
    returns 0: it is done; an errno: it fails with that; minus a signal's number: the child gets that, then the call is
    done.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush(), sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if not child:
        _child(body, log, ours, theirs, **options)
    theirs.close()
    _, (listener, *_), _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    silence = Silence(log)
    try:
        in_time = _serve(listener, child, decide, began + limit_s, silence)
    finally:
        os.close(listener)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    silence.look(ended := time.monotonic())
    return Ended(os.waitstatus_to_exitcode(status) if in_time else None, ended - began, silence.longest_s)


def _child(body, log: Path, ours: socket.socket, theirs: socket.socket, environ=None, cwd=None) -> None:
    code = 1
    try:
        ours.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1), os.dup2(output, 2)
        listener = _install()
        socket.send_fds(theirs, [b"x"], [listener])
        os.close(listener), theirs.close()
        if callable(body):
            code = body()
        else:
            os.chdir(cwd or ".")
            os.execvpe(body[0], body, environ or os.environ)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _install() -> int:
    """From now on the calls of this thread, and of all that it starts, are handed over; the descriptor to receive them
    by."""
    load, equal, ret = 0x20, 0x15, 0x06
    numbers = sorted(NUMBERS)
    program = [(load, 0, 0, 0)]
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(ret, 0, 0, ALLOW), (ret, 0, 0, NOTIFY)]
    code = b"".join(struct.pack("HBBI", *one) for one in program)
    held = ctypes.create_string_buffer(code, len(code))
    wanted = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PRCTL_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    for flags in (NEW_LISTENER | WAIT_KILLABLE, NEW_LISTENER):      # the second before Linux 5.19
        listener = libc.syscall(SECCOMP, SET_FILTER, flags, wanted)
        if listener >= 0:
            return listener
    raise OSError(ctypes.get_errno(), "seccomp: no user notification; Linux 5.5 has it, and containers must allow it")


def _serve(listener: int, child: int, decide: Callable[[Call], int], deadline: float, silence: Silence) -> bool:
    """Answers until nobody is left who could ask; False: the deadline came first."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while (left_s := deadline - (now := time.monotonic())) > 0:
        if now - silence.looked >= 1.0:
            silence.look(now)
        events = poll.poll(min(left_s, 1.0) * 1000)
        if not events:
            continue
        if not events[0][1] & select.POLLIN:
            return True     # POLLHUP
        asked = bytearray(80)
        try:
            fcntl.ioctl(listener, RECEIVE, asked)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):      # it was killed meanwhile
                continue
            raise
        number, thread, *_ = struct.unpack_from("QIIiIQ", asked)
        answer = 0
        if call := _read(thread, struct.unpack_from("i", asked, 16)[0], struct.unpack_from("6Q", asked, 32)):
            answer = decide(call)
        if answer < 0:
            os.kill(child, -answer)
        reply = struct.pack("QqiI", number, 0, -max(answer, 0), 0 if answer > 0 else CONTINUE)
        try:
            fcntl.ioctl(listener, SEND, bytearray(reply))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
    return False


def _read(thread: int, number: int, args: tuple[int, ...]) -> Call | None:
    """What is asked for; None where the thread, or the file, is gone."""
    name, form = NUMBERS[number]
    kind, paths, directory = KINDS.get(name, name), [], ""
    try:
        for letter, value in zip(form, args):
            if letter == "f":
                paths.append(os.readlink(f"/proc/{thread}/fd/{value & 0xFFFFFFFF}"))
            elif letter == "d":
                signed = ctypes.c_int(value & 0xFFFFFFFF).value
                directory = os.readlink(f"/proc/{thread}/{'cwd' if signed == AT_FDCWD else f'fd/{signed}'}")
            elif letter == "p":
                path = _string(thread, value)
                directory = directory or (os.readlink(f"/proc/{thread}/cwd") if not path.startswith("/") else "")
                paths.append(os.path.normpath(os.path.join(directory, path)))
                directory = ""
    except OSError:
        return None
    if kind == "creat" or kind == "open" and args[form.index(".")] & (
            os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
        kind = "create"
    return Call(kind, *paths)


def _string(thread: int, address: int) -> str:
    found = b""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        while b"\0" not in found:
            found += memory.read(PAGE - memory.tell() % PAGE)
    return os.fsdecode(found.partition(b"\0")[0])


def available() -> str:
    """Why calls cannot be seen here; empty if they can. Asked in a process of its own: a filter is for good."""
    asked = subprocess.run([sys.executable, "-c", "from tests import syscalls; syscalls._install()"],
                           capture_output=True, text=True,
                           cwd=Path(__file__).resolve().parent.parent)
    return "" if asked.returncode == 0 else asked.stderr.strip().rpartition("\n")[2]
