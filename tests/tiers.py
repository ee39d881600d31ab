"""Three tiers of tests, and parts of them by number.

core    every claim of README.md once. What `pytest` runs
full    `pytest.mark.full`, or full by tests/tiers.toml: the other tests that end within seconds. `pytest --full`
long    `pytest.mark.long`: minutes, or one of very many cells (`pytest.mark.cell`, too). `pytest --long`

`--part I/N` takes every N-th test of what is chosen, by its position in the list sorted by name: N parts are all of it,
each test once. `--landing N` takes parts of all tests but the core's, LANDINGS of which are all: every LANDINGS-th block of a
file, in BLOCKS of neighbours, which share runs, references and compiled programs. A test file that is named runs its core
and full tests; a test that is named by `::` runs in any case.
"""
import argparse
import collections
import dataclasses
import itertools
import re
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

TIERS = ("core", "full", "long")
TABLE = Path(__file__).with_suffix(".toml")
OPTIONS = {"core": "pytest", "full": "pytest --full", "long": "pytest --long"}
LANDINGS = {"full": 48, "cell": 48, "long": 240}      # parts of the full tests, of cells, of the other long tests
BLOCKS = {"full": 8, "cell": 8, "long": 1}           # tests at most


def add_options(parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--full", action="store_true", help="the tests of tier full instead of the core")
    group.addoption("--long", action="store_true", help="the tests of tier long instead of the core")
    group.addoption("--landing", type=int, metavar="N", help="the parts of the full and long tests that landing N runs: "
                    + ", ".join(f"{name} N mod {count}" for name, count in LANDINGS.items()))
    group.addoption("--part", type=read_part, metavar="I/N", help="every N-th of the chosen tests, from number I, 0 to N-1")


def read_part(text: str) -> tuple[int, int]:
    """I and N of --part."""
    if not (found := re.fullmatch(r"(\d+)/(\d+)", text)) or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N-1, such as 0/4")
    return int(found[1]), int(found[2])


def take_part(names: Sequence[str], number: int, count: int) -> set[str]:
    """Every `count`-th name, by its position in the sorted list: `count` parts differ by one name at most."""
    return set(sorted(names)[number::count])


def take_landing(groups: Mapping[str, str], number: int) -> set[str]:
    """The tests that a landing runs. groups: name of a test -> its key of LANDINGS. The turn of a block follows from its
    file and its place in it: a test that comes or goes changes no other file's turns, and a failed landing that is
    mended runs what failed."""
    taken = set()
    for group, count in LANDINGS.items():
        blocks = cut_blocks([name for name, of in groups.items() if of == group], BLOCKS[group])
        for file, of_file in itertools.groupby(blocks, key=lambda block: file_of(block[0])):
            first = zlib.crc32(f"{group} {file}".encode())
            taken.update(name for n, block in enumerate(of_file) if (first + n - number) % count == 0 for name in block)
    return taken


def file_of(name: str) -> str:
    return name.partition("::")[0]


def cut_blocks(names: Iterable[str], size: int) -> list[list[str]]:
    """The names, sorted, cut into blocks of at most `size` of one file each."""
    files = itertools.groupby(sorted(names), key=file_of)
    return [block[first:first + size] for _, found in files for block in [list(found)] for first in range(0, len(block), size)]


@dataclasses.dataclass(frozen=True)
class Table:
    """tests/tiers.toml. Files stand without their suffix. full: file -> those of its tests that are core all the same;
    core: file -> those of its tests that are full."""
    full: Mapping[str, set[str]]
    core: Mapping[str, set[str]]

    def tier(self, item) -> str:
        file, names = item.path.stem, names_of(item)
        if file in self.full:
            return "core" if names & self.full[file] else "full"
        return "full" if names & self.core.get(file, set()) else "core"


def read_table() -> Table:
    return Table(**{tier: {file: set(tests) for file, tests in files.items()}
                    for tier, files in tomllib.loads(TABLE.read_text()).items()})


def tier_of(item, table: Table) -> str:
    """By the test's marks, else by the table."""
    return next((mark.name for mark in item.iter_markers() if mark.name in TIERS), None) or table.tier(item)


def names_of(item) -> set[str]:
    """The names by which the table may mean a test: the whole function's and its cell's."""
    return {item.name, item.name.partition("[")[0]}


def find_stale(items: Iterable, table: Table) -> list[str]:
    """Tests of the table that are not in their file. items: whole files."""
    named = {**table.full, **table.core}
    there: dict[str, set[str]] = collections.defaultdict(set)
    for item in items:
        there[item.path.stem] |= names_of(item)
    return [f"{file}: {name}" for file in sorted(named) if file in there for name in sorted(named[file] - there[file])]


def choose_tiers(args: Sequence[str], full: bool, long: bool) -> set[str]:
    """The tiers that a command asks for. args: the folders, files and tests that it names."""
    if full or long:
        return {name for name, asked in (("full", full), ("long", long)) if asked}
    if any("::" in arg for arg in args):
        return set(TIERS)
    return {"core", "full"} if any(arg.endswith(".py") for arg in args) else {"core"}


class Selection:
    """The plugin that deselects the tests of other tiers and parts, and says at the end how many and how to run them.
    """

    def __init__(self, config):
        self._part, self._landing = config.option.part, config.option.landing
        if self._landing is not None and (config.option.full or config.option.long or self._part):
            raise pytest.UsageError("--landing chooses the tiers and their parts; leave --full, --long and --part out")
        self._tiers = ({"full", "long"} if self._landing is not None else
                       choose_tiers(config.args, config.option.full, config.option.long))
        self._table = read_table()
        self._left: dict[str, int] = {}
        self._passed_over = 0

    def pytest_ignore_collect(self, collection_path):
        """A file without a core test is not read for the core: it costs each worker what it imports."""
        if self._tiers == {"core"} and self._table.full.get(collection_path.stem) == set():
            self._passed_over += 1
            return True
        return None

    @pytest.hookimpl(wrapper=True)      # chooses among what -m and -k leave
    def pytest_collection_modifyitems(self, config, items):
        if not any("::" in arg for arg in config.args) and (stale := find_stale(items, self._table)):
            raise pytest.UsageError(f"{TABLE.name} names tests that are not there: {'; '.join(stale)}")
        yield
        tiers = {item.nodeid: tier_of(item, self._table) for item in items}
        kept = {name for name, tier in tiers.items() if tier in self._tiers}
        counts = collections.Counter(tiers.values())
        self._left = {tier: counts[tier] for tier in TIERS if tier not in self._tiers and counts[tier]}
        if self._part or self._landing is not None:
            groups = {item.nodeid: "cell" if item.get_closest_marker("cell") else tiers[item.nodeid]
                      for item in items if item.nodeid in kept}
            taken = take_part(kept, *self._part) if self._part else take_landing(groups, self._landing)
            self._left["other parts"] = len(kept) - len(taken)
            kept = taken
        if self._passed_over:
            self._left["files"] = self._passed_over
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
        if hasattr(config, "workeroutput"):
            config.workeroutput["left"] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._left = getattr(node, "workeroutput", {}).get("left", self._left)

    def pytest_terminal_summary(self, terminalreporter):
        reasons = collections.Counter(str(report.longrepr[2]).removeprefix("Skipped: ")
                                      for report in terminalreporter.getreports("skipped")
                                      if isinstance(report.longrepr, tuple))
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"skipped: {count} ({reason})")
        if self._landing is not None:
            terminalreporter.write_line(f"landing {self._landing}: " + ", ".join(
                f"{name} {self._landing % count}/{count}" for name, count in LANDINGS.items()))
        files = self._left.pop("files", 0)
        for name, count in self._left.items():
            how = f"run by `{OPTIONS[name]}`" if name in OPTIONS else "run with another number"
            more = f" and {files} files" if files and name == "full" else ""
            terminalreporter.write_line(f"not run: {count:,} tests{more} of {name}, {how}")
