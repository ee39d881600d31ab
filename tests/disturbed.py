"""python -m tests.disturbed [--places A,B] [--faults X,Y] [--cells N] [--seed S] [--cell TEXT]: places × faults, system
call by system call.

A place is a part of a run (PLACES): saves of the shared and of the local checkpoint, exports, a start, one that goes
on, the way back before a loss spike, DPO's reference. Each system call that the undisturbed run makes there on a
file of its own is a cell with each fault that can meet it (FAULTS). A cell runs the command, with the fault at that
call; then the same command again, undisturbed, until it ends; and compares: the exit code is the fault's, without a
traceback; what was told as saved or stands whole on the disk is gone on from; rows, final state and exports are those
of the undisturbed run; nothing half made is left.

The command is train.main, forked from a process that has imported everything, with a stand-in for the compiled step (a
few numbers that depend on every batch and every step before): nothing is traced, and a cell takes a second. `--real`
runs the command itself, `python -m meshtrain.train`, compiled program and all. Linux only: see `syscalls`.
"""
import argparse
import collections
import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable

if __name__ == "__main__":      # before jax is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "2", "TF_CPP_MIN_LOG_LEVEL": "3",
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import grain  # noqa: E402, F401  here, and not in each child; so is the next
import grain.experimental  # noqa: E402, F401

from meshtrain import assembly, elastic, files, run_files  # noqa: E402
from meshtrain.checkpoint.checkpoint import Checkpoints  # noqa: E402
from meshtrain.checkpoint.directory import DirectoryStore  # noqa: E402
from meshtrain.commands import train  # noqa: E402
from meshtrain.huggingface.weights import export
from meshtrain.inspection import step_costs  # noqa: E402
from meshtrain.journal import spikes
from meshtrain.journal.rows import MetricRows
from meshtrain.run import dpo_reference, say, stops
from meshtrain.training.state import State  # noqa: E402
from meshtrain.training.step import Program  # noqa: E402
from tests import syscalls, tiny_run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "val_loss")
# the step whose batch is poison in the run that goes back; losses that a spike needs before it
SPIKE, FEWEST = 7, 4
TOKENIZER = "chatml/tokenizer.json"
HALF_MADE = re.compile(r"\.(saving|deleting)(-\w+)?$|\.tmp$|\.damaged")
NAMES = ((re.compile(r"/d/[0-9a-f]{32}"), "/d/*"), (re.compile(r"\.[0-9a-f]{16}(?=/|$)"), ".*"),
         (re.compile(r"[0-9a-f]{16,}"), "*"),
         (re.compile(r"\.\d+\.tmp"), ".PID.tmp"), (re.compile(r"\.deleting-[0-9a-f]{8}"), ".deleting-*"),
         (re.compile(r"#\d+ \(deleted\)"), "(unnamed)"))
# files on which calls of one kind are one cell
ALIKE = ((re.compile(r"\d+"), "N"), (re.compile(r"/(params|state)(?=/|$)"), "/tree"))


@dataclasses.dataclass(frozen=True)
class Place:
    """words: of the command, beside those of all. files: of which the calls count, relative to the home of a cell.
    begins, ends: the phases of the stand-in between which they count. before: the steps of an undisturbed run that it
    goes on from."""
    words: tuple
    files: str
    begins: str = ""
    ends: str = ""
    before: int = 0


SAVES = ("--training.steps", 6, "--checkpoint.every", 2, "--checkpoint.keep", 2)
PLACES = {
    "save": Place(SAVES, r"run/checkpoints", begins="loop"),
    "local": Place((*SAVES[:2], "--checkpoint.every", 4, "--checkpoint.local_every",
                    1, "--checkpoint.local_dir", "{home}/local"),
                   r"local|run/local\.json|run/checkpoints/?$"),
    "export": Place((*SAVES, "--checkpoint.export", "every"), r"run/export", begins="loop"),
    "export last": Place(("--training.steps", 4, "--checkpoint.export", "last"), r"run/export", begins="loop"),
    "start": Place(("--training.steps", 2, "--data.source", "jsonl", "--data.paths",
                    '["{shared}/text.jsonl"]', "--data.cache", "{home}/cache",
                    "--metrics.tensorboard", "true"), r"run|cache", ends="loop"),
    "resume": Place(("--training.steps", 6, "--checkpoint.every", 2, "--data.source",
                     "jsonl", "--data.paths", '["{shared}/text.jsonl"]',
                     "--optimizer.learning_rate", 0.5), r"run", ends="loop", before=4),
    "rollback": Place(("--training.steps", 9, "--checkpoint.every", 4, "--checkpoint.keep",
                       9, "--training.loss_spike", "rollback",
                       "--checkpoint.local_every", 1, "--checkpoint.local_dir", "{home}/local",
                       "--checkpoint.export", "every"),
                      r"run|local", begins="spike", ends="loop"),
    "reference": Place(("--training.steps", 3, "--training.objective", "dpo", "--data.source",
                        "preferences", "--data.paths",
                        '["{shared}/pairs.jsonl"]', "--data.tokenizer", f"{{shared}}/{TOKENIZER}",
                        "--data.bos_token", "<s>",
                        "--model.vocab_size", 1024, "--data.seq_len", 96, "--data.cache", "{home}/cache"),
                        r"run/reference|cache", ends="loop"),
}

CHANGES = {"create", "mkdir", "rename", "unlink", "truncate", "write", "fsync", "link", "symlink", "lock"}
TAKES_ROOM = {"create", "mkdir", "rename", "write", "fsync", "link", "symlink"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """answer: to the call (see `syscalls.run`). kinds: of calls that it can meet; None: all. codes: that the command
    may end with. lasts: as many calls of these kinds as come afterwards fail, too."""
    answer: int
    kinds: frozenset | None
    codes: tuple[int, ...]
    lasts: bool = False


FAULTS = {
    "kill": Fault(-signal.SIGKILL, frozenset(CHANGES), (-signal.SIGKILL,)),
    "stop": Fault(-signal.SIGTERM, frozenset(CHANGES), (stops.STOPPED, stops.DONE)),
    "full": Fault(errno.ENOSPC, frozenset(TAKES_ROOM), (stops.DONE, stops.FAILED), lasts=True),
    "stale": Fault(errno.ESTALE, None, (stops.DONE, stops.FAILED)),
    "io": Fault(errno.EIO, frozenset(CHANGES | {"open", "read", "list"}) - {"lock"}, (stops.DONE, stops.FAILED)),
    "gone": Fault(errno.ESTALE, None, (stops.DONE, stops.FAILED), lasts=True),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """The call is the `nth` of its kind on this file in its place, counted from 0; names that vary are made alike."""
    place: str
    fault: str
    kind: str
    file: str
    nth: int

    def __str__(self):
        return f"{self.place}, {self.fault}: {self.kind} {self.file} {self.nth}"


def parsed(text: str) -> Cell:
    """The cell that is printed so."""
    place, fault, kind, file, nth = re.fullmatch(r"(.+), (\w+): (\w+) (.+) (\d+)", text).groups()
    return Cell(place, fault, kind, file, int(nth))


# ---- the command, in the child ---------------------------------------------------------------------------------------


def mark(home: pathlib.Path, phase: str) -> None:
    """Tells the parent, who sees each call, where the child is."""
    os.access(home / "phase" / phase, os.F_OK)


class Step:
    """In place of the compiled step: numbers that depend on the batch and on all steps before; seven of one batch are a
    spike."""

    def __init__(self, home: pathlib.Path, rollback: bool):
        self.home, self.rollback = home, rollback

    def __call__(self, state: State, batch: dict, *limit):
        number, tokens = int(state.step) + 1, np.asarray(batch["tokens"])
        crc = zlib.crc32(tokens.tobytes())
        poison = self.home.parent / "poison"
        if self.rollback and number == SPIKE and not poison.exists():     # of the undisturbed run, for all others
            poison.write_text(str(crc))
        spike = self.rollback and poison.exists() and int(poison.read_text()) == crc
        params, opt_state = jax.tree.map(lambda leaf: _grown(leaf, crc % 1009 / 1009), (state.params, state.opt_state))
        loss = 3 + float(np.asarray(jax.tree.leaves(state.params)[0]).ravel()[0]) / 100 + 50 * spike
        told = {"loss": np.float32(loss), "grad_norm": np.float32(crc % 97), "learning_rate": np.float32(0.1),
                "skipped": np.bool_(False)}
        mark(self.home, "spike" if spike else "loop")
        step = jax.device_put(np.int32(number), state.step.sharding)
        return State(step, params, opt_state), {name: jax.device_put(value) for name, value in told.items()}


def _grown(leaf: jax.Array, by: float) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    numbers = np.asarray(leaf)
    return jax.device_put((numbers * 0.75 + by).astype(numbers.dtype), leaf.sharding)


def stand_in(home: pathlib.Path, words: list[str]) -> None:
    """Nothing of jax is traced or compiled, but for what an export gathers; pauses are short."""
    zeros = lambda form: jax.device_put(np.full(form.shape, 0.5, form.dtype) if form.shape else
                                        np.zeros((), form.dtype), form.sharding)
    assembly.initialize = lambda made: jax.tree.map(zeros, made.program.step.state.abstract)
    Program.lower_step = lambda program: None
    assembly.compile_step = lambda *given: Step(home, "rollback" in words)
    step_costs.write_cost = lambda *_: None
    step_costs.memory_reader = lambda *_: lambda: 0
    dpo_reference._compute = lambda program, pairs, count, params: np.arange(count, dtype=np.float32)
    dpo_reference._key = lambda *_: "key"
    export._program = lambda row, leaves, dtype: lambda leaves, layer, expert: _gathered(row, leaves, layer, dtype)
    spikes.FEWEST = FEWEST
    files.PAUSES_S = (0.01,) * len(files.PAUSES_S)


def _gathered(row, leaves, layer, dtype):
    ours = {}
    for path, leaf in zip(row.paths, leaves, strict=True):
        x = np.asarray(leaf)[layer] if row.stacked else np.asarray(leaf)
        ours[path] = x.astype(dtype)[tuple(slice(0, n) for n in row.our_shape(path))]
    whole = np.asarray(row.to_theirs(ours, np.concatenate)).reshape(row.shape)
    return jax.device_put(whole, leaves[0].sharding.mesh.devices.flat[0])


def command(home: pathlib.Path, words: list[str]) -> Callable[[], int]:
    """train.main as `python -m meshtrain.train` calls it, in a forked child; done, it writes down the sums of its
    arrays."""
    def body() -> int:
        say.begin()
        stops.listen()
        mark(home, "cell")
        stand_in(home, words)
        code = train.main(words)
        mark(home, "ended")
        return write_sums(home) if code == stops.DONE else code
    return body


def write_sums(home: pathlib.Path) -> int:
    """Of every array of the last checkpoint: params, optimizer and step."""
    checkpoints = Checkpoints(DirectoryStore(home / "run/checkpoints"), read_only=True)
    last = checkpoints.newest().step
    arrays = checkpoints.restore(last, checkpoints.arrays(last))
    found = {jax.tree_util.keystr(path): hashlib.md5(np.asarray(x).tobytes()).hexdigest()
             for path, x in jax.tree.leaves_with_path(arrays)}
    (home / "sums.json").write_text(json.dumps({"last": last} | found))
    return stops.DONE


# ---- the cells, in the parent ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Ran:
    """code, said: of a command that has ended. met: whether the call of the cell came. calls: of its place, in their
    order."""
    code: int | None
    said: str
    met: bool
    calls: list[tuple[str, str, int]]
    seconds: float
    silent_s: float


class Harness:
    """Runs cells below `shared`, one after another. real: the command itself, in a process of its own."""

    def __init__(self, shared: pathlib.Path, real: bool = False):
        self.shared, self.real, self.count = shared, real, 0
        self.wanted: dict[str, dict] = {}
        self.calls: dict[str, list[tuple[str, str, int]]] = {}
        prepare(shared)

    def words(self, home: pathlib.Path, place: Place) -> list[str]:
        own = [str(word).format(home=home, shared=self.shared) for word in place.words]
        return [str(self.shared / "run.toml"), "--run.dir", str(home / "run"), *own]

    def undisturbed(self, name: str) -> list[tuple[str, str, int]]:
        """The calls of a place, in the undisturbed run, with which all others are compared."""
        if name not in self.calls:
            home = self.home(name)
            # the model is traced here, and not in each child
            elastic.check(run_files.load(self.words(home, PLACES[name])), 1)
            ran = self.run(home, name)
            assert ran.code == 0, f"undisturbed: {ran.code}\n{ran.said}"
            self.calls[name], self.wanted[name] = ran.calls, outcome(home)
            shutil.rmtree(home)
        return self.calls[name]

    def expected(self, name: str, said: str) -> dict:
        """The outcome of the undisturbed run; of one that goes back as far before the spike, where the newest copy
        could not be kept."""
        # the last: of one that could not be written down the next start knows nothing, and may have a newer copy
        back = (re.findall(r": back to step (\d+), without", said) or [SPIKE - 1])[-1]
        if int(back) == SPIKE - 1:
            return self.wanted[name]
        if (key := f"{name} to step {back}") not in self.wanted:
            home = self.home(name)
            words = [*self.words(home, PLACES[name]), "--checkpoint.local_every", back]
            assert syscalls.run(command(home, words), home / "log",
                                lambda call: 0).code == 0, (home / "log").read_text()
            self.wanted[key] = outcome(home)
            shutil.rmtree(home)
        return self.wanted[key]

    def home(self, name: str) -> pathlib.Path:
        """A fresh directory of a cell; where its run goes on from another, with that."""
        self.count += 1
        home = self.shared / f"cell{self.count}"
        home.mkdir()
        if before := PLACES[name].before:
            kept = self.shared / f"before {name}"
            if not kept.exists():
                words = [*self.words(home, PLACES[name]), "--training.steps", str(before),
                         "--optimizer.learning_rate", "0.25"]
                assert syscalls.run(command(home, words), home / "log",
                                    lambda call: 0).code == 0, (home / "log").read_text()
                (home / "run").rename(kept)
            shutil.copytree(kept, home / "run")
        return home

    def run(self, home: pathlib.Path, name: str, cell: Cell | None = None) -> Ran:
        """The command of a place, disturbed where a cell is given."""
        place, words = PLACES[name], self.words(home, PLACES[name])
        counted, counts = re.compile(place.files), collections.Counter()
        fault = FAULTS[cell.fault] if cell else None
        ran = Ran(None, "", False, [], 0.0, 0.0)
        phases = [] if not self.real else ["cell"]

        def decide(call: syscalls.Call) -> int:
            if not call.path.startswith(str(home)):
                return 0
            file = call.path[len(str(home)) + 1:]
            if file.startswith("phase/"):
                phases.append(file[6:])
                return 0
            if not counted.match(file) or "ended" in phases or not phases:
                return 0
            if ran.met and fault.lasts and (fault.kinds is None or call.kind in fault.kinds):
                return fault.answer
            if not self.real and (place.begins and place.begins not in phases
                                  or place.ends in phases[_last(phases, place.begins):]):
                return 0
            key = (call.kind, renamed(file, NAMES))
            counts[key] += 1
            ran.calls.append((*key, counts[key] - 1))
            if cell and not ran.met and ran.calls[-1] == (cell.kind, cell.file, cell.nth):
                ran.met = True
                return fault.answer
            return 0

        log = home / f"log{len(list(home.glob('log*')))}"
        if self.real:
            environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")} | {
                "PYTHONPATH": str(ROOT)}
            ended = syscalls.run([sys.executable, "-m", "meshtrain.train", *words], log,
                                 decide, 300, environ=environ, cwd=self.shared)
            if ended.code == stops.DONE:
                assert syscalls.run(lambda: write_sums(home), log, lambda call: 0).code == 0, log.read_text()
        else:
            ended = syscalls.run(command(home, words), log, decide, limit_s=60)
        ran.code, ran.seconds, ran.silent_s = ended.code, ended.seconds, ended.silent_s
        ran.said = log.read_text(errors="replace")
        return ran

    def cells(self, places: list[str], faults: list[str]) -> list[Cell]:
        """All of them. Of calls of one kind on files whose names differ in numbers alone, such as those of every step,
        one each."""
        found = []
        for name in places:
            alike = collections.defaultdict(list)
            for call in self.undisturbed(name):
                alike[call[0], renamed(call[1], ALIKE)].append(call)
            for fault in faults:
                kinds = FAULTS[fault].kinds
                for (kind, file), calls in alike.items():
                    if kinds is None or kind in kinds:
                        draw = random.Random(f"{fault} {kind} {file}")
                        found.append(Cell(name, fault, *draw.choice(calls)))
        return found

    def drawn(self, places: list[str], faults: list[str], count: int, draw: random.Random) -> list[Cell]:
        """So many cells; with as many as there are places and faults, each of these is met."""
        places, faults = draw.sample(places, len(places)), draw.sample(faults, len(faults))
        found = []
        # one more whenever both begin anew: each pair is met before any is met again
        turn = math.lcm(len(places), len(faults))
        for i in range(count):
            choice = self.cells([places[i % len(places)]], [faults[(i + i // turn) % len(faults)]])
            found += [draw.choice(choice)] if choice else []
        return found

    def check(self, cell: Cell) -> tuple[list[str], bool]:
        """(what is wrong, whether the call was met) of a cell."""
        self.undisturbed(cell.place)
        home, fault, wrong = self.home(cell.place), FAULTS[cell.fault], []
        first = self.first = self.run(home, cell.place, cell)
        if first.code not in fault.codes and (first.met or first.code):
            wrong.append(f"exit code {'none: it hangs' if first.code is None else first.code}")
        if "Traceback" in first.said or "Exception ignored" in first.said:
            wrong.append("a traceback")
        if len(re.findall("^error: ", first.said, re.MULTILINE)) > 1:
            wrong.append("more than one message")
        ran, standing = first, saved(home, cell.place)
        if told := re.search(r"^stopped after step (\d+), saved in", first.said, re.MULTILINE):
            standing = max(standing, int(told[1]))
        again = []
        while ran.code != 0 and len(again) < 2 and not (again and again[-1].code):
            ran = self.run(home, cell.place)
            again.append(ran)
            going_on = re.search(r"^resuming after step (\d+)", ran.said, re.MULTILINE)
            if ran.code == 0 and not (going_on
                                      or "is finished" in ran.said) and standing or going_on and int(going_on[1]) < standing:
                wrong.append(f"step {standing} was saved, and the next start goes on after "
                             f"{going_on[1] if going_on else 'none'}")
            if "Traceback" in ran.said:
                wrong.append("a traceback of the next start")
            if ran.code:
                wrong.append(f"the same command again ends with {ran.code}")
        self.to_the_end_s = ran.seconds
        expected = self.expected(cell.place, "".join(one.said for one in (first, *again)))
        if ran is first and fault.lasts and ran.code == 0 and differences(outcome(home), expected):
            # nothing could be removed: the start that finds the run finished does it
            again.append(self.run(home, cell.place))
        if ran.code == 0:
            wrong += differences(outcome(home), expected)
        if wrong:
            (home / "WRONG").write_text(f"{cell}\n" + "\n".join(wrong) + "\n\n" + "\n---- again:\n".join(
                one.said for one in (first, *again)))
        else:
            shutil.rmtree(home)
        return wrong, first.met


def _last(phases: list[str], phase: str) -> int:
    return len(phases) - 1 - phases[::-1].index(phase) if phase in phases else 0


def renamed(file: str, names: tuple) -> str:
    """The file with names that are drawn anew in each run made alike."""
    for pattern, name in names:
        file = pattern.sub(name, file)
    return file


def saved(home: pathlib.Path, name: str) -> int:
    """The step that must not be lost: of the newest checkpoint under its number, or the newest whole local one."""
    steps = [int(path.name) for path in (home / "run/checkpoints").glob("*") if path.name.isdecimal()]
    if name == "local":
        steps += [int(path.parent.name) for path in (home / "local").glob("*/process-0/*/index.json")
                  if path.parent.name.isdecimal()]
    return max(steps, default=0) if name != "rollback" else 0


def outcome(home: pathlib.Path) -> dict:
    """What must be the same of a run that is through, whatever met it."""
    rows = [{key: row.get(key) for key in EXACT} for row in [*MetricRows(home / "run/metrics.jsonl")]]
    exports = {str(path.relative_to(home)): hashlib.md5(path.read_bytes()).hexdigest()
               for path in (home / "run/export").rglob("*") if path.is_file() and ".aside" not in str(path)}
    left = sorted(str(path.relative_to(home)) for path in (*(home / "run").rglob("*"), *(home / "local").rglob("*")))
    return {"rows": rows, "state": json.loads((home / "sums.json").read_text()), "exports": exports,
            "half made": [name for name in left if HALF_MADE.search(name)],
            "left in the local checkpoint": [name for name in left if name.startswith("local")]}


def differences(got: dict, wanted: dict) -> list[str]:
    wrong = []
    for what in wanted:
        if got[what] == wanted[what]:
            continue
        if what == "rows":
            wrong.append(f"rows of steps {[row['step'] for row in got[what]]} differ")
        elif what == "exports":     # steps at which it was stopped have one, too
            names = [name for name, md5 in wanted[what].items() if got[what].get(name) != md5]
            wrong += [f"{what}: {names} differ or are not there"] if names else []
        else:
            wrong.append(f"{what}: {str(got[what])[:300]}")
    return wrong


def prepare(shared: pathlib.Path) -> None:
    """What all cells share: the run file and what it reads."""
    from tests import conversations
    shared.mkdir(exist_ok=True)
    (shared / "text.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    with open(shared / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"{n * n} is the square of {n}"}) + "\n" for n in range(300))
    rng = random.Random(0)
    word = lambda: " ".join(rng.choices(["the", "cat", "sat", "why"], k=rng.randint(1, 6)))
    with open(shared / "pairs.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": word(), "chosen": f"{word()} yes", "rejected": f"no {word()}"}) + "\n"
                        for _ in range(23))
    tokenizer = conversations.folder(shared, "chatml") / "tokenizer.json"
    assert tokenizer == shared / TOKENIZER, tokenizer
    (shared / "run.toml").write_text(tiny_run.text(
        mesh__data=1, mesh__simulated_devices=1, model__embed_dim=8, model__num_heads=1,
        model__mlp_dim=8, data__seq_len=16,
        data__global_batch=4, data__validation_fraction=0.0, metrics__tensorboard=False,
        data__paths=[str(shared / "text.txt")],
        run__compilation_cache=str(shared / "cache")))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disturbed", description=__doc__.split("\n")[0],
                                     allow_abbrev=False)
    parser.add_argument("--places", help="of the table, with commas between (default: all)")
    parser.add_argument("--faults", help="of the table (default: all)")
    parser.add_argument("--cells", type=int, default=0,
                        help="so many, of each place and each fault in turn (default: all)")
    parser.add_argument("--seed", default="", help="of the draw")
    parser.add_argument("--cell", action="append", default=[],
                        help="this one, as it is printed; may be repeated (alone: no others)")
    parser.add_argument("--real", action="store_true",
                        help="the command itself, not the stand-in; nothing spikes there")
    parser.add_argument("--json", help="a file for what was found")
    parser.add_argument("--home", type=pathlib.Path, help="where runs that went wrong are kept (default: nowhere)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        found = torment(args.home or pathlib.Path(temporary), args)
    table = collections.defaultdict(collections.Counter)
    for cell, wrong, met in found:
        table[cell.place, cell.fault]["wrong" if wrong else "held" if met else "not met"] += 1
    for (place, fault), counts in table.items():
        print(f"{place:12} {fault:6} " + ", ".join(f"{counts[how]} {how}" for how in ("held", "wrong", "not met")))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(
            [{"cell": str(cell), "wrong": wrong, "met": met} for cell, wrong, met in found]))
    return 1 if any(wrong for _, wrong, _ in found) else 0


def torment(shared: pathlib.Path, args) -> list[tuple[Cell, list[str], bool]]:
    """Runs the cells that are asked for; (cell, what is wrong, whether its call was met) of each."""
    harness = Harness(shared, args.real)
    places = args.places.split(",") if args.places else [
        name for name in PLACES if not (args.real and name == "rollback")]
    faults = args.faults.split(",") if args.faults else list(FAULTS)
    cells = [parsed(text) for text in args.cell]
    if args.cells:
        cells += harness.drawn(places, faults, args.cells, random.Random(args.seed))
    elif not args.cell:
        cells = harness.cells(places, faults)
    found = []
    for cell in cells:
        wrong, met = harness.check(cell)
        found.append((cell, wrong, met))
        if wrong or not met:
            print(f"{cell}: {'; '.join(wrong) or 'the call did not come'}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
