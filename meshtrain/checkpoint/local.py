"""Local (per-host) checkpoints: every few steps each process saves its own shards on its host, on disk or in memory.

    <local_dir>/<run>/process-<index>/<step>/   shards: concatenated bytes; index.json: run, offsets, checksum
    <local_dir>/<run>/process-<index>/.saving/  being written

Of several hosts each also has the files of another (`partner`), from which a host that was replaced gets its own back.
A local checkpoint is used if every process then finds on its host all the pieces that it needs, of one step and one
start, newer than the shared checkpoint, with matching checksums; else the shared one, with a line that says why.
run.dir/local.json names the start whose pieces are valid: those of other runs or discarded steps are never used. Mesh
and process count may change if the pieces are on the host. Source: Gemini's in-memory checkpoints (SOSP 2023). This
module knows no model.

A run in a bucket saves here, too, while the bucket takes no checkpoint (`SharedCheckpoints.fallback`).
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from meshtrain import files, jax_private
from meshtrain.checkpoint import partner
from meshtrain.checkpoint.pieces import Region, intersection, region_of, slices, volume
from meshtrain.checkpoint.shared import FORMAT, Saved, tell_widened, widens
from meshtrain.cluster import agree
from meshtrain.config import ConfigError
from meshtrain.run import say, trees

LINEAGE, INDEX, SHARDS = "local.json", "index.json", "shards"


@dataclasses.dataclass(frozen=True)
class _Part:
    """One process's local checkpoint of a step. pieces: (array, region) -> offset in the file. sum: [bytes, xxh3-128].
    """
    place: Path
    metadata: dict
    arrays: dict
    pieces: dict[tuple[str, Region], int]
    sum: list


class LocalCheckpoints:
    """The local checkpoints of one run. All processes make the same calls. Without a directory it saves and finds
    nothing. fallback: a directory of this run alone, used where there is no local_dir; nothing is due there. Raises:
    ConfigError, in every process, if one cannot write to local_dir."""

    def __init__(self, local_dir: str, every: int, run_dir: Path, tell: Callable[[str], None] = say.err,
                 fallback: Path | None = None):
        self.every, self.tell = every if local_dir else 0, tell
        self.name = "checkpoint.local_dir" if local_dir else str(fallback)
        self._fallback = None if local_dir else fallback
        self._lineage_file = Path(run_dir) / LINEAGE
        self._root = Path(local_dir).absolute() if local_dir else fallback
        self._lineage = agree.on_first(self._read_lineage)
        self._start = ""
        self._thread: threading.Thread | None = None
        self._failure, self._reported = "", ""
        # last step whose save began; last step complete in every process
        self._started, self._whole = 0, 0
        agree.everywhere(self._check_writable)
        self._used: dict[int, list[_Part]] = {}     # step -> the parts that `newest` has verified
        self._exchange, self._partner, self._without = None, None, ""
        if self.every and jax.process_count() > 1:
            self._meet()

    def _meet(self) -> None:
        """Finds this process's partner; each process tells the others where it may be reached."""
        hosts = agree.exchange(agree.everywhere(lambda: partner.host_of(self._root)))
        if (other := partner.partner_of(hosts, jax.process_index())) is None:
            return
        secret = agree.on_first(lambda: secrets.token_hex(partner.SECRET_BYTES))
        self._exchange = partner.Exchange(self._place, (SHARDS, INDEX), secret, jax_private.coordinator_host())
        self._at = agree.exchange(self._exchange.at)
        self._partner = other

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def newest(self, after: int, wanted: Any) -> Saved | None:
        """The newest step after `after` that can be restored onto `wanted`; None if there is none. wanted: a pytree of
        jax.ShapeDtypeStruct with shardings. Every process reads its pieces; all return the same decision."""
        self._join()
        self._fetch_missing(after)
        found = self._parts()
        steps = agree.exchange(sorted(step for step in found if step > after))
        for step in sorted({step for one in steps for step in one}, reverse=True):
            fault = self._fault(step, found[step], wanted) if step in found else "it has no part of it"
            faults = agree.exchange([socket.gethostname(), fault])
            bad = [f"process {index} on {host}: {fault}" for index, (host, fault) in enumerate(faults) if fault]
            if not bad:
                return Saved(self, step, agree.on_first(lambda: found[step][0].metadata))
            if jax.process_index() == 0:
                more = f" and {len(bad) - 1} more" * (len(bad) > 1)
                self.tell(f"{self.name}: step {step} is not used ({bad[0]}{more}); going on from an older "
                          f"checkpoint")
        return None

    def _fetch_missing(self, after: int) -> None:
        """Gets this process's files of the newest step that all processes' files exist of, on whatever host."""
        if agree.exchange(self._exchange is None)[0]:
            return
        held = agree.exchange([[process, step] for process, step in self._held() if step > after])
        where = {(process, step): index for index, some in reversed(list(enumerate(held))) for process, step in some}
        me, everyone = jax.process_index(), range(jax.process_count())
        whole = [step for step in {step for _, step in where} if all((process, step) in where for process in everyone)]
        if not whole or [me, max(whole)] in held[me]:
            return
        other, step = where[me, max(whole)], max(whole)
        try:
            self._exchange.fetch(self._at[other], me, step)
            self.tell(f"{self.name}: process {me} has its part of step {step} from process {other}, whose "
                      f"host kept a copy")
        except OSError as error:
            self.tell(f"{self.name}: the copy of step {step} that process {other} keeps cannot be fetched "
                      f"({files.said(error)})")

    def restore(self, step: int, wanted: Any, *, part: bool = False) -> Any:
        """Restore arrays of a step found by `newest` to the shardings of `wanted`, which may be a part of them."""
        if not (parts := self._used.get(step)):
            raise files.FileSystemError(f"{self.name}: step {step} in {self._home()}, whose checksums have "
                                        f"just held, cannot be read any more; see to the file system and start again")
        where = {piece: (part, offset) for part in parts for piece, offset in part.pieces.items()}
        maps = {part.place: np.memmap(part.place / SHARDS, np.uint8, "r") for part in parts}
        if wider := [name for name, leaf in trees.leaves_of(wanted).items()
                     if widens(parts[0].arrays[name], [list(leaf.shape), leaf.dtype])]:
            tell_widened(f"step {step} in {self._home()}", wider)

        def array(path, leaf):
            name = trees.name(path)
            mine = {region: at for (other, region), at in where.items() if other == name}

            def region(index):
                asked = region_of(index, leaf.shape)
                whole = np.empty([hi - lo for lo, hi in asked], leaf.dtype)
                for held, (part, offset) in mine.items():
                    if (common := intersection(held, asked)) is not None:
                        shape = [hi - lo for lo, hi in held]
                        dtype = jnp.dtype(part.arrays[name][1])
                        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                        piece = maps[part.place][offset:offset + size].view(dtype).reshape(shape)
                        whole[slices(common, asked)] = piece[slices(common, held)]
                return whole

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, region)

        return jax.tree.map_with_path(array, wanted)

    def begin(self, step: int, used: bool) -> None:
        """Training is about to continue after `step`: from now on only this start's checkpoints are valid and, if
        `used`, the one it resumed from. All others of this run are removed."""
        self._join()
        lineage, self._start = self._lineage, secrets.token_hex(8)
        if lineage is None and self._root is None:
            return
        at = str(self._lineage_file.parent.resolve())

        def write():
            run = lineage["run"] if lineage else f"{self._lineage_file.parent.absolute().name}-{secrets.token_hex(8)}"
            since = [lineage["start"], step] if lineage and used else None
            if since and lineage["from"] and lineage["from"][1] == step:
                since = lineage["from"]
            new = {"run": run, "at": at, "start": self._start, "from": since}
            files.attempted(lambda: files.replace(self._lineage_file, json.dumps(new)),
                            f"{self._lineage_file} cannot be written",
                            "give a run.dir that can", ConfigError)
            return new

        self._lineage = agree.on_first(write)
        self._start, self._started, self._whole = self._lineage["start"], step, step if used else 0
        self._failure = ""
        self._remove(lambda other: not used or other != step)
        if self._root is not None:
            for place in self._home().glob("process-*/.coming-*"):
                files.remove(place)
        if self._fallback is not None:      # of runs that had this place before
            for place in self._fallback.glob("*"):
                if place != self._home():
                    files.remove(place)

    def save(self, step: int, state: Any, metadata: dict) -> float:
        """Start saving this process's shards of `state` and `metadata` (JSON); return the seconds blocked, for the
        copy to the host. The previous step is removed once all processes have this one. The first failure is reported;
        none stops training."""
        began = time.perf_counter()
        self._settle()
        self._started = step
        arrays, pieces = {}, []
        for name, leaf in trees.leaves_of(state).items():
            arrays[name] = [list(leaf.shape), str(leaf.dtype)]
            held = {region_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
            pieces += [(name, region, data) for region, data in held.items()]
        for *_, data in pieces:
            data.copy_to_host_async()
        # the next step may donate the buffers
        copies = [(name, region, np.array(data)) for name, region, data in pieces]
        document = {"start": self._start, "metadata": {"format": FORMAT, **metadata}, "arrays": arrays}
        self._thread = threading.Thread(target=self._write, args=(step, document, copies))
        self._thread.start()
        return time.perf_counter() - began

    def last(self) -> int:
        """The newest step that every process has kept since `begin`; 0: none. Waits for a save in progress."""
        self._settle()
        return self._whole

    def forget(self) -> None:
        """Remove all local checkpoints of this run: a shared one is newer."""
        self._join()
        if self._lineage is not None and self._root is not None:
            agree.exchange(None)        # barrier: no process is writing
            files.remove(self._home())

    def _settle(self) -> None:
        """Process the last save's result in all processes."""
        self._join()
        failures = agree.exchange(self._failure)
        bad = [f"process {index}: {text}" for index, text in enumerate(failures) if text]
        if self._started <= self._whole:
            return
        if not bad:
            self._whole = self._started
            self._remove(lambda step: step < self._whole)
            return
        if (message := "; ".join(bad[:4])) != self._reported and jax.process_index() == 0:
            self.tell(f"step {self._started} is not kept in {self.name} ({message}); training goes on, with "
                      f"what was kept before")
        self._reported, self._failure = message, ""
        self._remove(lambda step: step == self._started)

    def _write(self, step, document, copies) -> None:
        place = self._own() / ".saving"
        try:
            files.remove(place)
            place.mkdir(parents=True)
            digest, offset, where = xxhash.xxh3_128(), 0, []
            with open(place / SHARDS, "wb", buffering=0) as file:
                for name, region, data in copies:
                    left = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
                    digest.update(left)
                    where.append([name, region, offset])
                    offset += len(left)
                    while left:
                        left = left[file.write(left[:files.CHUNK_BYTES]):]
            text = json.dumps(document | {"pieces": where, "sum": [offset, digest.hexdigest()]})
            (place / INDEX).write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}", encoding="utf-8")
            _delete(self._own() / str(step))
            place.rename(self._own() / str(step))
        except Exception as error:
            files.remove(place)
            self._failure = files.said(error)
            return
        if self._partner is not None and not self._without:
            try:
                self._exchange.send(self._at[self._partner], jax.process_index(), step)
            except OSError as error:
                self._without = files.said(error)
                self.tell(f"{self.name}: process {self._partner} does not get the copies of process "
                          f"{jax.process_index()} any more ({self._without}); training goes on without them")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _home(self) -> Path:
        return self._root / self._lineage["run"]

    def _place(self, process: int, step: int) -> Path:
        return self._home() / f"process-{process}" / str(step)

    def _own(self) -> Path:
        return self._home() / f"process-{jax.process_index()}"

    def _read_lineage(self) -> dict | None:
        """In process 0: identify the run and start. A copied or moved run.dir is another run; a linked one is the
        same."""
        try:
            lineage = json.loads(files.patiently(lambda: self._lineage_file.read_text(encoding="utf-8")))
            here = Path(lineage["at"]).resolve() == self._lineage_file.parent.resolve()
            return lineage if here and lineage["start"] and "from" in lineage else None
        except OSError as error:
            if not files.is_mistake(error):     # falling back here would repeat steps that are saved
                raise files.judged(error, f"{self._lineage_file} cannot be read", "") from None
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def _check_writable(self) -> None:
        if not self.every:
            return

        def write() -> None:
            self._root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._root).close()      # unnamed: a kill leaves nothing

        files.attempted(write, f"checkpoint.local_dir={self._root} cannot be written",
                        "give a directory that every host has and can write, e.g. below /dev/shm or on its own disk",
                        ConfigError)

    def _parts(self) -> dict[int, list[_Part]]:
        """Step -> local checkpoints of this run's valid start on this host. Unreadable ones are ignored."""
        found: dict[int, list[_Part]] = {}
        if self._root is None or self._lineage is None:
            return found
        for place in self._home().glob("process-*/*"):
            if not place.name.isdecimal():
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                digest, text = files.patiently(lambda: (place / INDEX).read_text(encoding="utf-8")).split("\n")
                document, step = json.loads(text), int(place.name)
                start = document["start"]
                is_valid = start == self._lineage["start"] or [start, step] == self._lineage["from"]
                if is_valid and digest == xxhash.xxh3_128_hexdigest(text.encode()):
                    pieces = {(name, tuple(map(tuple, region))): offset for name, region, offset in document["pieces"]}
                    found.setdefault(step, []).append(
                        _Part(place, document["metadata"], document["arrays"], pieces, document["sum"]))
        return found

    def _held(self) -> list[tuple[int, int]]:
        """(process, step) of the parts on this host."""
        return [(int(part.place.parent.name.removeprefix("process-")), step)
                for step, some in self._parts().items() for part in some]

    def _fault(self, step: int, parts: list[_Part], abstract: Any) -> str:
        """Why this process cannot restore from the pieces on its host; empty if it can. Reads its own part, and those
        of others as far as it needs them."""
        own, used, damaged = self._place(jax.process_index(), step), [], ""
        for part in sorted(parts, key=lambda part: part.place != own):
            if used and not self._missing(used, abstract):
                break
            try:
                text = files.difference(files.checksums(part.place, [part.place / SHARDS])[SHARDS], part.sum)
                damaged = damaged or text and f"{part.place / SHARDS}: {text}"
            except OSError as error:
                text = damaged = damaged or files.said(error)
            used += [part] if not text else []
        self._used[step] = used
        missing = self._missing(used, abstract)
        return missing and (damaged or missing)

    @staticmethod
    def _missing(parts: list[_Part], abstract: Any) -> str:
        """What of the arrays is in none of the parts; empty if nothing."""
        held = {piece for part in parts for piece in part.pieces}
        for name, leaf in trees.leaves_of(abstract).items():
            form = [list(leaf.shape), str(jnp.dtype(leaf.dtype))]
            if any(part.arrays.get(name) != form and not widens(part.arrays.get(name), form) for part in parts):
                return f"its {name} has another form"
            regions = [region for other, region in held if other == name]
            for wanted in {region_of(index, leaf.shape)
                           for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}:
                # Pieces of one step are equal or disjoint, so the volumes of intersections add up.
                if sum(volume(intersection(region, wanted)) for region in regions) != volume(wanted):
                    return f"not all of {name} that it needs is on its host"
        return ""

    def _remove(self, doomed: Callable[[int], bool]) -> None:
        """Remove steps of this run on this host, of any process."""
        if self._root is not None:
            for place in self._home().glob("process-*/*"):
                if place.name.isdecimal() and doomed(int(place.name)):
                    _delete(place)


def _delete(place: Path) -> None:
    """Remove the index first, so that a partial deletion is never restored."""
    with contextlib.suppress(OSError):
        os.unlink(place / INDEX)
    files.remove(place)
