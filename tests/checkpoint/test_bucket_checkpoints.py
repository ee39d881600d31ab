"""Checkpoints in buckets, written in pieces, and model folders there."""
import contextlib
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import abstract, make_state, mesh
from checkpoints import assert_same_bits as same
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("obstore", reason="buckets need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, Fault, server, surroundings  # noqa: E402, F401
from test_buckets import sent  # noqa: E402

from meshtrain.checkpoint import pieces  # noqa: E402
from meshtrain.checkpoint.bucket import BucketStore  # noqa: E402
from meshtrain.checkpoint.checkpoint import Checkpoints  # noqa: E402
from meshtrain.checkpoint.store import CheckpointError, Save  # noqa: E402
from meshtrain.config import ConfigError  # noqa: E402
from meshtrain.huggingface.weights import new_folder  # noqa: E402
from meshtrain.run.rundir import LostClaimError  # noqa: E402
from meshtrain.storage import addresses, buckets, copies, retries# noqa: E402
from meshtrain.storage.addresses import Address  # noqa: E402


@pytest.fixture
def place(tmp_path) -> Address:
    return addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/checkpoints")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for function in (pieces.cut, pieces.batch_ranges):
        monkeypatch.setattr(function, "__defaults__", (200,))


def names(place: Address) -> list[str]:
    return [one.address.path.removeprefix(f"{place.path}/") for one in buckets.list_files(place)]


@pytest.mark.parametrize(("before", "spec", "after", "there"), [
    ((8, 1), P("a"), (2, 2), P("b", "a")), ((2, 4), P("a", "b"), (1, 1), P()), ((1, 1), P(), (4, 2), P(None, "a")),
    ((4, 2), P(None, ("a", "b")), (2, 4), P("a"))])
def test_a_state_comes_back_bit_for_bit_onto_another_mesh(before, spec, after, there, place):
    state = make_state(mesh(*before), spec)
    with Checkpoints(BucketStore(place, start="a")) as saving:
        saving.save(3, state, {"kept": [1, None]})
    wanted = abstract(make_state(mesh(*after), there))
    with Checkpoints(BucketStore(place), read_only=True) as reading:
        found = reading.newest()
        assert (found.step, found.metadata) == (3, {"format": 4, "kept": [1, None]})
        same(found.restore(wanted), state)
        params = found.restore({"params": wanted.params}, part=True)["params"]
        same(params, state.params)
        assert {path for path in reading.arrays(3, only_params=True)} == {"params"}
        smaller = wanted.params["layers"]["wq"]
        other = jax.ShapeDtypeStruct((8, 8), smaller.dtype, sharding=smaller.sharding)
        with pytest.raises(ValueError, match=r"params/layers/wq: float32\[8, 16\] in the checkpoint, float32\[8, 8\]"):
            found.restore({"params": wanted.params | {"layers": {"wq": other}}}, part=True)


def test_what_was_stored_in_bfloat16_is_read_as_float32_and_told(place, capsys):
    """Norms of earlier versions. The other way numbers would be rounded."""
    on = lambda spec: NamedSharding(mesh(2, 4), spec)
    narrow = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3).astype("bfloat16"), on(P("b")))
    with Checkpoints(BucketStore(place, start="a")) as saving:
        saving.save(1, {"params": {"w": narrow, "v": narrow.astype(np.float32)}}, {})
    form = lambda dtype: jax.ShapeDtypeStruct((8, 3), dtype, sharding=on(P("a")))
    with Checkpoints(BucketStore(place), read_only=True) as reading:
        found = reading.restore(1, {"params": {"w": form(np.float32)}}, part=True)["params"]["w"]
        same(found, narrow.astype(np.float32))
        assert "has arrays in bfloat16 that are float32 in this version; they are read as float32: params/w" in capsys.readouterr().out
        with pytest.raises(ValueError, match=r"params/v: float32\[8, 3\] in the checkpoint, bfloat16\[8, 3\]"):
            reading.restore(1, {"params": {"v": form("bfloat16")}}, part=True)


def test_each_piece_that_is_needed_is_read_once_and_no_other(place, server):
    whole = jax.device_put(np.arange(640, dtype=np.float32).reshape(16, 40), NamedSharding(mesh(8, 1), P("a")))
    with Checkpoints(BucketStore(place, start="a")) as saving:
        saving.save(1, {"params": {"w": whole}, "opt_state": {"mu": whole}}, {})
    objects = [name for name in names(place) if "/" in name]
    server.log.clear()
    with Checkpoints(BucketStore(place), read_only=True) as reading:
        wanted = jax.ShapeDtypeStruct((16, 40), np.float32, sharding=NamedSharding(mesh(2, 4), P("b")))
        same(reading.restore(1, {"params": {"w": wanted}}, part=True)["params"]["w"], whole)
    read = [line.rpartition("/")[2] for line in server.of_content() if ".a-1/" in line]
    assert len(read) == len(set(read)) == 16 == len(objects) // 2       # a piece is a row of 160 bytes


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_all_processes_together_write_each_element_once(count, monkeypatch):
    state = {"split": make_state(mesh(4, 2), P("a", "b")).params, "whole": make_state(mesh(4, 2), P()).params}
    owner = {device: number * count // 8 for number, device in enumerate(jax.devices())}

    class Device:
        def __init__(self, device):
            self.process_index = owner[device]

    class Leaf:     # an array of `count` processes, as one of them sees it
        def __init__(self, leaf, process):
            self.shape, self.dtype, self.sharding, self.leaf, self.process = leaf.shape, leaf.dtype, self, leaf, process

        def devices_indices_map(self, shape):
            return {Device(device): index for device, index in self.leaf.sharding.devices_indices_map(shape).items()}

        @property
        def addressable_shards(self):
            return [one for one in self.leaf.addressable_shards if owner[one.device] == self.process]

    seen: dict[str, np.ndarray] = {}
    written = [0] * count
    for process in range(count):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        for name, region, data in pieces.own(jax.tree.map(lambda leaf: Leaf(leaf, process), state)):
            at = seen.setdefault(name, np.zeros([stop for _, stop in _shape(state, name)], int))
            at[tuple(slice(*ends) for ends in region)] += 1
            assert data.nbytes <= 200 or data.size == 1
            written[process] += data.nbytes
    assert all((at == 1).all() for at in seen.values()) and len(seen) == len(jax.tree.leaves(state))
    assert min(written) > 0.2 * sum(written) / count, written       # copies are shared out


def _shape(state, name: str):
    leaf = {"/".join(str(key.key) for key in path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)}[name]
    return [(0, size) for size in leaf.shape]


def test_what_is_kept_set_aside_and_left_over(place):
    state, told = make_state(mesh(2, 2), P("a")), []
    buckets.write(place.below("7.other-1/0-0"), b"of a start that was killed")
    with Checkpoints(BucketStore(place, start="a"), every=2, keep=2, tell=told.append) as checkpoints:
        assert names(place) == [] and checkpoints.newest() is None and checkpoints.due(4) and not checkpoints.due(3)
        for step in (2, 4, 6):
            checkpoints.save(step, state, {"at": step})
        checkpoints.settle()
        assert checkpoints.steps() == [4, 6] and {name.partition("/")[0] for name in names(place)} == {
            "4", "4.a-2", "6", "6.a-3"}
        assert checkpoints.set_aside_after(4) == ["6.aside"] and checkpoints.steps() == [4]
        checkpoints.save(6, state, {"at": "again"})
        checkpoints.settle()
        assert checkpoints.newest().metadata["at"] == "again" and "6.a-3/0-0" in names(place)     # what is aside is whole
        one = next(name for name in names(place) if name.startswith("6.a-4/"))
        content = buckets.read(place.below(one))
        buckets.write(place.below(one), content[:-1])
        assert checkpoints.newest().step == 4 and "6.damaged" in names(place)
        assert f"is damaged ({one} has {len(content) - 1} bytes, but {len(content)} were written), kept as 6.damaged" in told[0]
        buckets.write(place.below("4"), b"{")
        with pytest.raises(ConfigError, match="has no intact checkpoint, only damaged ones .4.damaged, 6.damaged"):
            checkpoints.newest()
    assert len(told) == 2


def test_a_checkpoint_of_which_any_bit_flips_is_set_aside_and_the_one_before_is_used(place):
    state, told = make_state(mesh(2, 2), P("a")), []
    with Checkpoints(BucketStore(place, start="a"), tell=told.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {})
        checkpoints.settle()
        marker = buckets.read(place.below("2"))
        for name in [name for name in names(place) if name.startswith("2.a-2/")]:
            whole = buckets.read(place.below(name))
            content = bytearray(whole)
            content[len(content) // 2] ^= 4
            buckets.write(place.below(name), bytes(content))
            # in a reader of the run, and in the run, which may change it
            with Checkpoints(BucketStore(place), read_only=True, tell=told.append) as reading:
                assert reading.newest().step == 1 and reading.steps() == [1, 2]
            with pytest.raises(CheckpointError, match=rf"is damaged \({name[6:]}: its checksum differs at byte"):
                checkpoints.restore(2, abstract(state))
            assert checkpoints.newest().step == 1 and checkpoints.steps() == [1]
            kept = told.pop().partition(", kept as ")[2].partition(";")[0]
            assert kept.startswith("2.damaged") and f"({name}: its checksum differs at byte" in told.pop()
            buckets.write(place.below(name), whole)
            buckets.write(place.below("2"), marker)
            buckets.remove([place.below(kept)])
        assert checkpoints.newest().step == 2
        same(checkpoints.restore(2, abstract(state)), state)


@pytest.mark.parametrize("objects, damage", [("/1.a-1/", {"damages": True}), ("/1.a-1/", {}), ("/1", {})])
def test_what_is_damaged_on_its_way_is_read_again_and_condemns_no_checkpoint(objects, damage, place, server):
    state, told = make_state(mesh(2, 2), P("a")), []
    with Checkpoints(BucketStore(place, start="a"), tell=told.append, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.settle()
        for read in (checkpoints.newest, lambda: checkpoints.restore(1, abstract(state))):
            server.faults.append(Fault(objects, 1, **damage))
            read()
            assert server.faults.pop().times == 0 or objects == "/1"
        assert checkpoints.newest().step == 1 and told == []


def test_of_an_object_without_weights_a_reader_of_weights_notices_nothing(place):
    on = NamedSharding(mesh(1, 1), P())
    large = jax.device_put(np.arange(64, dtype=np.float32), on)
    with Checkpoints(BucketStore(place, start="a")) as checkpoints:
        checkpoints.save(1, {"params": {"w": large}, "zeros": large}, {})
        checkpoints.settle()
        index = json.loads(buckets.read(place.below("1")))
        name = next(piece[2] for piece in index["pieces"] if piece[0] == "zeros")
        buckets.remove([place.below(f"1.a-1/{name}")])
        assert checkpoints.fault(1, only_params=True) == ""
        assert checkpoints.fault(1) == f"1.a-1/{name} is missing"


@pytest.mark.parametrize("unlisted", ["4", "4.aside", "4.damaged"])
def test_a_folder_whose_checkpoint_the_list_lacks_is_not_removed(unlisted, place, monkeypatch):
    """A store whose lists are stale."""
    state, real = make_state(mesh(1, 1), P()), buckets.children
    with Checkpoints(BucketStore(place, start="a"), keep=2) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state, {})
        checkpoints.settle()
        if unlisted != "4":
            checkpoints._set_aside(4, unlisted.partition(".")[2])
    before = names(place)

    def stale(folder):
        objects, folders = real(folder)
        return [name for name in objects if name != unlisted], folders
    monkeypatch.setattr(buckets, "children", stale)
    with Checkpoints(BucketStore(place, start="b"), keep=2) as checkpoints:
        assert names(place) == before
        checkpoints.save(6, state, {})
        checkpoints.settle()
        assert set(before) < set(names(place))


def test_what_a_start_sends_before_a_commit_is_there_before_the_marker(place):
    there = []
    with Checkpoints(BucketStore(place, start="a", before_commit=lambda: there.append("1" in names(place)))) as checkpoints:
        checkpoints.save(1, make_state(mesh(1, 1), P()), {})
        checkpoints.settle()
    assert there == [False] and "1" in names(place)


def test_a_save_without_its_marker_is_no_checkpoint_and_a_second_marker_is_refused(place, monkeypatch):
    state, told = make_state(mesh(1, 1), P()), []
    one = Checkpoints(BucketStore(place, start="a"), tell=told.append)
    real = BucketStore.commit
    monkeypatch.setattr(BucketStore, "commit", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    one.save(1, state, {})
    with pytest.raises(CheckpointError, match="step 1 not saved"):
        one.wait()
    monkeypatch.setattr(BucketStore, "commit", real)
    assert one.steps() == [] and Checkpoints(BucketStore(place), read_only=True).newest() is None
    one.save(1, state, {"by": "a"})
    one.settle()
    two = Checkpoints(BucketStore(place, start="b"), tell=told.append)
    two._current = Save(0, 0, False)
    two.save(1, state, {"by": "b"})
    with pytest.raises(CheckpointError, match="another start has saved this step"):
        two.wait()
    assert one.open(1).metadata["by"] == "a" and len(told) == 2


def test_a_bucket_that_fails_is_waited_for_and_ends_no_run(place, server, monkeypatch):
    state, told = make_state(mesh(1, 1), P()), []
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,) * 3)
    with Checkpoints(BucketStore(place, start="a"), tell=told.append) as checkpoints:
        server.faults += [Fault("/1.a-1/", 2, 503), Fault("/checkpoints/1", 1, 500)]
        checkpoints.save(1, state, {})
        checkpoints.wait()
        server.faults += [Fault(".a-", 10**6, 503)]
        for step in (2, 3, 4, 5, 6):
            checkpoints.save(step, state, {})
        with pytest.raises(CheckpointError, match="step 6 not saved .*503"):
            checkpoints.wait()
        server.faults.clear()
        checkpoints.save(7, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 7] and len(told) == 5
        assert {name.partition("/")[0] for name in names(place)} == {"1", "1.a-1", "7", "7.a-7"}
        server.faults += [Fault("/checkpoints/7", 10**6, 503)]
        with pytest.raises(CheckpointError, match="cannot be read: .*503"):
            checkpoints.newest()
        server.faults.clear()


def test_the_third_save_in_a_row_that_a_bucket_refuses_stops_the_run(place, server):
    """An expired token: a launcher starts the run again, with another one."""
    state, told = make_state(mesh(1, 1), P()), []
    checkpoints = Checkpoints(BucketStore(place, start="a"), tell=told.append)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    server.faults += [Fault("/checkpoints/", 10**6, 403)]
    for step in (2, 3):
        checkpoints.save(step, state, {})
    with pytest.raises(CheckpointError, match="step 4 not saved .*403.*; nothing is saved since step 1; 3 saves in a row"):
        checkpoints.save(4, state, {})
    server.faults.clear()
    refused = [line for line in told if "not saved" in line]
    assert len(refused) == 3 and all("nothing is saved since step 1" in line for line in refused)
    assert Checkpoints(BucketStore(place, start="b")).newest().step == 1


def test_a_server_that_fails_for_longer_than_the_limit_stops_the_run(place, server, monkeypatch):
    state, told = make_state(mesh(1, 1), P()), []
    monkeypatch.setattr(retries, "PATIENT_PAUSES_S", (0.01,))
    monkeypatch.setattr(BucketStore, "borne_s", 0.5)
    began = time.monotonic()
    checkpoints = Checkpoints(BucketStore(place, start="a"), tell=told.append)
    server.faults += [Fault(".a-", 10**6, 503)]
    with pytest.raises(CheckpointError, match="503.*; nothing is saved yet; .* saves in a row"):
        for step in range(1, 1000):
            checkpoints.save(step, state, {})
            checkpoints.settle()
    server.faults.clear()
    assert time.monotonic() - began > 0.5 and step > 1


def test_checkpoints_kept_for_ever_stay_in_a_bucket(place, server):
    state = make_state(mesh(1, 1), P())
    with Checkpoints(BucketStore(place, start="a"), keep=1, keep_every=2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state, {"run": {"checkpoint": {"keep_every": 2}}})
        checkpoints.settle()
        assert checkpoints.steps() == [2, 4, 5]
    with Checkpoints(BucketStore(place, start="b"), keep=1, keep_every=3) as checkpoints:
        for step in range(6, 11):
            checkpoints.save(step, state, {"run": {"checkpoint": {"keep_every": 3}}})
        checkpoints.settle()
        assert checkpoints.steps() == [2, 4, 6, 9, 10]
        server.log.clear()
        checkpoints.save(11, state, {})
        checkpoints.settle()
        read = [line for line in server.of_content() if line.rpartition("/")[2].isdecimal()]
        assert {line.rpartition("/")[2] for line in read} == {"10"}, "those that stay have been read"
        for step in (2, 4, 6, 9, 11):
            assert checkpoints.fault(step) == ""


def test_a_start_that_lost_its_place_writes_and_removes_nothing(place):
    state, lost = make_state(mesh(1, 1), P()), []

    def check_claim():
        if lost:
            raise LostClaimError("run.dir was taken over by another start")
    old = Checkpoints(BucketStore(place, start="a"), keep=1, check_claim=check_claim, tell=lambda line: None)
    old.save(1, state, {})
    old.wait()
    lost.append(True)
    before = names(place)
    old.save(2, state, {})
    with pytest.raises(CheckpointError, match="taken over by another start"):
        old.save(3, state, {})
    assert names(place) == before


# ---- a model folder --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writer(target: Address, text: str, host: Path):
    """Writes two files and the mark into the folder, on a host of its own, when the block ends."""
    with contextlib.ExitStack() as held:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(copies, "home", lambda: host)
            scratch = held.enter_context(new_folder.writing(target))
        yield
        for name in ("model.safetensors", "generation_config.json"):
            (scratch / name).write_text(text)
        (scratch / "config.json").write_text("{}")      # of two steps of one model it is the same


def of_one(text: str) -> dict[str, bytes]:
    return {"model.safetensors": text.encode(), "generation_config.json": text.encode(), "config.json": b"{}"}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_of_two_writers_of_a_folder_the_second_is_refused(scheme, tmp_path, server, monkeypatch):
    target = addresses.parse(f"{scheme}://{BUCKET}/{tmp_path.name}/{scheme}")
    with writer(target, "one", tmp_path / "a"):
        with pytest.raises(ConfigError, match="has files but no config.json"), writer(target, "two", tmp_path / "b"):
            pass
        with monkeypatch.context() as patched:      # both have looked, and there was nothing
            patched.setattr(new_folder, "_check_free", lambda target: None)
            with pytest.raises(ConfigError, match="is being written by another process"), writer(
                    target, "two", tmp_path / "b"):
                pass
        server.faults += [Fault(name, 1) for name in (".writing", "model.safetensors", "config.json")]   # answers
    assert sent(target) == of_one("one")


@pytest.mark.parametrize("ends", ["first", "last"])
def test_a_writer_whose_objects_somebody_removed_touches_no_others(ends, tmp_path):
    target = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/folder")
    one, two = writer(target, "one", tmp_path / "a"), writer(target, "two", tmp_path / "b")
    one.__enter__()
    buckets.remove([one.address for one in buckets.list_files(target)])
    with two if ends == "first" else contextlib.nullcontext():
        if ends == "last":
            with two:
                pass
        with pytest.raises(ConfigError, match="another process also writes to .*: it has replaced or removed .writing"):
            one.__exit__(None, None, None)
    assert sent(target) == of_one("two")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_object_of_the_same_size_by_another_is_no_part_of_a_folder(when, tmp_path, monkeypatch):
    target, real = addresses.parse(f"s3://{BUCKET}/{tmp_path.name}/folder"), buckets.create

    def create(address: Address, path: Path) -> str:
        if "model" not in path.name:
            return real(address, path)
        if when == "before":
            buckets.write(address, b"two")
        etag = real(address, path)
        buckets.write(address, b"two")
        return etag
    monkeypatch.setattr(buckets, "create", create)
    with pytest.raises(ConfigError, match="another process also writes to .*model.safetensors"):
        with writer(target, "one", tmp_path / "a"):
            pass
    assert sent(target) == {}
