"""As many processes as the largest pods have come to one meeting; they are simulated, each by a connection of its
own."""
import json
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

from meshtrain.cluster import meet
from meshtrain.cluster.find import Cluster
from tests.commands import ROOT

MANY = 16_384
LIMIT_S = 15.0
# The other side in a process of its own: each end of a connection takes a descriptor.
PEERS = """
import resource, socket, sys
from concurrent.futures import ThreadPoolExecutor
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
magic = sys.argv[4].encode()
def come(index):
    about = '{"index": %d, "count": %d, "host": "host%d", "pid": %d, "left_s": 200, "token": ""}' % (index, count, index // 8, index)
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)      # as ours do
            break
        except OSError:
            pass
    connection.settimeout(200)
    connection.sendall(magic + about.encode() + b"\\n")
    return connection
with ThreadPoolExecutor(16) as pool:
    peers = list(pool.map(come, range(1, count)))
print(sum(b'"fault": null' in peer.makefile("rb").readline() for peer in peers), flush=True)
"""


@pytest.mark.long
def test_16384_processes_meet_within_15_seconds():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < MANY + 500:
        pytest.skip(f"ulimit -Hn is {hard}: a process needs a descriptor for each of {MANY} peers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = []
    first = threading.Thread(target=lambda: result.append(meet.meet(Cluster(f"127.0.0.1:{port}", MANY, 0), 200)),
                             daemon=True)
    first.start()
    deadline = time.monotonic() + 20
    while True:     # until it listens
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    start, cpu = time.monotonic(), time.process_time()
    peers = subprocess.Popen([sys.executable, "-c", PEERS, "127.0.0.1", str(port), str(MANY), meet.HELLO.decode()],
                             cwd=ROOT, text=True,
                             stdout=subprocess.PIPE)
    first.join(220)
    took_s, cpu_s = time.monotonic() - start, time.process_time() - cpu
    told, _ = peers.communicate(timeout=100)
    assert (result, int(told)) == ([None], MANY - 1)
    print(json.dumps({"processes": MANY, "seconds": took_s, "cpu_seconds_of_the_first": cpu_s}))
    assert took_s < LIMIT_S
