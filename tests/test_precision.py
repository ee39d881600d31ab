"""float32 is float32 on GPUs, read from programs compiled for them."""
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshtrain.cost import compile
from meshtrain.kernels import products

ROOT = Path(__file__).resolve().parent.parent / "meshtrain"


def test_every_product_asks_for_its_precision():
    """An einsum of float32 operands without it is TF32 on a GPU. """
    for path in ROOT.rglob("*.py"):
        for call in re.finditer(r"jnp\.(einsum|matmul|dot|tensordot)\(", path.read_text()):
            after = path.read_text()[call.start():call.start() + 250]
            assert "precision=" in after, f"{path}: {after.splitlines()[0]}"


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("dtype, asks", [("float32", True), ("bfloat16", False)])
def test_a_gpu_multiplies_float32_in_float32(dtype, asks):
    mesh = jax.sharding.Mesh(compile.topology("h100:1"), ("data",))
    one = jax.ShapeDtypeStruct((256, 256), dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    f = lambda x, w: jnp.einsum("TD,DE->TE", x, w, preferred_element_type=jnp.float32, precision=products.precision(x.dtype))
    text = jax.jit(f).lower(one, one).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" dot\(|gemm", line)]
    assert lines and any("highest" in line.lower() for line in lines) == asks, lines
