"""A run directory in a bucket: claimed by a lease, copied to each host, and uploaded as its files change.

All other code reads and writes the local copy, `mirror.directory(run.dir)`. A start replaces the local copy by the
files in the bucket. If no other start has written to the bucket since this host did, the start instead uploads the
local files that the bucket lacks. The token cache and stack traces stay on the host.
"""
from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from meshtrain import files
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.run import contents, rundir, say
from meshtrain.run.contents import LOCK
from meshtrain.storage import addresses, buckets, mirror
from meshtrain.storage.addresses import Address

LOOK_S = 1.0
ENDING_S = 60.0     # how long to wait for a run on another host whose lease is still renewed


@contextlib.contextmanager
def claim(run: Run) -> Iterator[rundir.Claim]:
    """Context: hold the run directory in a bucket for this run alone; see `rundir.claim`."""
    address, directory = addresses.parse(run.run.dir), mirror.directory(run.run.dir)
    claim = rundir.Claim(str(address), directory, "", lambda: _text(address))
    lease = mirror.Lease(address.below(LOCK), lost=claim.lose, tell=say.err)
    with contextlib.ExitStack() as stack:
        look = _Look(run, address, lease)
        while (began := agree.on_first(look.try_claim)) is None:
            watch.progress()
        if jax.process_index() == 0:
            stack.callback(lease.leave)
        claim.nonce = began["nonce"]
        agree.everywhere(lambda: _check_seen(address, claim.nonce))
        hosts, me = agree.exchange([socket.gethostname(), str(directory)]), jax.process_index()
        wanted = contents.is_sent if hosts[me] == hosts[0] else contents.is_read_by_all
        # the first process of each host fetches
        agree.everywhere(lambda: _fetch(address, directory, wanted) if hosts.index(hosts[me]) == me else None)
        if jax.process_index():
            yield claim
            return
        sender = mirror.Mirror(directory, address, contents.is_sent, needed=contents.NEEDED, tell=say.err,
                               check_claim=claim.check)
        claim.send = sender.send
        try:
            with sender:
                yield claim
                return
        except ConfigError:     # a mistake that is found late, e.g. in the data, leaves nothing behind
            if began["empty"] and not buckets.children(address.below(contents.CHECKPOINTS))[0]:
                sender.undo()
                lease.leave(remove=True)
            raise


class _Look:
    """Attempts of process 0 to claim the address."""

    def __init__(self, run: Run, address: Address, lease: mirror.Lease):
        self.run, self.address, self.lease = run, address, lease
        self.waiting = files.Waiting(f"run.dir={address} is in use by another run", say.err)
        self._signs: set = set()
        self._until = time.monotonic() + ENDING_S

    def try_claim(self) -> dict | None:
        """Return {"nonce": of the claim, "empty": whether the address had no files}; None if another run still holds
        the lease. Raises: ConfigError."""
        with user_errors("run.dir: "):
            names = [name for some in buckets.children(self.address) for name in some]
            run_file = rundir.check_contents(self.run, str(self.address), set(names), has_checkpoints=bool(
                contents.CHECKPOINTS in names and buckets.children(self.address.below(contents.CHECKPOINTS))[0]))
            owner = rundir.this_process()
            try:
                self.lease.take(json.dumps(owner), _is_dead)
                if run_file:
                    say.err(rundir.NO_CONFIG.format(self.address))
                    buckets.write(self.address.below(contents.CONFIG), run_file.encode())
                return {"nonce": owner["nonce"], "empty": not set(names) - {LOCK}}
            except mirror.LeaseHeld as held:
                other = rundir.read_owner(held.text)
                self._signs.add(held.sign)
                # A run on another host may be about to end: it got a signal and saves.
                if rundir.is_here(other) or len(self._signs) > 2 and time.monotonic() > self._until:
                    raise ConfigError(f"run.dir={self.address} is in use by another run{rundir.by(other)}; wait for it "
                                      f"or give another run.name") from None
                self.waiting.go_on(rundir.by(other), held.sign)
                time.sleep(LOOK_S)
                return None


def _is_dead(text: str) -> bool:
    """Return whether the owner named in a lease ran in this boot and container and has ended."""
    owner = rundir.read_owner(text)
    return owner is not None and owner.get("space") == rundir.space() and not rundir.is_here(owner)


def _text(address: Address) -> str | None:
    try:
        return mirror.text_of(buckets.read(address.below(LOCK)))
    except addresses.Missing:
        return None


def _check_seen(address: Address, nonce: str) -> None:
    """Check that this process reads process 0's lease. Raises: ConfigError if it reads another bucket, or may not."""
    with user_errors("run.dir: "):
        if (rundir.read_owner(_text(address) or "") or {}).get("nonce") != nonce:
            raise ConfigError(f"run.dir={address} is not the same place for all processes: process "
                              f"{jax.process_index()} does not see what process 0 wrote there; give all "
                              f"processes the same endpoint and credentials")


def _fetch(address: Address, directory: Path, wanted: Callable[[str], bool]) -> None:
    with user_errors("run.dir: "):
        mirror.fetch(address, directory, wanted, needed=contents.NEEDED)
