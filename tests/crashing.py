"""A worker of benchmarks.gpu that crashes, hangs and then comes to its end, one process each: light, without jax."""
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
