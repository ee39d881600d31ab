"""Output of commands: a closed reader, a full disk or a closed terminal never ends a run.

A stream that fails once is replaced by /dev/null, also for what Python flushes at exit (otherwise it reports "Exception
ignored … BrokenPipeError" and exits with 120).
"""
from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import traceback

# What C++ reports where a CUDA plugin is installed and no GPU is there, and the header of such lines.
NOISE = re.compile(rb"cudart_stub|absl::InitializeLog\(\)")
# What a terminal obeys; generated text and names in files of others may hold any of it.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WARNING = re.compile(r"W\d{4} [\d:.]+ ")

_answers = None     # where `answer` prints while stdout is kept for it; None: on stdout, with all else
_live = 0   # characters of the unfinished line that stands on the terminal


def out(text: str) -> None:
    """Prints lines on stdout, in place of the live line if there is one."""
    _send(sys.stdout, _over_live(_shown(sys.stdout, text)) + "\n")


def answer(text: str) -> None:
    """Prints the answer of a command: on stdout, also while it is kept for answers."""
    if _answers is None:
        out(text)
    else:
        end_live()
        _send(_answers, _shown(_answers, text) + "\n")


def keep_stdout() -> None:
    """Keep stdout for `answer` from here on: what else is printed, by C++ and child processes too, goes to stderr.

    For `--json`: a program reads an answer or nothing. Raises: OSError where no descriptor is left.
    """
    global _answers
    if _answers is None:
        sys.stdout.flush()
        _answers = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(2, 1)


@contextlib.contextmanager
def kept_stdout(kept: bool = True):
    """Context: keeps Python's stdout for `answer`, of a command that is called in this process. kept: if False, or
    after `keep_stdout`, it does nothing."""
    global _answers
    if not kept or _answers is not None:
        yield
        return
    _answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _answers = None


def err(text: str) -> None:
    """Prints lines on stderr, below the live line if there is one."""
    below = "\n" if _live else ""
    _over_live("")
    _send(sys.stderr, f"{below}{_shown(sys.stderr, text)}\n")


def part(text: str) -> None:
    """Prints text on stdout without ending the line."""
    _send(sys.stdout, _over_live(_shown(sys.stdout, text)))


def live(text: str) -> None:
    """Prints a line on a terminal that the next one replaces, cut to the terminal's width."""
    global _live
    text = text[:max(shutil.get_terminal_size().columns - 1, 20)]
    _send(sys.stdout, "\r" + text.ljust(_live))
    _live = len(text)


def on_terminal(stream=None) -> bool:
    """Whether a stream (None: stdout) is a terminal."""
    with contextlib.suppress(Exception):
        return (stream or sys.stdout).isatty()
    return False


def begin(level: int = 2) -> None:
    """First call of a command, before jax is imported: makes streams safe and silences C++ logs.

    level: the least severity that C++ logs; 1: warnings, for a command that reads them, 2: errors.

    A closed standard stream is opened on /dev/null: else the next file opened, perhaps a checkpoint, would get its
    number and receive C++ logs.
    """
    # read when jax's C++ is loaded; errors are still told
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", str(level))
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)    # takes the lowest free number: this one
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    atexit.register(end)
    threading.excepthook = _tell_end


def _tell_end(ended: threading.ExceptHookArgs) -> None:
    """Tell that a thread has ended by an error, whatever kind of error: the command goes on without it."""
    name = ended.thread.name if ended.thread else "?"
    err(f"warning: the thread {name} has ended: {ended.exc_type.__name__}: {ended.exc_value}\n"
        + "".join(traceback.format_tb(ended.exc_traceback)).rstrip())


# Passes on what comes, line by line. A process, because a thread of this one dies with it: what C++ says before it
# aborts would be lost. Signals are for the command, whose end ends this, too.
_FILTER = """
import os, re, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
    signal.signal(number, signal.SIG_IGN)
noise, warning, kept = re.compile(sys.argv[1].encode()), re.compile(sys.argv[2].encode()), []
for line in sys.stdin.buffer:
    if noise.search(line):
        continue
    if sys.argv[2] and warning.match(line):
        kept.append(line)
        continue
    sys.stderr.buffer.write(line)
    sys.stderr.flush()
try:
    sys.stdout.buffer.writelines(kept)
    sys.stdout.flush()
except BrokenPipeError:
    sys.stderr.buffer.writelines(kept)
    sys.stderr.flush()
os._exit(0)
"""
DRAINED_S = 2.0     # for the filter to end; something that was started meanwhile may hold its input for longer


@contextlib.contextmanager
def without_noise(warnings: list[str] | None = None):
    """Context: drops the lines of NOISE from descriptor 2; all others pass at once, even if C++ aborts.

    Used around loading jax's C++, some of whose messages no environment variable silences. warnings: receives the lines
    that C++ logs as warnings.
    """
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    patterns = [NOISE.pattern.decode(), "" if warnings is None else WARNING.pattern]
    try:
        passing = subprocess.Popen([sys.executable, "-I", "-S", "-c", _FILTER, *patterns], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=kept, start_new_session=True)
    except OSError:     # no room for another process: then with noise
        os.close(kept)
        yield
        return
    end_live()
    os.dup2(passing.stdin.fileno(), 2)
    passing.stdin.close()
    passing.stdin = None        # descriptor 2 is the only one that holds it open
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        with contextlib.suppress(subprocess.TimeoutExpired):
            warned, _ = passing.communicate(timeout=DRAINED_S)
            if warnings is not None:
                warnings += warned.decode(errors="replace").splitlines(keepends=True)


def end_live() -> None:
    """Ends the live line, if there is one."""
    if _live:
        out("")


def end() -> None:
    """Ends a live line and flushes both streams."""
    end_live()
    for stream in (sys.stdout, sys.stderr):
        _send(stream, "")


def _shown(stream, text: str) -> str:
    """The text with control characters escaped on a terminal; files and pipes get every byte."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if on_terminal(stream) else text


def escape(text: str) -> str:
    """A line of what others wrote, with control characters escaped for files and pipes, too: a terminal may be behind.
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _over_live(text: str) -> str:
    """The text as it is to be written where a live line stands."""
    global _live
    was, _live = _live, 0
    if not was:
        return text
    first, *rest = text.split("\n")
    return "\n".join(["\r" + first.ljust(was) if first else "", *rest])


def _send(stream, text: str) -> None:
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:      # a sample of text, and a terminal that is not UTF-8
            stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except BlockingIOError:     # another program made the terminal non-blocking, and it is full: the next line may pass
        pass
    except Exception:   # the stream may be anybody's, a notebook's: whatever it raises is not worth a run
        _give_up(stream)


def _give_up(stream) -> None:
    with contextlib.suppress(Exception):    # without a descriptor: the next line is tried again
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
        stream.flush()      # what had not come through
