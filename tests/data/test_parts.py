"""A microbatch is cut into parts where that hides traffic, nowhere else, and cutting and joining lose nothing."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model import parts
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout

TENSOR = """
[params]
heads = "tensor"
mlp = "tensor"
[activations]
batch = ["data", "fsdp"]
seq = "context"
residual_seq = ["context", "tensor"]
heads = "tensor"
mlp = "tensor"
"""
D = 64


def count(shape: tuple, text: str = TENSOR, **sizes: int) -> int:
    return parts.of_rows(Layout(rules.parse(text), dict.fromkeys(AXES, 1) | sizes), shape, "bfloat16")[1]


@pytest.mark.parametrize("rows, tokens, expected", [
    (8, 8192, 4), (16, 8192, 4), (12, 8192, 4), (9, 8192, 3), (7, 8192, 7), (11, 8192, 1),
    (2, 2048, 2), (4, 1024, 2), (64, 256, 4),
])
def test_a_tensor_group_s_rows_are_cut_into_four_parts_or_as_many_as_divide_them(rows, tokens, expected):
    for sizes in (dict(tensor=8), dict(tensor=2, fsdp=4), dict(tensor=2, fsdp=2, data=2), dict(tensor=4, context=2)):
        num_shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
        assert count((rows * num_shards, tokens * sizes.get("context", 1), D), **sizes) == expected


@pytest.mark.parametrize("why, shape, sizes", [
    ("nothing splits a layer's matmuls", (64, 8192, D), dict(fsdp=8)),
    ("one device", (64, 8192, D), {}),
    ("one row in a group", (8, 8192, D), dict(fsdp=8, tensor=8)),
    ("fewer than 4,096 tokens in a group", (8, 4088, D), dict(fsdp=8, tensor=8)),
    ("fewer than 4,096 tokens in a group", (4, 1023, D), dict(tensor=8)),
    ("rows that are no multiple of a part's", (5, 1024, D), dict(tensor=8)),
])
def test_a_microbatch_stays_whole_where_nothing_would_hide(why, shape, sizes):
    assert count(shape, **sizes) == 1, why


@pytest.mark.parametrize("shards, pieces", [(1, 3), (2, 2), (4, 3)])
def test_every_part_has_its_share_of_the_rows_of_each_shard(shards, pieces):
    a = jnp.arange(24 * 5).reshape(24, 5)
    cut = parts.cut(a, shards, pieces)
    assert [part.shape for part in cut] == [(24 // pieces, 5)] * pieces
    for part in cut:
        of_shard = np.asarray(part[:, 0]).reshape(shards, -1) // 5 // (24 // shards)
        np.testing.assert_array_equal(of_shard, np.arange(shards)[:, None] * np.ones_like(of_shard))
    np.testing.assert_array_equal(parts.join(cut, shards), a)
    back = jax.grad(lambda a: sum((i + 1.0) * part.sum() for i, part in enumerate(parts.cut(a, shards, pieces))))(
        a.astype(float))
    assert sorted(set(back.ravel().tolist())) == [i + 1 for i in range(pieces)]
