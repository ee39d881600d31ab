"""The run directory at an address: claimed by a lease, fetched to each host, and sent as its files change.

Whoever writes or reads files of the run takes the local directory `mirror.directory(run.dir)`. What a start finds in
the bucket replaces what an earlier one has left on its host, unless nobody has written there since that one: then what
the bucket did not get is sent. Tokens and stacks are the host's alone.
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
from meshtrain.storage import addresses, mirror, stores
from meshtrain.storage.addresses import Address

LOOK_S = 1.0
ENDING_S = 60.0     # so long another host's run that gives signs of life is waited for


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[rundir.Claim]:
    """As `rundir.claimed`, for an address."""
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
        # by the first process of each host
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
        except ConfigError:     # found late, in the data: a mistake leaves nothing behind
            if began["empty"] and not stores.children(address.below(contents.CHECKPOINTS))[0]:
                sender.undo()
                lease.leave(remove=True)
            raise


class _Look:
    """Process 0's tries to claim the address."""

    def __init__(self, run: Run, address: Address, lease: mirror.Lease):
        self.run, self.address, self.lease = run, address, lease
        self.waiting = files.Waiting(f"run.dir={address} is in use by another run", say.err)
        self._signs: set = set()
        self._until = time.monotonic() + ENDING_S

    def try_claim(self) -> dict | None:
        """The nonce of the claim, and whether there was nothing before; None where another still has it."""
        with user_errors("run.dir: "):
            names = [name for some in stores.children(self.address) for name in some]
            run_file = rundir.check_contents(self.run, str(self.address), set(names), has_checkpoints=bool(
                contents.CHECKPOINTS in names and stores.children(self.address.below(contents.CHECKPOINTS))[0]))
            owner = rundir.this_process()
            try:
                self.lease.take(json.dumps(owner), _is_dead)
                if run_file:
                    say.err(rundir.NO_CONFIG.format(self.address))
                    stores.write(self.address.below(contents.CONFIG), run_file.encode())
                return {"nonce": owner["nonce"], "empty": not set(names) - {LOCK}}
            except mirror.LeaseHeld as held:
                other = rundir.named(held.text)
                self._signs.add(held.sign)
                # Of another host it may be about to end: a signal came to it, and it saves.
                if rundir.is_here(other) or len(self._signs) > 2 and time.monotonic() > self._until:
                    raise ConfigError(f"run.dir={self.address} is in use by another run{rundir.by(other)}; wait for it "
                                      f"or give another run.name") from None
                self.waiting.go_on(rundir.by(other), held.sign)
                time.sleep(LOOK_S)
                return None


def _is_dead(text: str) -> bool:
    """Whether the owner was a process that this one would see, and is gone."""
    owner = rundir.named(text)
    return bool(owner) and owner.get("space") == rundir.space() and not rundir.is_here(owner)


def _text(address: Address) -> str | None:
    try:
        return mirror.text_of(stores.read(address.below(LOCK)))
    except stores.Missing:
        return None


def _check_seen(address: Address, nonce: str) -> None:
    """Raises: ConfigError where this process may not read, or reads another bucket."""
    with user_errors("run.dir: "):
        if (rundir.named(_text(address) or "") or {}).get("nonce") != nonce:
            raise ConfigError(f"run.dir={address} is not the same place for all processes: process "
                              f"{jax.process_index()} does not see what process 0 wrote there; give all "
                              f"processes the same endpoint and credentials")


def _fetch(address: Address, directory: Path, wanted: Callable[[str], bool]) -> None:
    with user_errors("run.dir: "):
        mirror.fetch(address, directory, wanted, needed=contents.NEEDED)
