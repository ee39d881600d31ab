"""Which refusals of the file system are the user's mistake, and which are waited for: in every reader that may meet
one."""
import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from meshtrain import files
from meshtrain.config import ConfigError, user_errors
from meshtrain.data import globs
from meshtrain.data.cache import parts
from meshtrain.data.documents import formats
from meshtrain.data.files import token_files
from meshtrain.huggingface import safetensors, settings

MOMENTS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EBUSY, errno.ENOTEMPTY,
           errno.ENOSPC, errno.EDQUOT)
MISTAKES = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(files, "PAUSES_S", (0.001, 0.001))


def refusing(code, times=10**6):
    """A call that the file system refuses so often; the list counts."""
    calls = []

    def act():
        calls.append(code)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return "there"
    return act, calls


@pytest.mark.parametrize("code", MOMENTS)
def test_a_moment_of_the_file_system_is_waited_for_and_then_no_mistake(code):
    act, calls = refusing(code, times=2)
    assert files.attempt(act, "x", "y") == "there" and len(calls) == 3
    act, calls = refusing(code)
    with pytest.raises(files.FileSystemError,
                       match=f"data.paths: a: {os.strerror(code)}; .*start again"), user_errors():
        files.attempt(act, "data.paths: a", "name another")
    assert len(calls) == 3


def test_what_is_asked_again_is_told_and_each_reason_once_in_a_while(monkeypatch):
    said = []
    monkeypatch.setattr(files.notices, "write", said.append)
    monkeypatch.setattr(files.notices, "_written_at", {})
    for code in (errno.ESTALE, errno.ESTALE, errno.EIO):
        files.attempt(refusing(code, times=2)[0], "x", "y")
    with pytest.raises(FileNotFoundError):      # another host's new file may not be seen yet: nothing has failed
        files.patiently(lambda: os.stat("nowhere"), missing=True)
    assert said == [f"the file system: {os.strerror(code)}; retrying" for code in (errno.ESTALE, errno.EIO)]
    monkeypatch.setattr(files, "TELL_AGAIN_S", 0.0)
    files.attempt(refusing(errno.EIO, times=1)[0], "x", "y")
    assert len(said) == 3


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_directory_is_removed_although_the_file_system_refuses_once(times, tmp_path, monkeypatch):
    (tmp_path / "doomed" / "within").mkdir(parents=True)
    act, calls = refusing(errno.ESTALE, times)
    real = os.rmdir
    monkeypatch.setattr(os, "rmdir", lambda *args, **options: act() and real(*args, **options))
    files.remove(tmp_path / "doomed")
    assert (tmp_path / "doomed").exists() == (times > 1) and calls
    files.remove(tmp_path / "never there")


@pytest.mark.parametrize("error, told", [(OSError("no room"), 0), (ValueError("of a library"), 1), (SystemExit(1), 1)])
def test_a_beat_goes_on_whatever_fails_and_that_is_told_once(error, told, monkeypatch):
    lines, calls = [], []
    monkeypatch.setattr(files.notices, "write", lines.append)

    def write():
        calls.append(1)
        raise error
    beat, deadline = files.Beat(write, 0.01), time.monotonic() + 20
    while len(calls) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beat.close()
    assert len(lines) == told and (not told or type(error).__name__ in lines[0])


def test_only_what_the_kernel_says_of_files_is_a_moment():
    assert all(files.is_moment(OSError(code, os.strerror(code))) for code in MOMENTS)
    others = (OSError("a library"), ConnectionResetError(errno.ECONNRESET, "reset"),
              ValueError(), *(OSError(code, "") for code in MISTAKES))
    assert not any(map(files.is_moment, others))


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_told_at_once_with_its_remedy(code):
    act, calls = refusing(code)
    with pytest.raises(ConfigError, match=f"data.paths: a: {os.strerror(code)}; name another"), user_errors():
        files.attempt(act, "data.paths: a", "name another")
    assert len(calls) == 1


def test_what_has_been_judged_is_not_judged_again():
    told = files.error_to_raise(OSError(errno.ESTALE, "stale"), "inner", "")
    assert files.error_to_raise(told, "outer", "remedy") is told and not files.is_mistake(told)


def test_what_a_library_says_of_a_content_is_a_mistake():
    assert files.is_mistake(OSError("not a gzip file"))


def test_a_file_system_that_does_not_answer_is_not_taken_for_no_file(tmp_path, monkeypatch):
    assert files.is_file(__file__) and not files.is_file(tmp_path) and not files.is_file(tmp_path / "none")
    monkeypatch.setattr(os, "stat", refuses(os.stat, tmp_path / "stale"))
    with pytest.raises(files.FileSystemError):
        files.is_file(tmp_path / "stale")


def refuses(real, path, code=errno.ESTALE):
    """`real`, refused with `code` for this one path."""
    def call(name, *args, **options):
        if isinstance(name, (str, os.PathLike)) and os.fspath(name) == str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(name, *args, **options)
    return call


READERS = {
    "globs.file_sizes": lambda path: globs.file_sizes([str(path)], "data"),
    "globs.match_globs": lambda path: globs.match_globs([str(path)]),
    "formats.read": lambda path: list(formats.read("text", str(path), "text")),
    "token_files.open_pair": lambda path: token_files.open_checked(str(path), token_files.read_header),
    "safetensors.read_header": safetensors.read_header,
    "settings.read": lambda path: settings.read(path.parent, path.name),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_stale_handle_is_nobodys_mistake_in_a_reader(reader, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("text")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuses(os.stat, path))
        patched.setattr("builtins.open", refuses(open, path))
        patched.setattr(os.path, "exists", lambda name: False)
        patched.setattr(os.path, "lexists", lambda name: False)
        with pytest.raises(files.FileSystemError, match="file cannot be .*: Stale file handle"):
            READERS[reader](path)


def test_one_unreadable_file_is_a_mistake_beside_readable_ones(tmp_path):
    (tmp_path / "a").write_text("text")
    with pytest.raises(ValueError,
                       match="b cannot be read: No such file or directory; fix it or take it out of data.paths"):
        globs.file_sizes([str(tmp_path / "a"), str(tmp_path / "b")], "data")


def test_a_full_disk_is_no_mistake_of_the_token_cache(tmp_path, monkeypatch):
    class Home(type(Path())):
        def mkdir(self, *args, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    part = type("Part", (), {"home": Home(tmp_path / "home")})
    with pytest.raises(files.FileSystemError, match="token cache: .* cannot be written: No space left"):
        parts._Building._place(type("Work", (), {"refused": set()}), [part])


def test_token_files_keep_their_reason(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], object))
    with pytest.raises(ValueError, match="cannot be read as an .npy file: it holds Python objects; write it again"):
        token_files.open_checked(str(tmp_path / "x.npy"), token_files.read_header)
