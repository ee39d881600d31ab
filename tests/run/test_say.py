"""What is said never ends what says it: readers that die, full disks, closed streams, terminals of other encodings."""
import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshtrain.cluster import lost
from meshtrain.run import phases, say

ROOT = Path(__file__).resolve().parent.parent.parent
TALK = """
import sys
from meshtrain.run import say
say.begin()
for i in range(20_000):
    say.out(f"line {i} of what nobody reads")
    say.err(f"line {i} of what nobody reads")
print("not guarded, left in the buffer")
open(sys.argv[1], "w").write("done")
sys.exit(75)
"""


def talk(tmp_path, redirection: str, **environ) -> tuple[int, str, bool]:
    """(exit code of the speaker, what came on the stderr that is left, whether it came to its end)."""
    done = tmp_path / "done"
    # bash tells the speaker's own exit code, whatever it is piped into.
    line = f'"$PYTHON" -c "$TALK" {done} {redirection}; exit ${{PIPESTATUS[0]}}'
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT,
                         env=os.environ | {"PYTHON": sys.executable, "TALK": TALK, "PYTHONPATH": str(ROOT)} | environ)
    return ran.returncode, ran.stdout + ran.stderr, done.exists()


@pytest.mark.parametrize("redirection", [
    "2>/dev/null | true", "2>&1 | true", "2>&1 | head -3 >/dev/null", "> /dev/full 2>/dev/null", "> /dev/full 2>&1",
    ">&- 2>/dev/null", ">/dev/null 2>&-", ">&- 2>&- <&-"])
def test_a_stream_that_fails_ends_nothing_and_changes_no_exit_code(redirection, tmp_path):
    code, left, finished = talk(tmp_path, redirection)
    assert (code, finished) == (75, True)
    assert "Exception ignored" not in left and "Traceback" not in left and "Error" not in left, left[-500:]


def test_what_a_stream_that_works_gets_is_whole_where_the_other_fails(tmp_path):
    code, left, _ = talk(tmp_path, "2>/dev/full")
    assert code == 75 and left.count("line ") == 20_000 and left.endswith("not guarded, left in the buffer\n")


def test_a_closed_stream_lends_its_number_to_no_file(tmp_path):
    """Else what C++ reports on descriptor 2 is written into a checkpoint."""
    code = ("import os, sys\nfrom meshtrain.run import say\nsay.begin()\n"
            f"file = open({str(tmp_path / 'checkpoint')!r}, 'w')\nos.write(2, b'reported by "
            f"C++')\nsys.exit(file.fileno() < 3)")
    assert subprocess.run(["bash", "-c", '"$0" -c "$1" <&- 2>&-', sys.executable, code], cwd=ROOT).returncode == 0
    assert (tmp_path / "checkpoint").read_text() == ""


def test_what_a_terminal_cannot_show_is_replaced(tmp_path):
    code = 'from meshtrain.run import say\nsay.out("8 × 32 tokens …")\nsay.out("on")'
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60,
                         env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"8 ? 32 tokens ?\non\n", b"")


def test_a_stream_that_raises_anything_at_all_is_survived(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise RuntimeError("a notebook's stream after its kernel is gone")
    monkeypatch.setattr(sys, "stdout", Broken())
    say.out("a line")
    say.end()
    assert not say.on_terminal()


def test_a_terminal_is_shown_what_it_would_obey_and_a_pipe_gets_every_byte(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    for kind, shown in ((Terminal, "\\x1b]0;owned\\x07a\tb\n\\x9b2J\\x0d×\n"),
                        (io.StringIO, "\x1b]0;owned\x07a\tb\n\x9b2J\r×\n")):
        for name, tell in (("stdout", say.out), ("stderr", say.err), ("stdout", lambda text: say.part(text + "\n"))):
            monkeypatch.setattr(sys, name, kind())
            tell("\x1b]0;owned\x07a\tb\n\x9b2J\r×")
            assert getattr(sys, name).getvalue() == shown


def test_a_live_line_is_replaced_ended_by_lines_and_never_longer_than_the_terminal():
    code = ("import sys\nfrom meshtrain.run import say\nassert say.on_terminal()\nsay.begin()\n"
            "say.live('step 1 of a long run')\nsay.live('step 2')\nsay.err('careful')\nsay.live('y' * "
            "200)\nsay.out('told')\nsay.live('step 3')")
    pieces = on_terminal(code).split("\r")
    assert pieces == ["", "step 1 of a long run", "step 2".ljust(20) + "\ncareful\n", "y" * 79,
                      "told".ljust(79) + "\n", "step 3\n"]


def on_terminal(code: str, **environ: str) -> str:
    """What a script prints on a terminal of 80 columns, stdout and stderr."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, cwd=ROOT,
                             env=kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm"} | environ)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):      # the terminal's other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert child.wait(60) == 0, shown
    return shown.decode().replace("\r\n", "\n")


# ---- colours ---------------------------------------------------------------------------------------------------------

COLOURED = """
from meshtrain.run import say
say.begin()
say.err("error: a mistake\\nnote: a remedy of warning: none")
say.out("warning: late")
say.answer("note: loss 2.5 for a program")
say.live("step 1/2  loss 2.5000  mfu 41.2%")
say.out("loss 6.2618 → 3.7180 in 2 steps")
"""
PLAIN = ["error: a mistake", "note: a remedy of warning: none", "warning: late", "note: loss 2.5 for a program",
         "step 1/2  loss 2.5000  mfu 41.2%", "loss 6.2618 → 3.7180 in 2 steps"]


def test_a_terminal_has_colours_for_levels_loss_and_mfu_and_none_in_answers():
    red, yellow, green, magenta, cyan, plain = (f"\x1b[{code}m" for code in (31, 33, 32, 35, 36, 0))
    shown = on_terminal(COLOURED)
    assert re.split("[\r\n]+", shown.strip()) == [
        f"{red}error:{plain} a mistake", f"{cyan}note:{plain} a remedy of warning: none", f"{yellow}warning:{plain} late",
        "note: loss 2.5 for a program", f"step 1/2  {green}loss 2.5000{plain}  {magenta}mfu 41.2%{plain}",
        f"{green}loss 6.2618 → 3.7180{plain} in 2 steps"]


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_a_terminal_without_colours_gets_no_escape_code(environ):
    shown = on_terminal(COLOURED, **environ)
    assert "\x1b" not in shown and [line.rstrip() for line in re.split("[\r\n]+", shown.strip())] == PLAIN


@pytest.mark.parametrize("environ, coloured", [({}, False), ({"FORCE_COLOR": "1", "TERM": "xterm"}, True)])
def test_a_pipe_gets_no_escape_code_unless_it_is_asked_for(environ, coloured):
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run([sys.executable, "-c", COLOURED], capture_output=True, text=True, cwd=ROOT, timeout=60,
                          env=kept | {"PYTHONPATH": str(ROOT)} | environ)
    assert ("\x1b[32mloss" in done.stdout, "\x1b[31merror:" in done.stderr) == (coloured, coloured), done
    assert "note: loss 2.5 for a program\n" in done.stdout and ("\x1b" in done.stdout + done.stderr) == coloured


# ---- what stands before a line ---------------------------------------------------------------------------------------

@pytest.fixture
def plain_afterwards():
    yield
    say.format_lines("plain")


STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_lines_with_time_have_the_process_and_the_level_each(capsys, plain_afterwards):
    say.format_lines("time", 3, 8)
    say.out("compiled in 7.4 s\nmemory")
    say.err("error: one\nmore")
    say.err("the validation failed")
    say.out("note: thinned")
    say.answer("{}")
    found = capsys.readouterr()
    assert re.fullmatch(f"{STAMP} \\[3\\] info: compiled in 7.4 s\n{STAMP} \\[3\\] info: memory\n"
                        f"{STAMP} \\[3\\] note: thinned\n{{}}\n", found.out), found
    assert re.fullmatch(f"{STAMP} \\[3\\] error: one\n{STAMP} \\[3\\] error: more\n"
                        f"{STAMP} \\[3\\] warning: the validation failed\n", found.err), found


def test_lines_as_json_are_an_object_for_each_message(capsys, plain_afterwards):
    say.format_lines("json", 1, 2)
    say.out("a × b\nof two lines")
    say.err("error: process 0: gone")
    found = capsys.readouterr()
    said, failed = json.loads(found.out), json.loads(found.err)
    assert abs(said.pop("time") - time.time()) < 60
    assert said == {"process": 1, "level": "info", "text": "a × b\nof two lines"}
    assert (failed["level"], failed["text"]) == ("error", "error: process 0: gone") and "×" in found.out


@pytest.mark.parametrize("form, count, terminal, prefixed", [
    ("auto", 1, False, False), ("auto", 2, True, False), ("auto", 2, False, True), ("plain", 2, False, False),
    ("time", 1, True, True), ("json", 1, False, True)])
def test_by_itself_only_a_file_of_several_processes_has_prefixes(form, count, terminal, prefixed, monkeypatch, capsys,
                                                                 plain_afterwards):
    monkeypatch.setattr(say, "on_terminal", lambda stream=None: terminal)
    say.format_lines(form, 0, count)
    assert say.is_live() == (terminal and not prefixed)
    monkeypatch.undo()
    say.out("a line")
    assert (capsys.readouterr().out == "a line\n") != prefixed


@pytest.mark.parametrize("form", ["time", "json"])
def test_launchers_find_in_lines_with_a_prefix_what_they_look_for(form, capsys, plain_afterwards):
    say.format_lines(form, 3, 8)
    say.err("error: step 5 not saved in runs/a/checkpoints: process 7: No space left; see to it")
    say.err("error: process 3 of 8 did not connect to the coordinator")
    blamed, missing = capsys.readouterr().err.encode().splitlines()
    assert lost.BLAMED.search(blamed)[1] == b"7" and lost.SECONDARY.search(missing) and lost.UNHEARD.search(missing)[2]


# ---- phases ----------------------------------------------------------------------------------------------------------

def test_a_file_has_a_line_at_the_start_of_a_phase_and_one_where_it_took_long(capsys, monkeypatch):
    with phases.phase("opening the data"):
        assert capsys.readouterr().out == "opening the data\n"
    with phases.phase("compiling", "compiled in"), phases.moving("a part of it"):
        pass
    monkeypatch.setattr(phases, "LONG_S", 0.0)
    with phases.phase("saving"):
        pass
    assert capsys.readouterr().out == "compiling\ncompiled in 0.0 s\nsaving\nsaving took 0.0 s\n"


FAST = """
import threading, time
from meshtrain.run import phases, say
phases.FIRST_S, phases.FRAME_S, phases.OTHERS_S = 0.01, 0.01, 60.0
"""
PHASES = FAST + """
color, drawn = say._color, threading.Semaphore(0)

def slow_color(stream, text):       # printing takes longer than the time between two frames
    time.sleep(0.02)
    drawn.release()
    return color(stream, text)

def frames(count):
    while drawn.acquire(blocking=False):
        pass
    for _ in range(count + 1):      # the first may have begun before
        drawn.acquire()

say._color = slow_color
say.begin()
with phases.phase("quick"):
    pass
with phases.phase("compiling", "compiled in"):
    frames(10)
    with phases.moving("a part"):
        frames(2)
    say.out("a note of it")
    frames(2)
    say.err("warning: of it")
    frames(2)
    say.live("2 of 3 files")
    time.sleep(0.2)
phases.begin("the rest")
frames(2)
say.end()
time.sleep(0.2)
"""


def test_a_terminal_has_a_line_that_moves_and_leaves_nothing_behind():
    shown = on_terminal(PHASES)
    pieces = [piece for piece in re.split("[\r\n]+", shown) if piece.strip()]
    frames = [piece for piece in pieces if piece[0] in phases.FRAMES]
    assert {re.sub(r"\d+", "N", piece[2:]).rstrip() for piece in frames} == {
        "compiling N s", "a part N s", "the rest N s"} and len(set(piece[0] for piece in frames)) == 10
    others = [piece.rstrip() for piece in pieces if piece[0] not in phases.FRAMES]
    assert others[:3] == ["a note of it", "\x1b[33mwarning:\x1b[0m of it", "2 of 3 files"]
    assert re.fullmatch(r"compiled in \d\.\d s", others[3]) and len(others) == 4
    after = [piece for piece in pieces[[piece.rstrip() for piece in pieces].index("2 of 3 files"):] if piece in frames]
    assert all("the rest" in piece for piece in after), "the line of others stands while it is young"
    kept = [re.split("\r", line)[-1].strip() for line in shown.split("\n")]
    assert not [line for line in kept if line[:1] in (*phases.FRAMES, "")][1:], shown


def test_many_threads_print_whole_lines_over_a_line_that_moves():
    code = FAST + """
say.begin()
with phases.phase("compiling"):
    talk = lambda name: [say.out(f"{name} {i} " + "x" * 30) for i in range(100)]
    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""
    lines = [re.split("\r", line)[-1].rstrip() for line in on_terminal(code).split("\n")]
    assert sorted(filter(None, lines)) == sorted(f"{name} {i} {'x' * 30}" for name in "abc" for i in range(100))


def test_a_thread_that_waits_for_its_reader_keeps_no_other_from_stderr(monkeypatch, capsys):
    class Stuck(io.StringIO):
        def write(self, text):
            stuck.set()
            free.wait(60)
    stuck, free = threading.Event(), threading.Event()
    monkeypatch.setattr(say, "LOCK_S", 0.1)
    monkeypatch.setattr(sys, "stdout", Stuck())
    waiting = threading.Thread(target=say.out, args=("to a reader that reads no more",))
    other = threading.Thread(target=say.err, args=("error: the process hangs",))
    waiting.start()
    stuck.wait(60)
    other.start()
    other.join(10)
    told = capsys.readouterr().err
    free.set()
    waiting.join()
    assert told == "error: the process hangs\n"


@pytest.mark.parametrize("reader", ["true", "head -1 >/dev/null"])
def test_help_may_be_read_in_part(reader):
    line = f'"$PYTHON" -m meshtrain.tokenize --help 2>&1 | {reader}; exit ${{PIPESTATUS[0]}}'
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT,
                         env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)})
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def spoken(body: str, end: str) -> str:
    code = (f"import os, sys\nfrom meshtrain.run import say\nwith "
            f"say.without_noise({'kept := []' if 'kept' in body else ''}):\n{body}\n{end}")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60).stderr


@pytest.mark.parametrize("death", ["os.abort()", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_what_is_said_before_an_abort_is_told_and_noise_is_not(death):
    """As XLA says that it does not know a flag: in C++, which holds the interpreter's lock until the process is
    gone."""
    body = ("    import ctypes\n    lib = ctypes.PyDLL(None)\n    os.write(2, b'I0000 cudart_stub.cc:31] no "
            f"drivers\\n')\n    lib.perror(b'F1123 Unknown flag in XLA_FLAGS: --xla_bogus=1')\n    {death}")
    said = spoken(body, "")
    assert said.startswith("F1123 Unknown flag in XLA_FLAGS: --xla_bogus=1") and "cudart_stub" not in said


def test_warnings_of_cpp_are_handed_over_and_all_else_is_passed_on_in_order():
    body = "    os.write(2, b'W1123 10:00:00.1 slow.cc:1] slow\\nfirst\\n')\n    print('second', file=sys.stderr)"
    assert spoken(body + "  # kept", "print('third', len(kept), kept[0].strip(), file=sys.stderr)") == \
        "first\nsecond\nthird 1 W1123 10:00:00.1 slow.cc:1] slow\n"
    assert spoken(body, "") == "W1123 10:00:00.1 slow.cc:1] slow\nfirst\nsecond\n"


def test_warnings_are_told_where_nobody_is_left_to_take_them():
    assert spoken("    os.write(2, b'W1123 10:00:00.1 slow.cc:1] slow\\n')\n    os.abort()  # kept",
                  "") == "W1123 10:00:00.1 slow.cc:1] slow\n"


def test_a_process_that_was_started_meanwhile_and_lives_on_holds_up_nothing(monkeypatch):
    monkeypatch.setattr(say, "DRAINED_S", 0.3)
    began = time.monotonic()
    with say.without_noise():
        child = subprocess.Popen(["sleep", "60"])
    took_s = time.monotonic() - began
    child.kill()
    child.wait()
    assert took_s < 10


# ---- stdout that is kept for JSON ------------------------------------------------------------------------------------

ASKED = """
import os, subprocess, sys, threading
from meshtrain.config import Command, Option
from meshtrain.run import command, say
sys.argv = ["asked", *sys.argv[1:]]
command.begin()
@command.entry(Command("asked", {"json": Option("JSON alone")}, "NAME", (0, 1)), "about")
def main(options):
    say.out("a note")
    say.part("a part")
    say.live("a live line")
    print("a reward function of the user's")
    subprocess.run(["echo", "a child"])
    os.write(1, b"C++\\n")
    if options.names:
        os.kill(os.getpid(), 15)
        threading.Event().wait()
    say.answer('{"answer": 1}')
sys.exit(main(sys.argv[1:]))
"""


def asked(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", ASKED, *words], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})


NOTES = ("a note", "a part", "a live line", "a reward function", "a child", "C++")


def test_with_json_stdout_has_the_answer_alone():
    done = asked("--json")
    assert (done.returncode, done.stdout) == (0, '{"answer": 1}\n') and all(note in done.stderr for note in NOTES)


@pytest.mark.parametrize("words", ['--json', ''])
def test_a_result_that_a_full_disk_refuses_is_a_failure_and_one_that_nobody_reads_is_none(words):
    for redirection, code, said in (("> /dev/full", 1, "cannot be written to stdout (No space left"), ("| true", 0, "")):
        line = f'"$PYTHON" -c "$ASKED" {words} {redirection}; exit ${{PIPESTATUS[0]}}'
        ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ | {
            "PYTHON": sys.executable, "ASKED": "import sys\nfrom meshtrain.run import say\nsay.begin()\n"
            "if sys.argv[1:]:\n    say.keep_stdout()\nsay.answer('{}' * 9999)", "PYTHONPATH": str(ROOT)})
        assert ran.returncode == code and said in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


def test_a_command_that_is_stopped_with_json_leaves_stdout_empty():
    done = asked("--json", "forever")
    assert (done.returncode, done.stdout) == (75, "") and "SIGTERM: stopped" in done.stderr, done.stderr
    assert "SIGTERM: stopped" in asked("forever").stdout


def test_every_command_with_json_prints_it_by_answer_alone():
    for path in (ROOT / "meshtrain").glob("*.py"):
        if '"json": config.Option' in (text := path.read_text()):
            assert "say.out(json.dumps" not in text and "say.answer(json.dumps" in text, path.name


def test_in_a_process_that_calls_a_command_stdout_is_kept_while_it_runs(capsys):
    with say.reserve_stdout():
        say.out("a note")
        print("a reward function of the user's")
        say.answer("{}")
    print("after")
    found = capsys.readouterr()
    assert found.out == "{}\nafter\n" and "a note" in found.err and "a reward function" in found.err


def test_a_thread_that_ends_by_an_error_is_told_whatever_kind_of_error():
    code = """
import threading
from meshtrain.run import say
say.begin()

def work():
    raise SystemExit("no matter what")
thread = threading.Thread(target=work, name="worker")
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and "the thread worker has ended: SystemExit: no matter what" in done.stderr, done
