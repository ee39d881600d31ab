"""Reads a sample of the rows of a long metrics file, so that the time hardly grows with the run.

Short files are read whole. For a long file, a report needs the ends of the file, some hundred points of each curve, and
medians. The points and medians come from windows at equal distances, which are found by seeking. Rows that must not be
missed (skipped steps, validations, loss spikes) are found by their text, without parsing the others.
"""
from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from meshtrain.journal.rows import Line, MetricRows, Row

WHOLE_BYTES = 8 << 20       # files up to this size, about 20,000 rows, are read whole
WINDOWS, WINDOW_BYTES = 600, 4096
ENDS_BYTES = 1 << 16        # read whole at both ends of a file, for its first and last losses
# As `MetricsWriter` writes them. Skipped steps, validations, loss spikes.
NEEDED = (b'"skipped": true', b'"val_', b'"spike_limit"')
PROBES = 256                # rows that are looked at to find those of a range of steps


@dataclasses.dataclass(frozen=True)
class Sample:
    """The lines of a metrics file that a report reads. size: bytes of the file when it was opened. needed: offsets of
    the lines that must not be missed; empty if the file is read whole."""
    log: MetricRows
    size: int
    needed: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.size <= WHOLE_BYTES

    @property
    def share(self) -> float:
        """The fraction of all rows that is drawn."""
        return 1.0 if self.is_whole else WINDOWS * WINDOW_BYTES / self.size

    def lines(self) -> Iterator[tuple[Line, bool]]:
        """Yield (line, whether it was drawn) in the order of the file. All rows are drawn with the same probability, so
        statistics use only the drawn rows. The others are the needed, first and last rows. Raises: OSError."""
        if self.is_whole:
            return ((line, True) for line in self.log.lines())
        begin, end = ENDS_BYTES, self.size - ENDS_BYTES
        starts = [k * self.size // WINDOWS for k in range(WINDOWS)]

        def is_drawn(offset: int) -> bool:
            return offset < starts[bisect.bisect_right(starts, offset) - 1] + WINDOW_BYTES
        ranges = [(max(start, begin), min(start + WINDOW_BYTES, end)) for start in starts
                  if begin - WINDOW_BYTES < start < end]
        ranges += [(start, start + 1) for start in self.needed if begin <= start < end and not is_drawn(start)]
        ranges = [(0, begin), *sorted(ranges), (end, self.size)]
        return ((line, is_drawn(line.start)) for line in self.log.lines(ranges))


def of(log: MetricRows) -> Sample:
    """Return the sample of a metrics file. Raises: OSError."""
    size = log.size()
    return Sample(log, size, tuple(log.find(NEEDED)) if size > WHOLE_BYTES else ())


def find_steps(log: MetricRows, first: int, last: int) -> Iterator[Row]:
    """Yield the rows of steps [first, last]. In a long file only their part is read. Raises: OSError."""
    size = log.size()
    begin, stop = 0, size
    if size > WHOLE_BYTES:
        offsets = [k * size // PROBES for k in range(PROBES)]
        probes = [(line.row["step"], line.start)
                  for line in log.lines([(offset, offset + WINDOW_BYTES) for offset in offsets]) if line.row]
        begin = max((start for _, start in itertools.takewhile(lambda probe: probe[0] < first, probes)), default=0)
        stop = min((start for _, start in itertools.takewhile(lambda probe: probe[0] > last, reversed(probes))),
                   default=size)
    return (line.row for line in log.lines([(begin, stop)]) if line.row and first <= line.row["step"] <= last)
