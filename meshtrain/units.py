"""Formats numbers and values for people."""
from __future__ import annotations

LONG = (("days", 86400), ("h", 3600), ("min", 60))


def size(count: float) -> str:
    """Format bytes in binary units: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def operations(count: float) -> str:
    """Format a number of floating-point operations: 1.5e12 -> 1.5 TFLOP."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"):
        if count < 1000:
            return f"{count:.{0 if unit == 'FLOP' else 1}f} {unit}"
        count /= 1000
    return f"{count:,.1f} EFLOP"


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3f} s"
    return f"{1e6 * value:.1f} µs" if 0 < value < 5e-5 else f"{1e3 * value:.1f} ms"


def duration(value: float) -> str:
    """Format seconds of a run: 3.2 s, 12.0 min, 4.1 h, 12.3 days."""
    unit, length_s = next(((unit, length_s) for unit, length_s in LONG if value >= 2 * length_s), ("s", 1))
    return f"{value / length_s:,.1f} {unit}"


def many(count: int) -> str:
    """Format a number of parameters or tokens: 70.6B, 2.2M, 8,192."""
    return f"{count / 1e9:,.1f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M" if count >= 1e6 else f"{count:,}"


def shorten(value: object) -> str:
    """Return the repr of a value, of at most 60 characters."""
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def amount(count: int, noun: str) -> str:
    """Format a number of things: 1 microbatch, 2 microbatches, 1,200 files."""
    return f"{count:,} {plural(count, noun)}"


def plural(count: float, noun: str) -> str:
    """Return a noun in the form that follows this number: microbatch, microbatches."""
    return noun if count == 1 else f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
