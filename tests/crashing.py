"""Workers of benchmarks.gpu without jax: one that crashes, hangs and then comes to its end, one process each; and one
that takes its share."""
import os
import sys
import time

from benchmarks.gpu_record import Item, Record

ITEMS = [Item("layout/crash", lambda: os._exit(9)), Item("layout/hang", lambda: time.sleep(60), seconds=0),
         Item("layout/right", dict)]


def worker(pipe, directory):
    found = Record(directory, "none", {"gpu": "none", "count": 1})
    pipe.send(("record", found.path.parent, found.name, found.of))
    for item in found.open(ITEMS):
        pipe.send(("begin", item.key, item.seconds))
        found.begin(item.key)
        found.end(item.key, item.measure(), 0.0)
        pipe.send(("end", item.key))
    sys.exit(0)


KINDS = [Item(f"layout/{kind}, {dtype}", lambda: {"process": os.getpid()}) for kind in "abc" for dtype in (
    "float32", "bfloat16")]


def sharing(pipe, directory, until, asked):
    found, planned = Record(directory, "none", {"gpu": "none", "count": 1}), [*KINDS, Item("speed/d", dict, alone=True)]
    pipe.send(("record", found.path.parent, found.name, found.of))
    for item in found.open(asked.share(planned), planned):
        found.begin(item.key)
        found.end(item.key, item.measure(), 0.0)
    sys.exit(0)
