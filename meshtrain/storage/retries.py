"""Repeats requests to servers of files, and judges their answers. The only protocol that it knows is HTTP."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshtrain import files
from meshtrain.storage.addresses import BUCKETS, HUB, Address, Changed, Missing, Refused, StorageError

PAUSES_S = (0.5, 1.0, 2.0, 4.0)     # before each further try
PATIENT_PAUSES_S = (*PAUSES_S, 8.0, 15.0, 30.0)     # for writes in the background
SILENCE_S = 30.0        # a request fails after this long without a byte from the server
HUB_CREDENTIALS = "HF_TOKEN (for a gated model accept its terms at the hub first)"
EXPIRED = ("ExpiredToken", "TokenRefreshRequired")     # S3 sends these with status 400
Value = TypeVar("Value")


class Moment(Exception):
    """The server failed; the next request may succeed."""


def patiently(address: Address, act: Callable[[], Value], done: Callable[[], int] = lambda: 0, *,
              verb: str = "read", patient: bool = False) -> Value:
    """Return act(), called again after each pause if the server fails. If done() has grown, begin with the first pause.

    Raises: StorageError; FileSystemError if the server still fails after all pauses, so that a launcher starts again.
    """
    tries, before, pauses_s = 0, done(), PATIENT_PAUSES_S if patient else PAUSES_S
    while True:
        try:
            return act()
        except Moment as error:
            tries, before = (tries, before) if done() == before else (0, done())
            if tries == len(pauses_s):
                raise files.FileSystemError(f"{address} cannot be {verb}: {error}, {tries + 1} times in a row; check "
                                            f"the server or the network, and start again") from None
            files.pause(pauses_s[tries], str(address), str(error))
            tries += 1


def error_of_status(address: Address, code: int, what: str, verb: str = "read") -> Exception:
    """Return the error for an HTTP status. what: the status in words."""
    if code in (408, 409, 425, 429) or code >= 500:     # 409: S3 rejects one of two concurrent writes
        return Moment(f"the server answers {code} ({what})")
    credentials = {HUB: HUB_CREDENTIALS} | {scheme: buckets.credentials for scheme, buckets in BUCKETS.items()}
    told = credentials.get(address.scheme, "")
    if code in (401, 403) or what in EXPIRED:
        return Refused(f"{address} is refused with {code} ({what})" + (
            f": it cannot be {verb} with these credentials; set {told}" if told else
            "; an https:// address must name a file that anybody may read"))
    if code == 404:
        unseen = f", or is hidden without credentials; set {told}, or" if address.scheme == HUB else ";"
        return Missing(f"{address} is not there ({code}, {what}){unseen} name an existing file")
    if code == 412:
        return Changed(f"{address} has changed since it was listed; start again when no program writes to it")
    where = "; is AWS_REGION the region of the bucket?" if address.scheme == "s3" and code in (301, 307, 400) else ""
    return StorageError(f"{address} cannot be {verb}: the server answers {code} ({what}){where}; check the address")
