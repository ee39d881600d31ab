"""Rewards: the built-in ones on odd answers, and functions of every bad kind, none of which costs more than its answer."""
import json
import os
import resource
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from commands import ROOT

from meshtrain.rl.rewards import builtin, worker, workers

LINE = {"answer": "The train takes 1,200 s.\n#### 1,200", "pattern": r"(yes|no)\.?"}


@pytest.mark.parametrize("answer, right", [
    ("1200", True), ("It is 1,200.", True), ("= 1200.0", True), ("2400/2", True), ("first 7, then 1200", True),
    ("1200, I mean 7", False), ("#### 1200 (not 7)\n", False), ("7 #### 1200", True), (r"7 \boxed{1200} 8", True),
    ("-1200", False), ("−1200", False), ("12 00", False), ("1.200", False), ("", False), ("none", False), ("1200/0", False),
    (".", False), ("1200%", True), ("$1,200.00", True), (r"\boxed{\frac{2400}{2}} m", True),
    (r"\boxed{\text{1200 s}} or 7", True),
    (r"\boxed{7}, no, \boxed{1200}", True), (r"\boxed{1200}, no, \boxed{7}", False), (r"1199\frac{2}{2}", True), (r"1200\frac{1}{2}", False), ("m/1200", True), ("3/7/1200", True), ("-/7", False), ("9" * 5000, False)])
def test_numbers_are_compared_exactly(answer, right):
    assert builtin.number("", answer, LINE) == right


def test_fractions_have_no_rounding():
    assert builtin.number("", "0.1", {"answer": "1/10"}) == 1 == builtin.number("", "2/6", {"answer": "1/3"})
    assert builtin.number("", "0.3333333333333333", {"answer": "1/3"}) == 0
    half = {"answer": r"\boxed{-\dfrac{1}{2}}"}
    assert [builtin.number("", answer, half) for answer in (r"\boxed{\frac{-1}{2}}", "-1/2", r"\boxed{-\frac{1}{3}}", "-1")
            ] == [1, 1, 0, 0]
    assert builtin.number("", "12/25/2024", {"answer": "1/2/2023"}) == 0 == builtin.number("", "1/0", {"answer": "2/0"})


ANSWERS = {     # of an answer's text: (its number as an answer, the same as a gold; None: it is refused)
    "42": (42, 42), "42 m^2": (42, 42), "42 m^{2}": (42, 42), "42 m²": (42, 42), "5 m/s^2": (5, 5), "5 m^2 s^{-1}": (5, 5),
    "-3.50": ("-7/2", "-7/2"), "$1,200": (1200, 1200), "-$5": (-5, -5), "1{,}200": (1200, 1200), "50\\%": (50, 50),
    "7/2": ("7/2", "7/2"), r"3\frac{1}{2}": ("7/2", "7/2"), "-3 1/2": ("-7/2", "-7/2"), r"\frac12": ("1/2", "1/2"),
    r"\frac{3}{0.5}": (6, 6), "3/0.5": (6, 6), r"90^\circ": (90, 90), r"\(6\text{ cm}\)": (6, 6), "**7**": (7, 7),
    "12 square metres per person": (12, 12), "3e5 m": (300000, 300000), r"3 \times 10^{-1}": ("3/10", "3/10"),
    "3 × 10⁵": (300000, 300000), "1e-07": ("1/10000000", "1/10000000"), "so 5\n#### 7 m^2": (7, 7), r"$\boxed{7}$": (7, 7),
    r"\sqrt{2}": (None, None), r"2\sqrt{3}": (None, None), r"\frac{\sqrt{3}}{2}": (None, None), "1 + √2": (None, None),
    "2^{10}": (None, None), "2^10": (None, None), "2**10": (None, None), "10²": (None, None), r"2\pi": (None, None),
    r"\log_2 8": (None, None), "2^3 - 1": (None, None), "2^3 - 1 = 7": (7, None), "x^2 - 5 = 4": (4, None),
    "55 = a_{10}": (55, None), r"\boxed{7": (None, None), r"\boxed{7} and \boxed{8": (7, 7), r"5, or \boxed{7": (5, None),
    "x = 5": (5, None), "2x": (2, None), "1, 2": (2, None), "(3,4)": (4, None), "12/25/2024": (2024, None), "10:30": (30, None),
    "1.200,50": (50, None), "20 and 3": (3, None), "5 million": (5, None), "2 and a half": (2, None), "- 7": (7, None),
    "none": (None, None), "": (None, None), "1/0": (None, None), "7 or " + "9" * 5000: (None, None)}


@pytest.mark.parametrize("text", ANSWERS, ids=lambda text: text[:20])
def test_powers_and_roots_are_no_numbers_and_a_gold_is_one_number(text):
    value, gold = (one if one is None else Fraction(one) for one in ANSWERS[text])
    assert (builtin.last_number(text), builtin.gold_number(text)) == (value, gold)
    told = builtin.fault("number", {"answer": text})
    assert not told if gold is not None else "is not one number, but '" in told and "after #### or" in told
    assert builtin.number("", f"The answer is {gold}.", {"answer": text}) == (gold is not None)


@pytest.mark.parametrize("text", [
    "9" * 10**5, ("9" * 1000 + " ") * 100, ("9" * 999 + "x") * 50, "1,111" * 10**4, "2^" * 10**4, r"\frac{" * 10**4,
    "(" * 10**4 + ")" * 10**4 + "^2", "2" + " " * 10**5 + "x", "1+" * 10**4 + "√2", "{" * 10**4, r"\sqrt[" * 10**4, "1 2" * 10**4])
def test_a_text_of_any_form_is_read_in_a_time_of_its_length(text):
    begun = time.process_time()
    builtin.last_number(text), builtin.gold_number(text)
    assert time.process_time() - begun < 3


@pytest.mark.parametrize("reward, gold, told", [
    ("number", r"\frac{\sqrt{3}}{2}", '"answer" is not one number'), ("number", None, "but is null"),
    ("number", True, "is not one number, but 'True'"), ("exact", ["7"], 'but is ["7"]'),
    ("choice", "B) Paris", "is not one letter, but 'B) Paris'"), ("choice", "7", "is not one letter"),
    ("number", "x" * 99, "is not one number, but '…xxx"), ("number", float("nan"), "is not one number, but 'nan'")])
def test_golds_that_no_answer_can_meet_are_told_with_their_line(reward, gold, told):
    with pytest.raises(ValueError) as error:
        workers.check(reward, {"a.jsonl, line 1": {"answer": "7" if reward != "choice" else "(b)."},
                               "a.jsonl, line 2": {"answer": gold}})
    assert told in str(error.value) and "a.jsonl, line 2" in str(error.value) and "1 of 2 lines" in str(error.value)


@pytest.mark.parametrize("answer, right", [
    ("B", True), ("b", True), ("(B)", True), ("(b)", True), ("The answer is B.", True), ("A or B? (B)", True),
    ("I think (A), no, (B)", True), ("A", False), ("(A) and not B", False), ("", False), ("Bob", False), ("B or C", False)])
def test_choices_are_the_last_letter(answer, right):
    assert builtin.choice("", answer, {"answer": "B"}) == right == builtin.choice("", answer, {"answer": "(b)"})


@pytest.mark.parametrize("name, answer, right", [
    ("exact", f" {LINE['answer']}\n", True), ("exact", "1200", False),
    ("regex", "yes", True), ("regex", " no. ", True), ("regex", "yes it is", False)])
def test_texts(name, answer, right):
    assert getattr(builtin, name)("", answer, LINE) == right


HOSTILE = '''
import itertools, os, random, signal, subprocess, sys, time

class Rude(Exception):
    def __str__(self):
        raise ValueError

def score(prompt, answer, line):
    if answer == "sleep":
        time.sleep(1000)
    if answer == "spin":
        while True:
            pass
    if answer == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if answer == "raise":
        raise KeyError("no such key")
    if answer == "rude":
        raise Rude
    if answer == "exit":
        sys.exit(3)
    if answer == "die":
        os._exit(3)
    if answer == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if answer == "memory":
        return len(bytearray(10 << 30))
    if answer == "warned":     # by Slurm, before the time limit
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
    if answer == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    if answer == "child":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if answer == "print":
        for _ in range(1 << 11):
            print("x" * (1 << 16))
        sys.stderr.write("x" * (1 << 20))
    if answer == "disk":
        with open("much", "wb") as file:
            file.seek(1 << 30)          # 1 GiB that is written takes longer than an answer may on a busy machine
            file.write(b"x")
    if answer == "close":
        os.closerange(3, 4096)
    if answer == "garbage":
        for descriptor in range(3, 4096):
            try:
                os.write(descriptor, b"garbage\\n")
            except OSError:
                pass
    if answer == "deep":
        return score(prompt, answer, line)
    return {"nan": float("nan"), "none": None, "text": "1", "list": [1], "dict": {"other": 1.0}, "bool": True,
            "parts": {"reward": 0.5, "length": 7}, "whole": 3, "many": {str(i): 1.0 for i in range(1000)},
            "part": {"reward": 1.0, "of": "text"}, "large": 10 ** 400}.get(answer, 1.0)
'''
FAILURES = {
    "sleep": "timeout after 3 s", "spin": "timeout after 3 s", "deaf": "timeout after 3 s", "raise": "KeyError: 'no such key'",
    "rude": "Rude", "exit": "SystemExit: 3", "die": "its process ended, with exit code 3",
    "crash": "its process ended, killed by signal 11", "memory": "MemoryError", "fork": "its process ended, with exit code 0",
    "child": "timeout after 3 s", "disk": "OSError", "close": "", "garbage": "wrote an invalid reply",
    "deep": "RecursionError", "nan": "reward is not a finite number, but nan", "none": "but None", "text": "but '1'",
    "list": "but [1]", "dict": 'a dict of rewards must have "reward"', "many": 'a dict of rewards must have "reward"',
    "part": "of is not a finite number", "large": "but the largest allowed value is 1e+15"}
VALUES = {"print": 1.0, "warned": 1.0, "bool": 1.0, "parts": 0.5, "whole": 3.0, "plain": 1.0}


@pytest.fixture
def hostile(tmp_path):
    (tmp_path / "rewards.py").write_text(HOSTILE)
    return f"{tmp_path / 'rewards.py'}:score"


def of_the_functions(reward: str) -> list[str]:
    """Command lines of processes that score by it."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if reward in line and "worker.py" in line]


def test_no_function_costs_more_than_its_answer(hostile):
    pool = workers.RewardWorkers(hostile, 2, 3.0, 1.0)
    names = [*FAILURES, *VALUES]
    begun = time.monotonic()
    for number, name in enumerate(names):
        pool.submit(number, "prompt", name, LINE)
    found = {names[number]: one for number, one in pool.results().items()}
    assert time.monotonic() - begun < 60 and found.keys() == set(names)
    for name, said in FAILURES.items():
        assert found[name].reward is None and found[name].failure and said in found[name].failure, (name, found[name])
    for name, value in VALUES.items():
        assert (found[name].reward, found[name].failure) == (value, ""), (name, found[name])
    assert found["parts"].parts == {"length": 7.0}
    pool.submit(0, "", "plain", LINE)
    assert pool.results()[0].reward == 1.0, "and the workers go on"
    pool.close()
    assert not of_the_functions(hostile), "nothing is left"
    assert not subprocess.run(["pgrep", "-f", "sleep 1000"], capture_output=True, text=True).stdout


DAEMON = """
import os, time
def score(prompt, answer, line):
    with open({folder!r}, "a") as file:
        file.write(os.getcwd() + "\\n")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open({pids!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists({pids!r}) or not os.path.getsize({pids!r}):
        time.sleep(0.01)
    if answer == "die":
        os._exit(3)
    if answer == "timeout":
        time.sleep(1000)
    return 1.0
"""
OWNER = """
import os, sys
from meshtrain.rl.rewards import workers
pool = workers.RewardWorkers(sys.argv[1], 1, 2.0, 1.0)
pool.submit(0, "", sys.argv[2] if sys.argv[2] in ("timeout", "die") else "", {})
print(pool.results()[0].failure, flush=True)
pool.close() if sys.argv[2] == "close" else os._exit(1)
"""


@pytest.mark.parametrize("how", ["timeout", "die", "close", "exit"])
def test_daemons_of_a_function_are_killed_and_its_folder_is_removed(how, tmp_path):
    """Also those with a session of their own. exit: the process that has the workers ends by os._exit."""
    pids, folder = tmp_path / "pids", tmp_path / "folder"
    (tmp_path / "rewards.py").write_text(DAEMON.format(folder=str(folder), pids=str(pids)))
    ran = subprocess.run([sys.executable, "-c", OWNER, f"{tmp_path / 'rewards.py'}:score", how], text=True, timeout=60,
                         cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))), capture_output=True)
    assert ran.stdout.strip() == {"timeout": "timeout after 2 s", "die": "its process ended, with exit code 3"}.get(how, "")
    deadline = time.monotonic() + 10
    while alive := [line for line in [*pids.read_text().split(), *folder.read_text().split()]
                    if os.path.exists(f"/proc/{line}" if line.isdecimal() else line)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


LATE = """
import os, signal, sys
from meshtrain.rl.rewards import worker
ended, wait, change, kill = [], os.wait, signal.signal, worker.kill_all_children
def stop_late():
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)
os.wait = lambda: ended.append(wait()) or ended[-1]
signal.signal = lambda *given: (stop_late(), change(*given))[1]
worker.kill_all_children = lambda: (stop_late(), kill())
worker.main(*sys.argv[1:], str(1 << 30))
"""


def test_a_stop_that_comes_while_the_function_s_process_ends_leaves_nothing_behind(tmp_path):
    """The end of the owner closes the pipe, which ends the function's process, and sends SIGTERM: both at once."""
    pids, folder = tmp_path / "pids", tmp_path / "folder"
    (tmp_path / "rewards.py").write_text(DAEMON.format(folder=str(folder), pids=str(pids)))
    (source, requests), (replies, target) = os.pipe(), os.pipe()
    process = subprocess.Popen([sys.executable, "-c", LATE, f"{tmp_path / 'rewards.py'}:score", str(source), str(target)],
                               pass_fds=(source, target), env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    os.close(source), os.close(target)
    with os.fdopen(requests, "w") as asks, os.fdopen(replies) as told:
        assert told.readline() == "{}\n"
        print('["", "", {}]', file=asks, flush=True)
        assert '"reward": 1.0' in told.readline()
    assert process.wait(60) == 1
    assert [one for one in pids.read_text().split() if os.path.exists(f"/proc/{one}")] == []
    assert [one for one in folder.read_text().split() if os.path.exists(one)] == []


def test_a_process_with_more_than_a_thousand_descriptors_has_its_answers_scored():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [open(os.devnull) for _ in range(1100)]
    pool = workers.RewardWorkers("exact", 1, 10.0, 1.0)
    try:
        pool.submit(0, "", "7", {"answer": "7"})
        assert pool.wait_for_scores(30), "the thread has died"
        assert pool.results()[0].reward == 1.0
    finally:
        pool.close()
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", ["wait_for_start", "ask", "close"])
def test_any_error_of_a_thread_is_a_failure_of_its_answer(name, hostile, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")
    pool = workers.RewardWorkers(hostile, 1, 3.0 if name == "close" else 30.0, 1.0)    # of "sleep" the limit is waited for, twice
    monkeypatch.setattr(workers._Process, name, broken)
    for number in range(2):
        pool.submit(number, "", "sleep" if name == "close" else "plain", LINE)
    assert pool.wait_for_scores(30), "the thread has died"
    assert all(one.reward is None and one.failure for one in pool.results().values())
    monkeypatch.undo()
    pool.submit(0, "", "plain", LINE)
    assert pool.wait_for_scores(30) and pool.results()[0].reward == 1.0
    pool.close()


@pytest.mark.parametrize("reply, valid", [
    ({}, True), ({"failure": "x"}, True), ({"reward": 1.0, "parts": {"a": 2.0}}, True),
    ({"reward": 1.0}, False), ({"reward": 1.0, "parts": {"a": "not a number"}}, False), ({"reward": 1.0, "parts": [1]}, False),
    ({"reward": 1, "parts": {}}, False), ({"reward": float("nan"), "parts": {}}, False), ({"failure": 3}, False),
    ({"reward": 1.0, "parts": {"a": float("inf")}}, False), ({"reward": 1.0, "parts": {}, "failure": ""}, False), ([], False)])
def test_a_reply_that_the_function_has_written_itself_is_no_reward(reply, valid):
    assert workers._is_reply(reply) == valid


def test_a_deadline_is_kept(hostile):
    pool = workers.RewardWorkers(hostile, 1, 1.0, 1.0)
    pool.submit(0, "", "plain", LINE)
    pool.results()
    begun = time.monotonic()
    pool.submit(1, "", "sleep", LINE)
    assert pool.results()[1].failure == "timeout after 1 s" and time.monotonic() - begun < 30
    pool.close()


def test_what_waits_or_is_being_scored_is_given_up_where_a_run_ends(hostile):
    pool = workers.RewardWorkers(hostile, 1, 100.0, 1.0)
    pool.submit(50, "", "plain", LINE)
    pool.results()
    for number in range(50):
        pool.submit(number, "", "sleep", LINE)
    time.sleep(0.3)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 30 and not of_the_functions(hostile)


def test_workers_die_with_the_process_that_has_them(hostile, tmp_path):
    program = (f"import os, time\nfrom meshtrain.rl.rewards import workers\n"
               f"pool = workers.RewardWorkers({hostile!r}, 1, 100.0, 1.0)\n"
               f"pool.submit(0, '', 'plain', {{}})\npool.results()\npool.submit(1, '', 'sleep', {{}})\n"
               f"time.sleep(0.5)\nos.kill(os.getpid(), 9)\n")
    subprocess.run([os.sys.executable, "-c", program], cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    deadline = time.monotonic() + 10
    while of_the_functions(hostile) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not of_the_functions(hostile)


def test_a_share_is_scored_twice_and_differences_are_found(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import random\ndef score(prompt, answer, line):\n    return random.random() if answer == 'a' else 1.0\n")
    pool = workers.RewardWorkers(f"{tmp_path / 'rewards.py'}:score", 1, 5.0, 1.0, check=1.0)
    for number, answer in enumerate("ab"):
        pool.submit(number, "", answer, {})
    found = pool.results()
    assert found[0].unsteady and not found[1].unsteady and found[1].reward == 1.0
    pool.close()


def test_the_share_that_is_scored_twice_is_the_same_in_every_run():
    requests = [str(i).encode() for i in range(2000)]
    assert 150 < sum(workers.is_checked(one, 0.1) for one in requests) < 250
    assert not any(workers.is_checked(one, 0.0) for one in requests) and all(
        workers.is_checked(one, 1.0) for one in requests)


def test_what_a_function_computes_does_not_depend_on_hashes_of_the_process(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def score(prompt, answer, line):\n    return float(list({'a', 'b', 'c', 'd', 'e', 'f'}).index('a'))\n")
    pool = workers.RewardWorkers(f"{tmp_path / 'rewards.py'}:score", 3, 5.0, 1.0)
    for number in range(12):
        pool.submit(number, "", "", {})
    assert len({one.reward for one in pool.results().values()}) == 1
    pool.close()


def test_a_file_may_import_what_lies_beside_it_and_finds_no_module_of_ours(tmp_path):
    (tmp_path / "helper.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "rewards.py").write_text("import helper\ntry:\n    import builtin\n    builtin = True\n"
                                         "except ImportError:\n    builtin = False\n"
                                         "def score(prompt, answer, line):\n    return helper.half(3) + 10 * builtin\n")
    pool = workers.RewardWorkers(f"{tmp_path / 'rewards.py'}:score", 1, 5.0, 1.0)
    pool.submit(0, "", "", {})
    assert pool.results()[0].reward == 1.5
    pool.close()


@pytest.mark.parametrize("text, told", [
    ("def score(prompt, answer, line)\n", "SyntaxError"), ("import nowhere\n", "No module named 'nowhere'"),
    ("scores = 1\n", "has no attribute 'score'"), ("score = 1\n", "score is not a function: 1"),
    ("def score(answer):\n    return 1\n", "too many positional arguments"), ("raise SystemExit(3)\n", "SystemExit: 3"),
    ("import os\nos._exit(3)\n", "its process ended, with exit code 3")])
def test_a_file_that_cannot_be_loaded_is_told_before_the_run(tmp_path, text, told):
    (tmp_path / "rewards.py").write_text(text)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        workers.check(f"{tmp_path / 'rewards.py'}:score", {})
    assert told in str(error.value)


@pytest.mark.parametrize("reward, told", [
    ("exakt", 'did you mean "exact"?'), ("mine", 'give it as "rewards.py:score"'), ("nowhere.py:score", "is not a file"),
    ("regex", 'reads "pattern" of each prompt\'s line, but a, line 2 has \'answer\' (1 of 2 lines lack it)')])
def test_names_that_are_none_are_told(reward, told):
    with pytest.raises(ValueError) as error:
        workers.check(reward, {"a, line 1": {"answer": "7", "pattern": "7"}, "a, line 2": {"answer": "7"}})
    assert told in str(error.value)


def test_every_built_in_reward_has_its_column():
    for name, column in builtin.COLUMNS.items():
        text = "B" if name == "choice" else "7"
        workers.check(name, {"line 1": {column: text}})
        assert worker.load(name)("", text, {column: text}) == 1.0


def test_unusual_texts_travel(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(prompt, answer, line):\n    return len(prompt + answer + line['x'])\n")
    pool = workers.RewardWorkers(f"{tmp_path / 'rewards.py'}:score", 1, 5.0, 1.0)
    texts = ["", "\n", "é\u2028\x00", "\ud800", "x" * (1 << 20), json.dumps({"a": "\n"})]
    for number, text in enumerate(texts):
        pool.submit(number, text, text, {"x": text})
    assert [pool_one.reward for _, pool_one in sorted(pool.results().items())] == [3 * len(text) for text in texts]
    pool.close()


def test_a_file_of_any_suffix_and_names_of_any_characters_are_taken(tmp_path):
    """A name that is cut out of an answer may have half a character, which no tracker writes."""
    (tmp_path / "reward.txt").write_text("def score(prompt, answer, line):\n    return {'reward': 1, '\\ud800ü': 2.0}\n")
    workers.check(f"{tmp_path}/reward.txt:score", {})
    pool = workers.RewardWorkers(f"{tmp_path}/reward.txt:score", 1, 10.0, 1.0)
    try:
        pool.submit(0, "", "", {})
        assert pool.results() == {0: workers.Reward(1.0, {"?ü": 2.0})}
    finally:
        pool.close()


def test_a_pattern_that_is_none_is_told_with_its_line_before_anything_is_drawn():
    lines = {"a.jsonl, line 1": {"pattern": "yes"}, "a.jsonl, line 2": {"pattern": "(["}, "a.jsonl, line 3": {"pattern": 3}}
    with pytest.raises(ValueError, match=r'a.jsonl, line 2: "pattern" is not a regular expression: .*2 of 3 lines.*fix it'):
        workers.check("regex", lines)
