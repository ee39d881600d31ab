"""Local (per-host) checkpoints: every few steps each process saves its own shards on its host, on disk or in memory.

    <local_dir>/<run>/process-<index>/<step>/   shards: bytes of `pieces`; index.json: metadata and index, checksummed
    <local_dir>/<run>/process-<index>/.saving/  being written

With several hosts, each host also keeps the files of another host (`partner`); a replaced host fetches its files from
there. A local checkpoint is used if every process finds all the pieces that it needs on its host. These pieces must be
of one step and one start, newer than the shared checkpoint, and have matching checksums. Otherwise the shared
checkpoint is used, and a line says why. run.dir/local.json names the start whose pieces are valid: pieces of other runs
or of discarded steps are never used. Mesh and process count may change if the pieces are on the host. Source: Gemini's
in-memory checkpoints (SOSP 2023). This module knows no model.

A run in a bucket also saves here while the bucket accepts no checkpoint (`Checkpoints.fallback`).
"""
from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash

from meshtrain import files, jax_private
from meshtrain.checkpoint import partner, pieces
from meshtrain.checkpoint.pieces import DamagedPiece, Index, Piece, Region
from meshtrain.checkpoint.saved import FORMAT, BackgroundSaves, Saved, part_of, tell_widened, widens
from meshtrain.checkpoint.store import OPTIONAL, PARAMS, ArrayForm, forms_of
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.run import say, trees

LINEAGE, INDEX, SHARDS = "local.json", "index.json", "shards"
LOCAL_FORMAT = 2        # version of index.json; other versions are refused
AT_ONCE = 4             # threads that read pieces


class _Part(NamedTuple):
    """One process's files of a step on this host. document: the content of index.json."""
    process: int
    step: int
    document: dict


class LocalCheckpoints(BackgroundSaves):
    """The local checkpoints of one run. All processes make the same calls.

    local_dir: a directory that every host has. every: steps between regular saves. fallback: a directory of this run
    alone, used if local_dir is empty; regular saves are not due there. Without both directories, nothing is saved or
    found. Raises: ConfigError, in every process, if one process cannot write to local_dir.
    """

    def __init__(self, local_dir: str, every: int, run_dir: Path, tell: Callable[[str], None] = say.err,
                 fallback: Path | None = None):
        super().__init__(every if local_dir else 0, tell)
        self.name = "checkpoint.local_dir" if local_dir else str(fallback)
        self._fallback = None if local_dir else fallback
        self._lineage_file = Path(run_dir) / LINEAGE
        self._root = Path(local_dir).absolute() if local_dir else fallback
        self._lineage = agree.on_first(self._read_lineage)
        self._failure, self._reported = "", ""
        self._started, self._whole = 0, 0     # last step whose save began; last step complete in every process
        agree.everywhere(self._check_writable)
        # step -> (array -> the pieces that `newest` has verified, array -> its form)
        self._used: dict[int, tuple[dict[str, list[Piece]], dict[str, ArrayForm]]] = {}
        self._exchange, self._partner, self._without = None, None, ""
        if self.every and jax.process_count() > 1:
            self._meet()

    def _meet(self) -> None:
        """Choose this process's partner and exchange the addresses of all processes."""
        hosts = agree.exchange(agree.everywhere(lambda: partner.host_of(self._root)))
        if (other := partner.partner_of(hosts, jax.process_index())) is None:
            return
        secret = agree.on_first(lambda: secrets.token_hex(partner.SECRET_BYTES))
        self._exchange = partner.Exchange(self._place, (SHARDS, INDEX), secret, jax_private.coordinator_host(),
                                          self.tell)
        self._at = agree.exchange(self._exchange.at)
        self._partner = other

    def newest(self, after: int, wanted: Any) -> Saved | None:
        """Return the newest step after `after` that can be restored onto `wanted`; None if no step can. wanted: a
        pytree of jax.ShapeDtypeStruct with shardings. Every process reads its pieces; all return the same step."""
        self._join()
        self._fetch_missing(after)
        parts = collections.defaultdict(list)
        for part in self._parts():
            parts[part.step].append(part)
        steps = agree.exchange([step for step in parts if step > after])
        for step in sorted({step for some in steps for step in some}, reverse=True):
            faults = agree.exchange([socket.gethostname(), self._fault(step, parts[step], wanted)])
            bad = [f"process {index} on {host}: {fault}" for index, (host, fault) in enumerate(faults) if fault]
            if not bad:
                self._whole = step
                return Saved(self, step, agree.on_first(lambda: parts[step][0].document["metadata"]))
            if jax.process_index() == 0:
                more = f" and {len(bad) - 1} more" * (len(bad) > 1)
                self.tell(f"{self.name}: step {step} is not used ({bad[0]}{more}); resuming from an older checkpoint")
        return None

    def _fetch_missing(self, after: int) -> None:
        """Fetch this process's files of the newest step for which some host has the files of every process."""
        if agree.exchange(self._exchange is None)[0]:
            return
        held = agree.exchange([[part.process, part.step] for part in self._parts() if part.step > after])
        where = {(process, step): index for index, some in reversed(list(enumerate(held))) for process, step in some}
        me, everyone = jax.process_index(), range(jax.process_count())
        whole = [step for step in {step for _, step in where} if all((process, step) in where for process in everyone)]
        if not whole or [me, max(whole)] in held[me]:
            return
        other, step = where[me, max(whole)], max(whole)
        try:
            self._exchange.fetch(self._at[other], me, step)
            self.tell(f"{self.name}: process {me} fetched its part of step {step} from process {other}, whose "
                      f"host kept a copy")
        except OSError as error:
            self.tell(f"{self.name}: the copy of step {step} that process {other} keeps cannot be fetched "
                      f"({files.describe(error)})")

    def forms(self, step: int, *, only_params: bool = False) -> dict[str, ArrayForm]:
        return {name: form for name, form in self._used[step][1].items()
                if not only_params or name.startswith(f"{PARAMS}/")}

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore arrays of a step that `newest` has returned, with the shardings of `wanted`. `wanted` may lack arrays
        of the step. Raises: FileSystemError if a piece cannot be read."""
        try:
            used, stored = self._used[step]
            if wider := [name for name, form in forms_of(wanted).items() if widens(stored[name], form)]:
                tell_widened(f"step {step} in {self._home()}", wider)
            return pieces.restore(wanted, used, stored, self._read, AT_ONCE)
        except (KeyError, OSError, DamagedPiece, ValueError):
            raise files.FileSystemError(f"{self.name}: step {step} in {self._home()} cannot be read, although its "
                                        f"checksums have just matched; check the file system and start again") from None

    def begin(self, step: int, used: bool) -> None:
        """Set which local checkpoints are valid, before training continues after `step`: the checkpoints of this start
        and, if `used`, the checkpoint of `step` from which this start resumed. All others of this run are removed."""
        self._join()
        lineage = self._lineage
        if lineage is None and self._root is None:
            return
        at = str(self._lineage_file.parent.resolve())

        def write():
            run = lineage["run"] if lineage else f"{self._lineage_file.parent.absolute().name}-{secrets.token_hex(8)}"
            since = [lineage["start"], step] if lineage and used else None
            if since and lineage["from"] and lineage["from"][1] == step:
                since = lineage["from"]
            new = {"run": run, "at": at, "start": secrets.token_hex(8), "from": since}
            files.attempt(lambda: files.replace(self._lineage_file, json.dumps(new)),
                          f"{self._lineage_file} cannot be written",
                          "give a run.dir that can be written", ConfigError)
            return new

        self._lineage = agree.on_first(write)
        self._started, self._whole = step, step if used else 0
        self._failure = ""
        self._remove(lambda other: not used or other != step)
        for place in self._places(".coming-*"):
            files.remove(place)
        if self._fallback is not None:      # of runs that used this directory before
            for place in self._fallback.glob("*"):
                if place != self._home():
                    files.remove(place)

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving this process's shards of `state` and `metadata` (JSON); return the seconds that the copy to the
        host blocked. The previous step is removed when all processes have saved this one. A failure never stops
        training; the same failure is reported once."""
        began = time.perf_counter()
        self._settle()
        self._started = step
        document = {"format": LOCAL_FORMAT, "start": self._lineage["start"], "metadata": {"format": FORMAT, **metadata}}
        self._start(self._write, step, document, Index.begin(state), list(pieces.own(state, copies=True)))
        return time.perf_counter() - began

    def last(self) -> int:
        """Wait for a save. Return the newest step that all have saved, or that `newest` has returned; 0: none."""
        self._settle()
        return self._whole

    def forget(self) -> None:
        """Remove all local checkpoints of this run, because a shared checkpoint is newer."""
        self._join()
        if self._lineage is not None and self._root is not None:
            agree.exchange(None)        # barrier: no process is writing
            files.remove(self._home())

    def _settle(self) -> None:
        """Wait for the last save. Remove older steps if it succeeded everywhere, else report it and remove it."""
        self._join()
        bad = [f"process {index}: {text}" for index, text in enumerate(agree.exchange(self._failure)) if text]
        if self._started <= self._whole:
            return
        if not bad:
            self._whole = self._started
            self._remove(lambda step: step < self._whole)
            return
        if (message := "; ".join(bad[:4])) != self._reported and jax.process_index() == 0:
            self.tell(f"step {self._started} is not saved in {self.name} ({message}); training continues, and the "
                      f"step saved before is kept")
        self._reported, self._failure = message, ""
        self._remove(lambda step: step == self._started)

    def _write(self, step: int, document: dict, index: Index, own: list[tuple[str, Region, np.ndarray]]) -> None:
        place = self._own() / ".saving"
        try:
            files.remove(place)
            place.mkdir(parents=True)
            with open(place / SHARDS, "wb") as file:
                file.writelines(index.add(SHARDS, own))
            text = json.dumps(document | index.as_json())
            (place / INDEX).write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}", encoding="utf-8")
            _delete(self._own() / str(step))
            place.rename(self._own() / str(step))
        except Exception as error:
            files.remove(place)
            self._failure = files.describe(error)
            return
        if self._partner is not None and not self._without:
            try:
                self._exchange.send(self._at[self._partner], jax.process_index(), step)
            except OSError as error:
                self._without = files.describe(error)
                self.tell(f"{self.name}: process {jax.process_index()} cannot send copies to process "
                          f"{self._partner} ({self._without}); training continues without them")

    def _home(self) -> Path:
        return self._root / self._lineage["run"]

    def _place(self, process: int, step: int) -> Path:
        return self._home() / f"process-{process}" / str(step)

    def _own(self) -> Path:
        return self._home() / f"process-{jax.process_index()}"

    def _read_lineage(self) -> dict | None:
        """Return the content of local.json, which identifies the run and its start; None if it is missing or invalid.
        Process 0 calls it. A copied or moved run.dir counts as another run; a linked run.dir counts as the same run."""
        try:
            lineage = json.loads(files.patiently(lambda: self._lineage_file.read_text(encoding="utf-8")))
            here = Path(lineage["at"]).resolve() == self._lineage_file.parent.resolve()
            return lineage if here and lineage["start"] and "from" in lineage else None
        except OSError as error:
            if not files.is_mistake(error):     # falling back here would repeat steps that are saved
                raise files.error_to_raise(error, f"{self._lineage_file} cannot be read", "") from None
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def _check_writable(self) -> None:
        if not self.every:
            return

        def write() -> None:
            self._root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._root).close()      # unnamed: a kill leaves nothing

        files.attempt(write, f"checkpoint.local_dir={self._root} cannot be written",
                      "give a directory that every host has and can write, e.g. below /dev/shm or on its own disk",
                      ConfigError)

    def _places(self, pattern: str) -> Iterator[Path]:
        """Return the paths that match `pattern` in the run's directory of each process on this host."""
        return iter(()) if self._root is None or self._lineage is None else self._home().glob(f"process-*/{pattern}")

    def _parts(self) -> list[_Part]:
        """Return the parts on this host that belong to the valid start. Unreadable parts are left out."""
        parts = []
        for place in self._places("*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                process, step = int(place.parent.name.removeprefix("process-")), int(place.name)
                digest, text = files.patiently(lambda: (place / INDEX).read_text(encoding="utf-8")).split("\n")
                start = (document := json.loads(text))["start"]
                is_valid = start == self._lineage["start"] or [start, step] == self._lineage["from"]
                if is_valid and digest == xxhash.xxh3_128_hexdigest(text.encode()):
                    parts.append(_Part(process, step, document))
        return parts

    def _read(self, name: str, start: int, stop: int) -> bytes:
        with open(self._home() / name, "rb", buffering=0) as file:
            return files.patiently(lambda: os.pread(file.fileno(), stop - start, start))

    def _fault(self, step: int, parts: list[_Part], wanted: Any) -> str:
        """Return why this process cannot restore from the pieces on its host; empty if it can. Reads the pieces that
        its devices need: its own pieces, then the pieces of other processes."""
        if not parts:
            return "its host has no files of this step"
        used, damaged, leaves = {}, "", trees.leaves_of(wanted)
        for part in sorted(parts, key=lambda part: part.process != jax.process_index()):
            if part.document.get("format") != LOCAL_FORMAT:
                return "another version of meshtrain has written its files"
            index = Index.read(part.document)
            stored, held = index.forms(), index.by_array(f"process-{part.process}/{step}/")
            for absent in {*OPTIONAL} - {*map(part_of, stored)}:
                leaves = {name: leaf for name, leaf in leaves.items() if part_of(name) != absent}
            for name, form in forms_of(leaves).items():
                if stored.get(name) != form and not widens(stored.get(name), form):
                    return f"its {name} has another shape or dtype"
            for name, leaf in leaves.items():
                of = used.setdefault(name, {})
                for piece in pieces.select_needed(held[name], leaf):       # pieces of a step are equal or disjoint
                    if piece.region not in of:
                        try:
                            pieces.fetch(piece, stored[name][1], self._read)
                            of[piece.region] = piece
                        except (OSError, DamagedPiece) as error:
                            damaged = damaged or files.describe(error)
        for name, leaf in leaves.items():
            for asked in pieces.regions_here(leaf):
                present = sum(pieces.volume(pieces.intersection(region, asked)) for region in used[name])
                if present != pieces.volume(asked):
                    return damaged or f"a part of {name} that it needs is not on its host"
        self._used[step] = {name: list(of.values()) for name, of in used.items()}, stored
        return ""

    def _remove(self, doomed: Callable[[int], bool]) -> None:
        """Remove the steps of this run on this host for which doomed(step) is true, of all processes."""
        for place in self._places("*"):
            if place.name.isdecimal() and doomed(int(place.name)):
                _delete(place)


def _delete(place: Path) -> None:
    """Remove the index first, so that a partial deletion is never restored."""
    with contextlib.suppress(OSError):
        os.unlink(place / INDEX)
    files.remove(place)
