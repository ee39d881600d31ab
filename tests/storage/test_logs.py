"""A log in a bucket, as a report fetches it."""
import pytest

pytest.importorskip("obstore", reason="buckets need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, server, surroundings  # noqa: E402, F401

from meshtrain.storage import addresses, buckets, mirror  # noqa: E402


def test_a_log_is_read_in_pieces_and_then_by_its_new_end_alone(tmp_path, server, monkeypatch):
    """Also if it is cut and written again, shorter or longer, and while another process replaces it."""
    monkeypatch.setattr(mirror, "OVERLAP_BYTES", 40)
    monkeypatch.setattr(mirror, "PIECE_BYTES", 100)
    place, here, asked = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/run"), tmp_path / "here", []
    read_range, replaced = buckets.read_range, []

    def read(remote, start, stop):
        asked.append(stop - start)
        if replaced and start:      # after the first piece
            buckets.write(place.below("m.jsonl"), replaced.pop())
        return read_range(remote, start, stop)
    monkeypatch.setattr(buckets, "read_range", read)

    def rows(first: int, last: int, time: float) -> bytes:
        return b"".join(b'{"step": %d, "time": %f}\n' % (step, time + step) for step in range(first, last))

    def fetch(content: bytes) -> int:
        """The bytes that were read."""
        buckets.write(place.below("m.jsonl"), content)
        asked.clear()
        after = replaced[-1] if replaced else content
        mirror.fetch(place, here, lambda name: True, logs=("m.jsonl",))
        assert (here / "m.jsonl").read_bytes() == after
        return sum(asked)
    first = rows(0, 30, 1.0)
    assert fetch(first) == len(first) and max(asked) == 100
    assert fetch(first) == 40, "nothing is new"
    assert fetch(first + rows(30, 33, 1.0)) == 40 + len(rows(30, 33, 1.0))
    assert fetch(first[:200]) == 200, "cut"
    again = first[:200] + rows(20, 40, 2.0)
    assert fetch(again) == 40 + len(again) - 200
    other = first + rows(30, 60, 3.0)
    assert fetch(other) == 40 + len(other), "cut before the end that is here, and longer since"
    (here / "m.jsonl").unlink()
    replaced.append(other + rows(60, 63, 3.0))
    fetch(other)
    (here / "m.jsonl").unlink()
    replaced.append(first)
    fetch(other)
