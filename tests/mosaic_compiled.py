"""Compiles the Mosaic kernels for a GPU at the shape of Llama 3 8B: GPU WIDTH VALUE_WIDTH SOFTCAP CAUSAL WINDOW AHEAD."""
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.cost.program import compile
from meshtrain.kernels import mosaic
from meshtrain.kernels.engine import Mask, Scores
from meshtrain.sharding.mesh import MeshSpec


def main(gpu, width, value_width, softcap, causal, window, ahead) -> None:
    B, T, N, K, mask = 1, 8192, 32, 8, Mask(bool(int(causal)), int(window), int(ahead))
    mesh, engine = MeshSpec({}).build(compile.topology(f"{gpu}:1")), mosaic.engine(Scores(softcap=float(softcap)))

    def both(q, k, v, segments, o, lse, do):
        return engine.forward(q, k, v, segments, segments, mask), engine.backward(
            q, k, v, segments, segments, o, lse, do, mask)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))
    q, k, v, o = (array(jnp.bfloat16, B, T, heads, int(of)) for heads, of in (
        (N, width), (K, width), (K, value_width), (N, value_width)))
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(both, in_specs=P(), out_specs=P(), check_vma=False)).lower(
            q, k, v, array(jnp.int32, B, T), o, array(jnp.float32, B, T, N), o).compile()


if __name__ == "__main__":
    main(*sys.argv[1:])
