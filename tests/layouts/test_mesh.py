"""The mesh: groups of devices, placement, and the jax Mesh that agrees with both."""
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.sharding.mesh import AXES, PLACEMENT, MeshSpec

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})
ORDER = st.permutations(AXES)
SUBSET = st.lists(st.sampled_from(AXES), max_size=5, unique=True)


def as_set(groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}


# ---- the worked example: 16 GPUs on two hosts, stage 4 × data 2 × tensor 2 -------------------------------------------

EXAMPLE = {
    ("tensor",): [[0, 1], [4, 5], [8, 9], [12, 13], [2, 3], [6, 7], [10, 11], [14, 15]],
    ("stage",): [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    ("data",): [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    ("stage", "tensor"): [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
}


@pytest.mark.parametrize("axes", EXAMPLE, ids="+".join)
def test_groups_of_the_16_gpu_example(axes):
    mesh_spec = MeshSpec({"stage": 4, "data": 2, "tensor": 2})
    assert as_set(mesh_spec.groups(*axes)) == as_set(EXAMPLE[axes])
    assert as_set(mesh_spec.groups(*reversed(axes))) == as_set(EXAMPLE[axes])


def test_placement_decides_which_axis_crosses_hosts():
    mesh_spec = MeshSpec({"data": 2, "tensor": 8}, ("tensor", "stage", "fsdp", "context", "data"))
    assert mesh_spec.groups("data") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert mesh_spec.groups("tensor") == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert MeshSpec({"data": 2, "tensor": 8}).groups("tensor") == [list(range(8)), list(range(8, 16))]


# ---- any mesh --------------------------------------------------------------------------------------------------------

@given(SIZES, ORDER, SUBSET)
def test_groups_partition_the_devices(sizes, placement, axes):
    mesh_spec = MeshSpec(sizes, placement)
    groups = mesh_spec.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh_spec.num_devices)) == list(
        range(math.prod(sizes.values())))
    assert {len(group) for group in groups} == {math.prod(sizes[axis] for axis in axes)}


@given(SIZES, ORDER, st.sampled_from(AXES))
def test_a_group_is_one_line_of_the_placement(sizes, placement, axis):
    """Neighbours in a group stand as far apart as the faster axes together are large."""
    stride = math.prod(sizes[a] for a in placement[placement.index(axis) + 1:])
    for group in MeshSpec(sizes, placement).groups(axis):
        assert group == list(range(group[0], group[0] + stride * sizes[axis], stride))


@given(st.sampled_from([{"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 4, "context": 2},
                        {"tensor": 8}, {"data": 3}, {}]),
       ORDER, SUBSET)
def test_the_jax_mesh_has_the_same_groups(sizes, placement, axes):
    mesh_spec = MeshSpec(sizes, placement)
    devices = jax.devices()
    mesh = mesh_spec.build(devices)
    assert mesh.axis_names == mesh_spec.abstract().axis_names == tuple(placement)
    assert dict(mesh.shape) == dict(mesh_spec.abstract().shape) == mesh_spec.sizes
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    number = {device: i for i, device in enumerate(devices)}
    ids = np.vectorize(number.get)(mesh.devices)
    assert (ids.ravel() == np.arange(mesh_spec.num_devices)).all(), "XLA's partitions have the devices' order"
    others = [i for i, axis in enumerate(mesh.axis_names) if axis not in axes]
    lines = np.moveaxis(ids, others, range(len(others))).reshape(-1, math.prod(mesh_spec.sizes[axis] for axis in axes))
    assert as_set(lines.tolist()) == as_set(mesh_spec.groups(*axes))


def test_missing_axes_have_size_one_and_the_default_puts_tensor_on_the_fastest_link():
    assert MeshSpec({"data": 2}).sizes == {"data": 2, "fsdp": 1, "tensor": 1, "stage": 1, "context": 1}
    assert PLACEMENT == ("stage", "data", "fsdp", "context", "tensor")


# ---- mistakes --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, parts", [
    (lambda: MeshSpec({"dta": 2}), ["dta", "data, fsdp, tensor, stage, context"]),
    (lambda: MeshSpec({"data": 0}), ["at least 1", "0"]),
    (lambda: MeshSpec({}, ("data", "fsdp")), ["placement", "['data', 'fsdp']", "each of"]),
    (lambda: MeshSpec({}, ("data",) * 5), ["placement", "once"]),
    (lambda: MeshSpec({"data": 2}).groups("expert"), ["'expert'", "data, fsdp, tensor, stage, context"]),
    (lambda: MeshSpec({"data": 4, "tensor": 4}).build(jax.devices()), ["needs 16", "data 4 × tensor 4", "8"]),
], ids=["axis", "size", "short placement", "repeated placement", "group", "devices"])
def test_a_mistake_is_told_with_its_value(make, parts):
    with pytest.raises(ValueError) as error:
        make()
    assert [part for part in parts if part not in str(error.value)] == []
