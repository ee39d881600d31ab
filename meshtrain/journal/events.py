"""Encoder of TensorBoard events: protocol buffers (tensorboard/compat/proto: event, summary, tensor) in TFRecord frames
with CRC-32C checksums (Castagnoli, RFC 3720). Supports only the events that a run writes.
"""
from __future__ import annotations

import ctypes
import functools
import struct
import time
from collections.abc import Mapping

VERSION = "brain.Event:2"
SESSION_START, DT_STRING = 1, 7     # SessionLog.START, DataType.DT_STRING
CASTAGNOLI = 0x82F63B78     # the polynomial, bits reversed


def version() -> bytes:
    """Return the first event of a file, which gives the version of the format."""
    return _event(0, _bytes(3, VERSION))


def start(step: int) -> bytes:
    """Return an event that makes TensorBoard drop the events of earlier files from this step on."""
    return _event(step, _bytes(7, _integer(1, SESSION_START)))


def scalars(step: int, numbers: Mapping[str, float]) -> bytes:
    """Return an event with one number per tag. Numbers are stored as float32, beyond its range as infinity."""
    values = (_bytes(1, tag) + _key(2, 5) + struct.pack("<f", ctypes.c_float(value).value)
              for tag, value in numbers.items())
    return _event(step, _bytes(5, b"".join(_bytes(1, value) for value in values)))


def text(step: int, tag: str, markdown: str) -> bytes:
    """Return an event with a Markdown text, which TensorBoard shows under Text."""
    shape = _bytes(2, _integer(1, 1))       # one dimension of size 1
    tensor = _integer(1, DT_STRING) + _bytes(2, shape) + _bytes(8, markdown)
    plugin = _bytes(1, _bytes(1, "text"))
    return _event(step, _bytes(5, _bytes(1, _bytes(1, tag) + _bytes(8, tensor) + _bytes(9, plugin))))


def _event(step: int, what: bytes) -> bytes:
    """Return a TFRecord frame with an event: its length, the length's checksum, the event, its checksum."""
    data = _key(1, 1) + struct.pack("<d", time.time()) + _integer(2, step) + what
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


# ---- protocol buffers ------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _key(field: int, wire: int) -> bytes:
    """Return the key of a field. wire: its encoding: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes."""
    return _varint(field << 3 | wire)


def _integer(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _key(field, 2) + _varint(len(data)) + data


# ---- checksums -------------------------------------------------------------------------------------------------------


@functools.cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ CASTAGNOLI * (byte & 1)
        table.append(byte)
    return table


def _checksum(data: bytes) -> bytes:
    """Return TFRecord's masked checksum: CRC-32C, rotated, plus a constant."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
