"""Reads files that are compressed with gzip or zstd. A truncated or damaged file is reported with its name."""
from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from meshtrain.data.documents.tokenizer import import_extra

SUFFIXES = (".gz", ".zst")


@contextlib.contextmanager
def reporting(path: str, place: str = "") -> Iterator[None]:
    """Report damage of a compressed file that the context reads. place: the place in the file, for the message. Raises:
    ValueError."""
    try:
        yield
        return
    except EOFError:
        what = "ends in the middle: it was truncated"
    except (gzip.BadGzipFile, zlib.error) as error:
        what = f"is damaged, or not gzip: {error}"
    except _Damaged as error:
        what = f"is damaged, or not zstd: {error}"
    raise ValueError(f"{path} {what}{place}; copy or compress it again") from None


def decompress(path: str, raw: BinaryIO) -> contextlib.AbstractContextManager[Any]:
    """Return a context that gives the open file `raw` as bytes, decompressed as its name says."""
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw, import_extra("zstandard", f"the file {path}")), 1 << 20)
    return contextlib.nullcontext(raw)


class _Damaged(Exception):
    pass


class _Zstd(io.RawIOBase):
    """A reader of concatenated zstd frames. The library's own reader accepts truncated files."""

    def __init__(self, raw: BinaryIO, library):
        # 2 GiB: for `zstd --long=31`, used by some public corpora.
        self._raw, self._library = raw, library.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None     # a decompressor of the library; None between frames
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._rest or self._raw.read(1 << 17)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._frame = self._frame or self._library.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except Exception as error:    # ZstdError, of a package that may not be installed
                raise _Damaged(error) from None
            if self._frame.eof:
                self._frame, self._rest = None, self._frame.unused_data
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
