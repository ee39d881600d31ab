"""Output of commands. A closed pipe, a full disk or a closed terminal never ends a run.

A stream that fails once is replaced by /dev/null, so that Python's flush at exit also succeeds (otherwise Python
reports "Exception ignored … BrokenPipeError" and exits with 120). Lines on a terminal are coloured unless NO_COLOR is
set; lines in a file or pipe only if FORCE_COLOR is set. Threads may print: one line is written at a time.
"""
from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TextIO

# Lines that C++ logs if a CUDA plugin is installed without a GPU, and their header.
NOISE = re.compile(rb"cudart_stub|absl::InitializeLog\(\)")
# Control characters, which terminals execute; generated text and names in foreign files may contain them.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WARNING = re.compile(r"W\d{4} [\d:.]+ ")

LEVEL = re.compile(r"(error|warning|note): ")
COLOURS = {r"(?m)^error:": "red", r"(?m)^warning:": "yellow", r"(?m)^note:": "cyan",
           r"\bloss -?\d+\.\d+( → -?\d+\.\d+)?": "green", r"\b(mfu|MFU) \d+\.\d+%": "magenta"}
UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}       # a result is lost by these
LOCK_S = 1.0        # longest wait for the lock: a thread blocked on one stream must not block the others for longer


@dataclasses.dataclass(frozen=True)
class LineFormat:
    """The format of each line of a run's log. kind: "time" or "json". process: index of the process that prints."""
    kind: str
    process: int

    def dress(self, text: str, level: str) -> str:
        """Return the text as lines that begin with time, process and level, or as one JSON object. level: the level of
        a text that does not begin with a level."""
        match = LEVEL.match(text)
        if self.kind == "json":
            return json.dumps({"time": time.time(), "process": self.process, "level": match[1] if match else level,
                               "text": text}, ensure_ascii=False)
        lead, level = f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{self.process}] ", match[1] if match else level
        return "\n".join(f"{lead}{'' if LEVEL.match(line) else level + ': '}{line}" for line in text.split("\n"))


@dataclasses.dataclass
class _Output:
    """The state of the standard streams. A process has one such object, because all threads print on one stdout.

    answers: the stream of `answer` while stdout is reserved for it; None: `answer` prints on sys.stdout. live: length
    of the unfinished live line on the terminal. drawn_at: the time at which the live line was printed, by the monotonic
    clock. passing: whether the live line is erased, not left behind, once another line is printed. ended: the command
    is ending, so no live line follows.
    """
    answers: TextIO | None = None
    live: int = 0
    drawn_at: float = 0.0
    passing: bool = False
    ended: bool = False
    format: LineFormat | None = None


_output = _Output()
_lock = threading.RLock()


def format_lines(form: str, process: int = 0, count: int = 1) -> None:
    """Set the format of further lines. form: `run.log_format`. process: index of this one among `count` processes."""
    kind = form if form != "auto" else "time" if count > 1 and not on_terminal() else "plain"
    _output.format = None if kind == "plain" else LineFormat(kind, process)


def out(text: str) -> None:
    """Print lines on stdout. The lines replace the live line, if one is shown."""
    with _in_turn():
        _send(sys.stdout, _over_live(_escape_for(sys.stdout, _add_prefix(text, "info")), _color) + "\n")


def answer(text: str) -> None:
    """Print the result of a command on stdout, to be read by a program; also while `keep_stdout` is in effect.

    Raises: SystemExit(1) if stdout cannot take the result (a full disk, an I/O error). A closed pipe is no error: its
    reader has read enough.
    """
    with _in_turn():
        if _output.answers is None:
            error = _send(sys.stdout, _over_live(_escape_for(sys.stdout, text)) + "\n")
        else:
            end_live()
            error = _send(_output.answers, _escape_for(_output.answers, text) + "\n")
    if error is not None and error.errno in UNWRITTEN:
        err(f"error: the result cannot be written to stdout ({error.strerror}); write it to another file or disk")
        raise SystemExit(1)


def keep_stdout() -> None:
    """Reserve stdout for `answer` from here on. All other output, also of C++ and child processes, goes to stderr.

    Used for `--json`: stdout then has the JSON result or nothing. Raises: OSError if no descriptor is left.
    """
    if _output.answers is None:
        sys.stdout.flush()
        _output.answers = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        os.dup2(2, 1)


@contextlib.contextmanager
def reserve_stdout(kept: bool = True):
    """Context: reserve Python's stdout for `answer` of a command that is called in this process. The context does
    nothing if `kept` is False, or after `keep_stdout`."""
    if not kept or _output.answers is not None:
        yield
        return
    _output.answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _output.answers = None


def err(text: str) -> None:
    """Print lines on stderr, below the live line if there is one."""
    with _in_turn():
        erase_passing()
        below = "\n" if _output.live else ""
        _over_live("")
        _send(sys.stderr, f"{below}{_color(sys.stderr, _escape_for(sys.stderr, _add_prefix(text, 'warning')))}\n")


def part(text: str) -> None:
    """Print text on stdout without ending the line."""
    with _in_turn():
        _send(sys.stdout, _over_live(_escape_for(sys.stdout, text)))


def live(text: str, passing: bool = False, after_s: float = 0.0) -> None:
    """Print a live line on a terminal, cut to its width. The next line on stdout replaces the live line. passing:
    whether the live line is also erased before a line on stderr and at the end of the command. after_s: print nothing
    while another live line, which is not passing, is shown and is younger than this, in seconds."""
    with _in_turn():        # a check of the age before the lock would be stale after the wait for it
        age_s = time.monotonic() - _output.drawn_at
        if _output.ended or _output.live and not _output.passing and age_s < after_s:
            return
        text = text[:width()]
        _send(sys.stdout, "\r" + _color(sys.stdout, text.ljust(_output.live)))
        _output.live, _output.passing, _output.drawn_at = len(text), passing, time.monotonic()


def width() -> int:
    """Return the number of characters that a live line may have."""
    return max(shutil.get_terminal_size().columns - 1, 20)


def is_live() -> bool:
    """Return whether live lines may be printed: stdout is a terminal, and lines have no prefix."""
    return _output.format is None and on_terminal()


def erase_passing() -> None:
    """Erase the live line if it is passing."""
    with _in_turn():
        if _output.live and _output.passing:
            _send(sys.stdout, "\r" + " " * _output.live + "\r")
            _output.live = 0


def on_terminal(stream: TextIO | None = None) -> bool:
    """Return whether a stream (None: stdout) is a terminal."""
    with contextlib.suppress(Exception):
        return (stream or sys.stdout).isatty()
    return False


def begin(level: int = 2) -> None:
    """Make the standard streams safe and silence C++ logs. This is the first call of a command, before jax is imported.

    level: the least severity that C++ logs: 1 for warnings (for a command that reads them), 2 for errors.

    A closed standard stream is opened on /dev/null. Otherwise the next opened file, possibly a checkpoint, would get
    its descriptor and receive C++ logs.
    """
    _output.ended = False
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", str(level))     # jax's C++ reads it when it is loaded
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
    """Report an exception that ended a thread. The command goes on without the thread."""
    name = ended.thread.name if ended.thread else "?"
    err(f"warning: the thread {name} has ended: {ended.exc_type.__name__}: {ended.exc_value}\n"
        + "".join(traceback.format_tb(ended.exc_traceback)).rstrip())


# Copies stdin to stderr line by line, without noise. It is a process, because a thread would die with this process if
# C++ aborts, and the last C++ messages would be lost. It ignores signals and ends when the command closes its input.
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
DRAINED_S = 2.0     # longest wait for the filter to end; a child process that was started meanwhile may hold its input


@contextlib.contextmanager
def without_noise(warnings: list[str] | None = None):
    """Context: drop the lines of NOISE from descriptor 2. All other lines pass at once, even if C++ aborts.

    Used while jax's C++ is loaded: no environment variable silences some of its messages. warnings: a list to which the
    lines that C++ logs as warnings are appended instead of printed.
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
    except OSError:     # no process can be started: the noise is printed
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
    """End the live line, if there is one."""
    with _in_turn():
        erase_passing()
        if _output.live:
            _send(sys.stdout, _over_live("") + "\n")


def end() -> None:
    """End the live line, allow no further one, and flush both streams."""
    with _in_turn():
        end_live()
        _output.ended = True
    for stream in (sys.stdout, sys.stderr):
        _send(stream, "")


@contextlib.contextmanager
def _in_turn():
    """Context: hold the lock for writing. A thread that does not get it within LOCK_S writes anyway."""
    had = _lock.acquire(timeout=LOCK_S)
    try:
        yield
    finally:
        if had:
            _lock.release()


def _add_prefix(text: str, level: str) -> str:
    return _output.format.dress(text, level) if _output.format else text


def _color(stream: TextIO, text: str) -> str:
    """Return the text with colours if the stream supports them; rich decides by terminal, NO_COLOR and FORCE_COLOR."""
    if not (on_terminal(stream) or os.environ.get("FORCE_COLOR")):
        return text
    with contextlib.suppress(Exception):    # at interpreter exit, imports fail
        from rich import console, text as texts
        of_stream = console.Console(file=stream, force_jupyter=False)
        if of_stream.color_system is None or of_stream.no_color:
            return text
        marked = texts.Text(text, end="")
        for pattern, colour in COLOURS.items():
            marked.highlight_regex(pattern, colour)
        return "".join(segment.style.render(segment.text) if segment.style else segment.text
                       for segment in marked.render(of_stream))
    return text


def _escape_for(stream: TextIO, text: str) -> str:
    """Return the text with control characters escaped if the stream is a terminal; else unchanged."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text) if on_terminal(stream) else text


def escape(text: str) -> str:
    """Return a line of foreign text with control characters escaped, also for files, which a terminal may show."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def _over_live(text: str, colour: Callable[[TextIO, str], str] = lambda stream, text: text) -> str:
    """Return the text to write over the live line, padded to cover it. colour: (stream, text) -> coloured text."""
    was, _output.live = _output.live, 0
    first, *rest = text.split("\n")
    lead, first = ("\r", first.ljust(was)) if was and (first or _output.passing) else ("", first)
    return lead + colour(sys.stdout, "\n".join([first, *rest]))


def _send(stream: TextIO, text: str) -> OSError | None:
    """Write and flush a text. Return the system's error if the stream did not take it."""
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:      # text that a terminal without UTF-8 cannot show
            stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except BlockingIOError:     # another program made the terminal non-blocking, and it is full: this line is dropped
        pass
    except Exception as error:      # a stream of a notebook may raise anything; output must not end a run
        _give_up(stream)
        return error if isinstance(error, OSError) else None
    return None


def _give_up(stream: TextIO) -> None:
    with contextlib.suppress(Exception):    # a stream without a descriptor stays: the next line is tried again
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
        stream.flush()      # sends the rest of the buffer to /dev/null
