"""A process that scores answers: python worker.py REWARD IN OUT MEMORY_BYTES. IN and OUT are descriptors of two pipes.

It reads lines of JSON [prompt, answer, line] and writes lines {"reward", "parts"} or {"failure"}. Its first line is {}
once the function is loaded. Output that the function prints is dropped. It imports only the standard library.

The function runs in a child process. The parent, the supervisor, ends when the child ends. SIGTERM, or the end of the
process that started the supervisor, ends both. The supervisor then kills every process that the function has started:
orphans become its children (PR_SET_CHILD_SUBREAPER), even with a session of their own. It removes the working
directory, which was made for this process.
"""
from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile

FILE_BYTES = 1 << 28        # a function may write this many bytes to one file
MOST_PARTS, MOST_CHARS = 32, 300
LARGEST = 1e15              # largest reward: a float32 holds the sum of squared advantages over a batch
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def load(reward: str):
    """Return the function of "name" (built-in) or "file.py:name". Raises: TypeError if it takes no answer."""
    path, _, name = reward.rpartition(":")
    if not path:
        return getattr(_module("meshtrain_builtin", os.path.join(os.path.dirname(__file__), "builtin.py")), name)
    sys.path[0] = os.path.dirname(path)
    function = getattr(_module("rewards", path), name)
    if not callable(function):
        raise TypeError(f"{name} is not a function: {function!r}")
    with contextlib.suppress(ValueError):       # some functions that are written in C have no signature
        inspect.signature(function).bind("prompt", "answer", {})
    return function


def _module(name: str, path: str):
    loader = importlib.machinery.SourceFileLoader(name, path)       # whatever the file's suffix
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def number(value, name: str) -> float:
    """Return a value of the function as a finite float. name: the value's name in messages. Raises: ValueError."""
    if hasattr(value, "item") and not isinstance(value, (dict, str)):     # a numpy number
        value = value.item()
    if isinstance(value, (int, float)) and LARGEST < abs(value) < math.inf:
        raise ValueError(f"{name} is {repr(value)[:20]}, but the largest allowed value is {LARGEST:g}")
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is not a finite number, but {value!r}"[:MOST_CHARS])
    return float(value)


def score(function, prompt: str, answer: str, line: dict) -> dict:
    try:
        result = function(prompt, answer, line)
        parts = result if isinstance(result, dict) else {"reward": result}
        if "reward" not in parts or len(parts) > MOST_PARTS:
            raise ValueError(f'a dict of rewards must have "reward" and at most {MOST_PARTS - 1} other keys, but has '
                             f'{list(parts)}')
        parts = {_name(name): number(value, _name(name)) for name, value in parts.items()}
        return {"reward": parts.pop("reward"), "parts": parts}
    except BaseException as error:      # SystemExit and KeyboardInterrupt, too
        return {"failure": describe(error)}


def _name(name) -> str:
    """Return a part's name, with lone surrogates replaced, which trackers cannot write."""
    return str(name).encode(errors="replace").decode()[:MOST_CHARS]


def describe(error: BaseException) -> str:
    text = type(error).__name__
    with contextlib.suppress(BaseException):        # its own __str__ may fail
        text = f"{text}: {error}"
    return " ".join(text[:MOST_CHARS].split())


def main(reward: str, source: str, target: str, memory: str) -> None:
    """Run the function's process as its supervisor. End as that process does: with its exit code, or by its signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})      # until there is a child that it can end
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is for the training, which ends this process
    for number in (signal.SIGUSR1, signal.SIGUSR2):     # Slurm may send them to all processes of a step
        signal.signal(number, lambda *_: None)          # not SIG_IGN, which a function's own children would inherit
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    folder, status, stopped = tempfile.mkdtemp(prefix="meshtrain-rewards-"), 0, False
    try:
        if not (child := os.fork()):
            try:
                os.chdir(folder)
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                serve(reward, source, target, memory)
            finally:
                os._exit(0)     # whatever threads a function has left
        ended = 0

        def stop(*_) -> None:
            """End the child. An exception here could interrupt the cleanup below and leave files behind."""
            nonlocal stopped
            stopped = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL) if ended != child else None

        signal.signal(signal.SIGTERM, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for descriptor in (source, target):
            os.close(int(descriptor))       # the reader sees the end of the pipe when the child ends
        while ended != child:
            ended, status = os.wait()
    finally:
        kill_all_children()
        shutil.rmtree(folder, ignore_errors=True)
    if stopped:
        os._exit(1)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def kill_all_children() -> None:
    """Kill the children of this process until it has none. The children of a killed child become its own."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        os.kill(int(pid), signal.SIGKILL)
            os.wait()


def serve(reward: str, source: str, target: str, memory: str) -> None:
    """Load the function, and score the requests until the pipe ends."""
    for limit, value in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_FSIZE, FILE_BYTES),
                         (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    requests, replies = os.fdopen(int(source), "r", encoding="utf-8"), int(target)
    for number_ in (int(source), replies):
        os.set_inheritable(number_, False)

    def tell(reply: dict) -> None:
        data = json.dumps(reply).encode() + b"\n"
        while data:
            data = data[os.write(replies, data):]
    try:
        function = load(reward)
    except BaseException as error:
        tell({"failure": describe(error)})
        return
    tell({})
    for request in requests:
        tell(score(function, *json.loads(request)))


if __name__ == "__main__":
    main(*sys.argv[1:])
