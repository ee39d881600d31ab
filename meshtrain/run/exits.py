"""The exit code of a command of several processes: every failure becomes one message and a code."""
from __future__ import annotations

import time
import traceback

import jax

from meshtrain import custom, files
from meshtrain.cluster import agree, meet
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError
from meshtrain.files import FileSystemError
from meshtrain.journal.guards import Halt
from meshtrain.run import say
from meshtrain.run.stops import FAILED, USER_ERROR

PEERS_STOP_S = 3.0      # a stop signal for a run reaches all its processes within this time


class RunError(RuntimeError):
    """A failure of a run with a message for users. The command ends with exit code 1."""


def code_of(error: Exception) -> int:
    """Print the message of an exception that ends a command, and return the exit code.

    If all processes raise an exception, one process prints the message. Raises: any exception without a message for
    users, so that its traceback is printed.
    """
    if isinstance(error, ConfigError):
        return _fail(USER_ERROR, f"error: {error}", error)
    if isinstance(error, Halt):
        if jax.process_index() == 0:
            say.err(f"stopped: {error}")
        return FAILED
    if isinstance(error, (PeerError, FileSystemError, RunError)):
        return _fail(FAILED, f"error: {error}", error)
    if files.is_moment(error):      # a failure of the file system outside the places that handle it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return _fail(FAILED, f"error: {files.describe(error)}, in {where.name} of {where.filename}; check the file "
                             "system (free space, mounts, server) and start again", error)
    if told := custom.find_misuse(error):
        return _fail(USER_ERROR, f"error: {told}", error)
    if agree.first_reports(error):      # process 0 prints the traceback
        return _fail(FAILED, "", error)
    _wait_for_stop(error)
    raise error


def _fail(code: int, message: str, error: Exception) -> int:
    if code == FAILED:
        _wait_for_stop(error)
    if not agree.first_reports(error):
        say.err(message)
    meet.leave(code, error)
    return code


def _wait_for_stop(error: Exception) -> None:
    """After a peer is lost, wait for a stop signal: the signal that ended the peer may also reach this process."""
    if jax.distributed.is_initialized() and not getattr(error, "agreed", False):
        time.sleep(PEERS_STOP_S)
