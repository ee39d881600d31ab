"""A run in a bucket whose requests are refused, throttled or answered with damage, start after start, without a compiled
step: the command is forked and has the stand-in of `tests.disturbed`, so that a fault takes seconds. `python -m
benchmarks.soak --parts requests` does it at length. Linux only.
"""
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import shutil

from meshtrain.commands import train
from meshtrain.run import say, stops
from meshtrain.storage import retries
from tests import disturbed, soak, syscalls

STEPS, EVERY, KEEP = 12, 2, 3
# of the run's directory: what requests are about
PLACES = ("checkpoints/", ".lock", "metrics.jsonl", "config.toml", "history.jsonl", "export/", "")
FAULTS = {"refused": {"status": 403, "code": "AccessDenied"}, "expired": {"status": 400, "code": "ExpiredToken"},
          "200 kB/s": {}, "damaged": {"damages": True}, "damaged for good": {}, "empty caches": {}}
NAMED = re.compile(r"refused with|cannot be |not saved|damaged|does not have the end|asked again")
PAUSES_S = (0.05,) * 4


@dataclasses.dataclass
class Outcome:
    """Of one fault. met: whether any request had it. wrong: in words."""
    moment: str
    met: bool
    named: bool | None
    seconds: float
    silent_s: float
    wrong: list[str]


class Harness:
    """Runs of one seed below `home`, one fault each, compared with one that is left alone. server: of the bucket."""

    def __init__(self, home: pathlib.Path, server):
        self.home, self.server, self.count = home, server, 0
        disturbed.prepare(home)
        self.said = ""
        name = self._name()
        assert self._run(name) == (stops.DONE, self.said), self.said
        self.wanted = self._outcome(name)

    def _name(self) -> str:
        self.count += 1
        return f"requests{self.count}"

    def _run(self, name: str, steps: int = STEPS) -> tuple[int | None, str]:
        """(exit code, what it said) of the command."""
        home, place = self.home / name, f"s3://bucket/{name}"
        home.mkdir(exist_ok=True)
        words = [str(self.home / "run.toml"), "--run.dir", place, "--training.steps", str(steps), "--checkpoint.every",
                 str(EVERY), "--checkpoint.keep", str(KEEP), "--checkpoint.export", "every"]
        os.environ["XDG_CACHE_HOME"] = str(home / "machine")

        def body() -> int:
            say.begin()
            stops.listen()
            disturbed.stand_in(home, words)
            retries.PAUSES_S = retries.PATIENT_PAUSES_S = PAUSES_S
            code = train.main(words)
            if code == stops.DONE:
                rows, arrays, files = soak.rows(place), soak.state(place), soak.exports(place)
                sums = {key: hashlib.md5(repr(value).encode()).hexdigest() for key, value in (arrays | files).items()}
                (home / "outcome.json").write_text(json.dumps({"rows": rows, "sums": sums}))
            return code
        log = home / f"log{len(list(home.glob('log*')))}"
        ended = syscalls.run(body, log, lambda call: 0, limit_s=soak.MOST_SILENT_S)
        self.seconds, self.silent_s, self.said = ended.seconds, ended.silent_s, log.read_text(errors="replace")
        return ended.code, self.said

    def _outcome(self, name: str) -> dict:
        return json.loads((self.home / name / "outcome.json").read_text())

    def check(self, fault: str, draw: random.Random) -> Outcome:
        """Does the fault to a run of its own and starts it again until it is through."""
        import stores as server_of
        name, wrong, place = self._name(), [], draw.choice(PLACES)
        begun = draw.randrange(0, STEPS, EVERY) if fault in ("refused", "expired", "200 kB/s") else draw.randrange(
            2 * EVERY, STEPS, EVERY)
        if begun:
            assert self._run(name, begun)[0] == stops.DONE, self.said
        times, done = draw.choice((1, 2, 3, 10**6)) if fault in soak.REFUSALS else draw.randint(1, 2), None
        if fault == "200 kB/s":
            self.server.bytes_s = 200_000
        elif fault == "empty caches":
            shutil.rmtree(self.home / name / "machine")
            shutil.rmtree(self.home / "cache", ignore_errors=True)
        elif fault == "damaged for good":
            newest = max(int(found) for found in re.findall(r"^step (\d+)", self.said, re.MULTILINE))
            assert newest == begun and self.server.damage(f"{name}/checkpoints/{begun}."), self.said
        else:
            path = f"/{name}/checkpoints/" if fault == "damaged" else f"/{name}/{place}"
            done = server_of.Fault(path, times, **FAULTS[fault])
            self.server.faults.append(done)
        code, said = self._run(name)
        self.server.faults.clear()
        self.server.bytes_s = 0
        met = done is None or done.times < times
        starts, silent_s, all_said = 1, self.silent_s, said
        wrong += self._judge(code, said)
        while code != stops.DONE and starts < 4:
            code, said = self._run(name)
            starts, silent_s, all_said = starts + 1, max(silent_s, self.silent_s), all_said + said
            wrong += self._judge(code, said)
        named = True if NAMED.search(all_said) else None
        if fault == "damaged for good" and not re.search(rf"checkpoints/{begun} is damaged", all_said):
            wrong.append("the damage is not told")
        if fault in soak.REFUSALS and met and not named:
            wrong.append("the refusal is not told")
        if code != stops.DONE:
            wrong.append(f"the same command again ends with {code}")
        else:
            wrong += self._differences(name, fault, all_said)
        if wrong:
            wrong.append(f"log:\n{all_said}")
        restores = fault in ("damaged", "damaged for good", "empty caches")
        moment = "compiling" if restores else "saving" if place == "checkpoints/" else "exporting" if (
            place == "export/") else "stepping"
        shutil.rmtree(self.home / name)
        return Outcome(moment, met, named, self.seconds, silent_s, wrong)

    def _judge(self, code: int | None, said: str) -> list[str]:
        wrong = ["it hangs"] * (code is None)
        wrong += ["a traceback"] * ("Traceback" in said or "Exception ignored" in said)
        wrong += [f"exit code {code}"] * (code not in (None, stops.DONE, stops.FAILED, stops.USER_ERROR))
        return wrong

    def _differences(self, name: str, fault: str, said: str) -> list[str]:
        got, wrong = self._outcome(name), []
        if got["rows"] != self.wanted["rows"]:
            wrong.append(f"rows of steps {[row['step'] for row in got['rows']]} differ")
        for key, sum_ in self.wanted["sums"].items():
            lacks = key not in got["sums"] and re.match(rf"(?!{STEPS}/)\d+/", key)
            if lacks and fault in soak.REFUSALS and re.search("not saved|not exported|cannot be|refused", said):
                continue        # the export of a checkpoint that was refused
            if got["sums"].get(key) != sum_:
                wrong.append(key)
        return [f"{', '.join(wrong[:3])} and {len(wrong)} in all differ or are not there"] if wrong else []
