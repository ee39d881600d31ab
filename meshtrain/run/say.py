"""Output of commands: a closed reader, a full disk or a closed terminal never ends a run.

A stream that fails once is replaced by /dev/null, also for what Python flushes at exit (otherwise it reports "Exception
ignored … BrokenPipeError" and exits with 120). Lines on a terminal have colours, where NO_COLOR allows them; those of a
file or pipe have them where FORCE_COLOR asks for them. Threads may print: one line is written at a time.
"""
from __future__ import annotations

import atexit
import contextlib
import dataclasses
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

# What C++ reports where a CUDA plugin is installed and no GPU is there, and the header of such lines.
NOISE = re.compile(rb"cudart_stub|absl::InitializeLog\(\)")
# What a terminal obeys; generated text and names in files of others may hold any of it.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WARNING = re.compile(r"W\d{4} [\d:.]+ ")

LEVEL = re.compile(r"(error|warning|note): ")
COLOURS = {r"(?m)^error:": "red", r"(?m)^warning:": "yellow", r"(?m)^note:": "cyan",
           r"\bloss -?\d+\.\d+( → -?\d+\.\d+)?": "green", r"\b(mfu|MFU) \d+\.\d+%": "magenta"}
LOCK_S = 1.0        # a thread that waits for a reader must not keep the others from their own stream


@dataclasses.dataclass(frozen=True)
class LineFormat:
    """The prefix of each line of a run. kind: "time" or "json". process: the one that prints."""
    kind: str
    process: int

    def dress(self, text: str, level: str) -> str:
        """Lines that begin with time, process and level, or one JSON object. level: of a text that names none."""
        found = LEVEL.match(text)
        if self.kind == "json":
            return json.dumps({"time": time.time(), "process": self.process, "level": found[1] if found else level,
                               "text": text}, ensure_ascii=False)
        lead, level = f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{self.process}] ", found[1] if found else level
        return "\n".join(f"{lead}{'' if LEVEL.match(line) else level + ': '}{line}" for line in text.split("\n"))


_answers = None     # where `answer` prints while stdout is kept for it; None: on stdout, with all else
_live = 0   # characters of the unfinished line that stands on the terminal
_drawn_at = 0.0
_passing = False    # whether that line is worth nothing once another is printed
_ended = False      # the command ends: no more live lines
_format: LineFormat | None = None
_lock = threading.RLock()


def format_lines(form: str, process: int = 0, count: int = 1) -> None:
    """Set how lines begin from here on. form: `run.log_format`. process: the one that prints, of `count`."""
    global _format
    kind = form if form != "auto" else "time" if count > 1 and not on_terminal() else "plain"
    _format = None if kind == "plain" else LineFormat(kind, process)


def out(text: str) -> None:
    """Prints lines on stdout, in place of the live line if there is one."""
    with _in_turn():
        _send(sys.stdout, _over_live(_shown(sys.stdout, _add_prefix(text, "info")), _color) + "\n")


def answer(text: str) -> None:
    """Prints the answer of a command, for a program to read: on stdout, also while it is kept for answers."""
    with _in_turn():
        if _answers is None:
            _send(sys.stdout, _over_live(_shown(sys.stdout, text)) + "\n")
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
    with _in_turn():
        erase_passing()
        below = "\n" if _live else ""
        _over_live("")
        _send(sys.stderr, f"{below}{_color(sys.stderr, _shown(sys.stderr, _add_prefix(text, 'warning')))}\n")


def part(text: str) -> None:
    """Prints text on stdout without ending the line."""
    with _in_turn():
        _send(sys.stdout, _over_live(_shown(sys.stdout, text)))


def live(text: str, passing: bool = False) -> None:
    """Prints a line on a terminal that the next one replaces, cut to the terminal's width. passing: it is erased, too,
    where a line on stderr follows or nothing does."""
    global _live, _passing, _drawn_at
    with _in_turn():
        if _ended:
            return
        text = text[:width()]
        _send(sys.stdout, "\r" + _color(sys.stdout, text.ljust(_live)))
        _live, _passing, _drawn_at = len(text), passing, time.monotonic()


def has_live(within_s: float) -> bool:
    """Whether a live line that is no passing one was printed within these seconds, and stands."""
    return bool(_live) and not _passing and time.monotonic() - _drawn_at < within_s


def width() -> int:
    """The number of characters that a live line may have."""
    return max(shutil.get_terminal_size().columns - 1, 20)


def is_live() -> bool:
    """Whether stdout may have a live line: a terminal, whose lines begin with nothing."""
    return _format is None and on_terminal()


def erase_passing() -> None:
    """Erase the live line if it is a passing one."""
    global _live
    with _in_turn():
        if _live and _passing:
            _send(sys.stdout, "\r" + " " * _live + "\r")
            _live = 0


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
    global _ended
    _ended = False
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
    with _in_turn():
        erase_passing()
        if _live:
            _send(sys.stdout, _over_live("") + "\n")


def end() -> None:
    """Ends a live line, lets none begin, and flushes both streams."""
    global _ended
    with _in_turn():
        end_live()
        _ended = True
    for stream in (sys.stdout, sys.stderr):
        _send(stream, "")


@contextlib.contextmanager
def _in_turn():
    """Context of writing. A thread that another keeps waiting writes after LOCK_S all the same."""
    had = _lock.acquire(timeout=LOCK_S)
    try:
        yield
    finally:
        if had:
            _lock.release()


def _add_prefix(text: str, level: str) -> str:
    return _format.dress(text, level) if _format else text


def _color(stream, text: str) -> str:
    """The text with colours, if the stream is to have them: rich knows the terminals, NO_COLOR and FORCE_COLOR."""
    if not (on_terminal(stream) or os.environ.get("FORCE_COLOR")):
        return text
    with contextlib.suppress(Exception):    # while the interpreter ends nothing can be imported
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


def _shown(stream, text: str) -> str:
    """The text with control characters escaped on a terminal; files and pipes get every byte."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if on_terminal(stream) else text


def escape(text: str) -> str:
    """A line of what others wrote, with control characters escaped for files and pipes, too: a terminal may be behind.
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _over_live(text: str, colour: Callable[[object, str], str] = lambda stream, text: text) -> str:
    """The text as it is to be written where a live line stands. colour: gives a text its colours."""
    global _live
    was, _live = _live, 0
    first, *rest = text.split("\n")
    lead, first = ("\r", first.ljust(was)) if was and (first or _passing) else ("", first)
    return lead + colour(sys.stdout, "\n".join([first, *rest]))


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
