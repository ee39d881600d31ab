"""Local checkpoints: what every host still has comes back bit for bit; anything less, or of another run or start, is
never used."""
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import xxhash
from jax.sharding import PartitionSpec as P

from meshtrain.commands import train
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.config import ConfigError
from meshtrain.journal.journal import Journal
# noqa: F401
from checkpoints import ROOT, abstract, assert_same_bits, flip, make_state, mesh, names, run_processes, small_disk  # noqa: F401
from test_commands import call, home, in_a_directory_of_its_own, lasting, refused, tiny  # noqa: F401


def kept(directory, *steps, started_at=0, used=False):
    """A tier in directory/local of the run directory/run, that has kept these steps; what it told."""
    (directory / "run").mkdir(exist_ok=True)
    told = []
    tier = LocalCheckpoints(str(directory / "local"), 2, directory / "run", told.append)
    tier.begin(started_at, used)
    for step in steps:
        tier.save(step, make_state(mesh(4, 2), P("a", "b"), seed=step), {"position": step})
    tier._join()
    return tier, told


def found(directory, after=0, wanted=None):
    told = []
    tier = LocalCheckpoints(str(directory / "local"), 2, directory / "run", told.append)
    newest = tier.newest(after, wanted or abstract(make_state(mesh(4, 2), P("a", "b"))))
    return tier, newest and (newest.step, {"position": newest.metadata.get("position")}), told


@pytest.mark.parametrize("shape, spec", [((4, 2), P("a", "b")), ((2, 2), P(None, ("a", "b"))),
                                         ((1, 1), P()), ((8, 1), P("a"))])
def test_what_was_kept_comes_back_bit_for_bit_on_any_mesh_of_the_host(tmp_path, shape, spec):
    kept(tmp_path, 2, 4)
    wanted = abstract(make_state(mesh(*shape), spec))
    tier, newest, told = found(tmp_path, 0, wanted)
    assert newest == (4, {"position": 4}) and told == []
    state = tier.restore(4, wanted)
    assert_same_bits(state, make_state(mesh(*shape), spec, seed=4))
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, wanted)
    assert found(tmp_path, after=4)[1] is None      # the shared one is as new


def test_a_donated_state_is_kept_as_it_was(tmp_path):
    tier, _ = kept(tmp_path)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    state = step(jax.numpy.arange(2_000_000.0))
    want = np.array(state)
    tier.save(2, {"w": state}, {})
    for _ in range(3):
        state = step(state)
    tier._join()
    wanted = {"w": jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=state.sharding)}
    np.testing.assert_array_equal(found(tmp_path, 0, wanted)[0].restore(2, wanted)["w"], want)


def test_one_step_stays_until_the_next_is_whole_and_no_more_than_two_are_there(tmp_path):
    tier, _ = kept(tmp_path, 2, 4, 6)
    assert names(tier._own()) == ["4", "6"]
    tier.forget()
    assert names(tmp_path / "local") == []


@pytest.mark.parametrize("damage", ["bit", "cut", "index", "no index", "no shards"])
def test_a_damaged_step_is_told_or_not_there_and_the_one_before_is_used(tmp_path, damage):
    tier, _ = kept(tmp_path, 2, 4)
    place = tier._own() / "4"
    {"bit": lambda: flip(place / "shards", 77), "cut": lambda: os.truncate(place / "shards", 100),
     "index": lambda: flip(place / "index.json", 900), "no index": lambda: (place / "index.json").unlink(),
     "no shards": lambda: (place / "shards").unlink()}[damage]()
    _, newest, told = found(tmp_path)
    assert newest == (2, {"position": 2})
    if damage in ("bit", "cut", "no shards"):
        assert len(told) == 1 and "checkpoint.local_dir: step 4 is not used (process 0 on" in told[0], told


def test_a_step_that_another_version_wrote_is_told_and_the_one_before_is_used(tmp_path):
    tier, _ = kept(tmp_path, 2, 4)
    path = tier._own() / "4" / "index.json"
    index = json.loads(path.read_text().partition("\n")[2])
    del index["format"], index["objects"]
    index["pieces"] = [[name, region, offset] for name, region, _, offset, _ in index["pieces"]]
    text = json.dumps(index)
    path.write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
    _, newest, told = found(tmp_path)
    assert newest == (2, {"position": 2})
    assert len(told) == 1 and "step 4 is not used" in told[0] and "another version of meshtrain has written it" in told[0]


def test_a_piece_that_is_damaged_in_one_process_is_read_from_another_that_has_it(tmp_path):
    tier, _ = kept(tmp_path, 2)
    shutil.copytree(tier._own(), tier._place(1, 2).parent)
    flip(tier._own() / "2" / "shards", 77)
    tier, newest, told = found(tmp_path)
    assert newest == (2, {"position": 2}) and told == []
    wanted = abstract(make_state(mesh(4, 2), P("a", "b")))
    assert_same_bits(tier.restore(2, wanted), make_state(mesh(4, 2), P("a", "b"), seed=2))


def test_another_start_another_run_and_a_copy_of_run_dir_find_nothing(tmp_path):
    kept(tmp_path, 2, 4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    (tmp_path / "copy" / "local").symlink_to(tmp_path / "local")
    assert found(tmp_path / "copy")[1] is None
    assert found(tmp_path)[1] == (4, {"position": 4})
    kept(tmp_path / "copy", 10)     # in the same local_dir
    assert found(tmp_path)[1] == (4, {"position": 4}) and found(tmp_path / "copy")[1] == (10, {"position": 10})
    LocalCheckpoints("", 0, tmp_path / "run").begin(3, False)      # steps are taken again by a start without the tier
    assert found(tmp_path)[1] is None


def test_another_name_of_the_same_directory_is_the_same_run(tmp_path):
    kept(tmp_path, 2, 4)
    (tmp_path / "link").symlink_to(tmp_path)
    assert found(tmp_path / "link")[1] == (4, {"position": 4})


def test_what_a_start_goes_on_from_counts_until_it_has_kept_its_own(tmp_path):
    kept(tmp_path, 2, 4)
    tier, newest, _ = found(tmp_path)
    for _ in range(2):      # two starts that are killed at once
        tier.begin(4, True)
        assert names(tier._own()) == ["4"]
        tier, newest, _ = found(tmp_path)
        assert newest == (4, {"position": 4})
    kept(tmp_path, 6, started_at=4, used=True)
    assert found(tmp_path)[1] == (6, {"position": 6})


def test_a_kill_in_the_middle_of_a_save_leaves_the_step_before(tmp_path):
    program = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_local_checkpoints import kept, make_state, mesh, P
tier, _ = kept(Path(sys.argv[1]), 2)
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tier.save(4, make_state(mesh(4, 2), P("a", "b"), seed=4), {})
tier._join()
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), *sys.path],
                          env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    tier, newest, told = found(tmp_path)
    assert newest == (2, {"position": 2}) and told == [] and names(tier._own()) == [".saving", "2"]


def test_a_full_disk_is_told_once_and_what_was_kept_before_stays(small_disk):  # noqa: F811
    tier, told = kept(small_disk, 2)
    large = {"w": jax.numpy.ones(2_000_000)}
    for step in (4, 6, 8):
        tier.save(step, large, {})
    tier._settle()
    assert told == ["step 4 is not saved in checkpoint.local_dir (process 0: No space left on device); training "
                    "continues, and the step saved before is kept"]
    assert found(small_disk)[1] == (2, {"position": 2}) and names(tier._own()) == ["2"]


def test_two_processes_agree_on_the_step_that_both_have_and_name_who_lacks_one(tmp_path):
    body = r"""
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.cluster import agree
root = __import__("pathlib").Path(directory)
tier = LocalCheckpoints(directory + f"/host{index}", 2, root, lambda text: say("told", text))
forms = lambda: {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in state(0).items()}
tier.begin(0, False)
tier.save(2, state(2), {"position": 2})
tier.save(4, state(4), {"position": 4})
write = LocalCheckpoints._write
if index == 1:
    def full(self, *args):
        self._failure = "No space left on device"
    LocalCheckpoints._write = full
tier.save(6, state(6), {})
LocalCheckpoints._write = write
tier._settle()
agree.exchange(None)
say("kept", sorted(os.listdir(tier._own())), sorted(os.listdir(tier._home())))
again = lambda: LocalCheckpoints(directory + f"/host{index}", 2, root, lambda text: say("told", text))
tier = again()
newest = tier.newest(0, forms())
say("newest", (newest.step, newest.metadata))
got = tier.restore(4, forms())
say("same", all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes() for k in got
                for a, b in zip(got[k].addressable_shards, state(4)[k].addressable_shards)))
other = forms()
other["split"] = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, P("b", "a")))
say("reshard", tier.newest(0, other).step)        # of what the host keeps for its partner
if index == 1:
    __import__("shutil").rmtree(tier._root)       # a fresh host
tier = again()
newest = tier.newest(0, forms())
say("replaced", newest.step, all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    for k, x in tier.restore(4, forms()).items() for a, b in zip(x.addressable_shards, state(4)[k].addressable_shards)))
agree.exchange(None)
if index == 1:
    __import__("shutil").rmtree(tier._root)
from meshtrain.checkpoint import partner
partner.Exchange.fetch = lambda *_: (_ for _ in ()).throw(partner.TransferError("127.0.0.1: no route"))
say("lost", again().newest(0, forms()))
"""
    zero, one = run_processes(2, tmp_path, body)
    full = ("told step 6 is not saved in checkpoint.local_dir (process 1: No space left on device); training "
            "continues, and the step saved before is kept")
    same = ["kept ['4'] ['process-0', 'process-1']", "newest (4, {'format': 4, 'position': 4})", "same True"]
    assert zero[0] == full and zero[1:4] == same == one[:3]
    assert zero[4:6] == ["reshard 4", "replaced 4 True"] and zero[7] == "lost None", zero
    assert zero[6].startswith("told checkpoint.local_dir: step 4 is not used (process 1 on"), zero
    assert one[3:] == [
        "reshard 4", "told checkpoint.local_dir: process 1 fetched its part of step 4 from process 0, whose host kept "
        "a copy", "replaced 4 True", "told checkpoint.local_dir: the copy of step 4 that process 0 keeps cannot be "
        "fetched (127.0.0.1: no route)", "lost None"], one


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def crashing(monkeypatch):
    """(step) -> from now on a run fails there; 0: no more."""
    real, at = Journal.add_step, [0]
    def dispatched(self, number, *args):
        if number == at[0]:
            raise RuntimeError("as if killed")
        return real(self, number, *args)
    monkeypatch.setattr(Journal, "add_step", dispatched)
    def fail(step):
        at[0] = step
    return fail


def state_of(directory, step):
    checkpoints = Checkpoints(DirectoryStore(Path(directory) / "checkpoints"), read_only=True)
    return checkpoints.restore(step, checkpoints.arrays(step))


def test_a_run_goes_on_from_the_fast_tier_as_if_nothing_had_happened(tiny, tmp_path, crashing):  # noqa: F811
    command = (*tiny, "--training.steps", 10, "--checkpoint.every", 5, "--run.sample_tokens", 0)
    near = ("--checkpoint.local_dir", tmp_path / "near", "--checkpoint.local_every", 2)
    assert call(train.main, *command, "--run.dir", "plain").code == 0
    crashing(9)
    with pytest.raises(RuntimeError, match="as if killed"):
        call(train.main, *command, *near, "--run.dir", "fast")
    assert names(tmp_path / "fast" / "checkpoints") == ["5"]
    crashing(0)
    ran = call(train.main, *command, *near, "--run.dir", "fast")
    assert ran.code == 0 and "resuming after step 8, kept in checkpoint.local_dir" in ran.out, ran
    assert lasting(Path("fast")) == lasting(Path("plain"))
    assert_same_bits(state_of("fast", 10), state_of("plain", 10))
    assert names(tmp_path / "near") == []       # nothing is left behind where the shared one has it


@pytest.mark.long
def test_a_step_that_is_named_is_a_shared_one_and_the_fast_tier_is_dropped(tiny, tmp_path, crashing):  # noqa: F811
    command = (*tiny, "--training.steps", 9, "--checkpoint.every", 3, "--run.sample_tokens",
               0, "--checkpoint.local_dir", tmp_path / "near",
               "--checkpoint.local_every", 2, "--run.dir", "run")
    crashing(9)
    with pytest.raises(RuntimeError, match="as if killed"):
        call(train.main, *command)
    ran = call(train.main, *command, "--checkpoint.step", 8)
    refused(ran, "checkpoint.step=8 is not saved", "3, 6")
    crashing(5)
    with pytest.raises(RuntimeError, match="as if killed"):
        call(train.main, *command, "--checkpoint.step", 3)
    crashing(0)
    ran = call(train.main, *command)
    assert ran.code == 0 and "resuming after step 4, kept" in ran.out, ran


def test_a_fast_tier_that_cannot_be_is_refused(tiny, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    refused(call(train.main, *tiny, "--checkpoint.local_dir", tmp_path / "near"), "give both")
    refused(call(train.main, *tiny, "--checkpoint.local_every", 5), "give both")
    for inside in ("run", "run/near"):
        refused(call(train.main, *tiny, "--run.dir", "run", "--checkpoint.local_every",
                     5, "--checkpoint.local_dir", inside), "in run.dir")
    refused(call(train.main, *tiny, "--run.dir", "run", "--checkpoint.local_every", 5,
                 "--checkpoint.local_dir", tmp_path / "file" / "x"),
            "cannot be written: Not a directory")
    with pytest.raises(ConfigError):
        LocalCheckpoints("/proc/nowhere", 5, tmp_path)
    assert names(tmp_path) == ["file"]
