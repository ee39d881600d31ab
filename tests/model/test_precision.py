"""float32 is float32 on GPUs, read from programs compiled for them."""
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.cost.program import compile
from meshtrain.kernels import products

ROOT = Path(__file__).resolve().parent.parent.parent / "meshtrain"


def test_every_product_asks_for_its_precision():
    """An einsum of float32 operands without it is TF32 on a GPU. `products.einsum` asks by the operands' dtype."""
    for path in ROOT.rglob("*.py"):
        for call in re.finditer(r"jnp\.(einsum|matmul|dot|tensordot)\(", path.read_text()):
            after = path.read_text()[call.start():call.start() + 250]
            assert "precision=" in after, f"{path}: {after.splitlines()[0]}"


needs_compiler = pytest.mark.skipif(compile.missing_wheels(),
                                    reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")


@needs_compiler
@pytest.mark.parametrize("dtype, asks", [("float32", True), ("bfloat16", False)])
def test_a_gpu_multiplies_float32_in_float32(dtype, asks):
    mesh = jax.sharding.Mesh(compile.topology("h100:1"), ("data",))
    one = jax.ShapeDtypeStruct((256, 256), dtype,
                               sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    f = lambda x, w: products.einsum("TD,DE->TE", x, w, jnp.float32)
    text = jax.jit(f).lower(one, one).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" dot\(|gemm", line)]
    assert lines and any("highest" in line.lower() for line in lines) == asks, lines


@pytest.mark.parametrize("eq, left, right, dtype, tolerance", [
    ("BTD,DE->BTE", ("bfloat16", (2, 8, 512)), ("float32", (512, 24)), None, 1e-6),
    ("BTD,BTE->DE", ("bfloat16", (2, 300, 16)), ("float32", (2, 300, 24)), "float32", 1e-6),
    # rounded once, to 8 bits; before it 16 are right
    ("BTE,DE->BTD", ("float32", (2, 8, 24)), ("float32", (512, 24)), "bfloat16", 2 ** -8 + 1e-4)])
def test_float32_times_bfloat16_is_computed_by_parts_and_is_float32(eq, left, right, dtype, tolerance):
    """Without a float32 among the operands of a product, and as exact as if there were: tensor cores have none."""
    keys = jax.random.split(jax.random.key(0), 2)
    # numbers of very different sizes, in which parts of parts matter
    a, b = (jnp.asarray(jax.random.normal(key, shape) * jnp.exp(3 * jax.random.normal(key, shape[-1:])), of)
            for key, (of, shape) in zip(keys, (left, right)))
    product = jax.jit(lambda a, b: products.einsum(eq, a, b, dtype))
    dots = re.findall(r"stablehlo\.dot_general .*: \((tensor<\S+>), (tensor<\S+>)\)", product.lower(a, b).as_text())
    assert dots and all(operand.endswith("xbf16>") for pair in dots for operand in pair)
    found, wanted = np.asarray(product(a, b), np.float64), np.einsum(eq, *(np.asarray(x, np.float64) for x in (a, b)))
    sizes = np.einsum(eq, *(np.abs(np.asarray(x, np.float64)) for x in (a, b)))
    assert (np.abs(found - wanted) <= tolerance * sizes).all()
