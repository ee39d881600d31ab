"""What gradients of anybody's loss send on GPUs, and what those of a stack hold: programs compiled for eight H100."""
import functools

import jax
import jax.numpy as jnp
import pytest
import small_models
from gpu_programs import needs_compiler
from jax.sharding import NamedSharding, PartitionSpec as P
from small_models import AXES, STACK

from meshtrain.cost.program import audit, compile
from meshtrain.library.layouts import Layout

MICROBATCHES = 4
N = 7 / 8           # what a device of eight sends or receives of an array that is gathered or scattered
# × the float32 weights. An all-reduce is a reduce-scatter and a gather. ZeRO-2 scatters in each microbatch and gathers
# once. ZeRO-3 gathers and scatters in each microbatch; a stack gathers its layers again for their backward, and thus
# does not hold them.
SENT = {"ddp": 2 * N, "zero1": 2 * N, "zero2": MICROBATCHES * N + N, "zero3": MICROBATCHES * 2 * N}
MESH = {"ddp": dict(data=8), "zero1": dict(data=8), "zero2": dict(data=8), "zero3": dict(fsdp=8)}


@functools.cache
def compiled(name: str, loss):
    """(the program, the layout, bytes of the float32 weights, those of the layers)."""
    layout = Layout(name, MESH[name], compile.topology("h100:8"))
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, small_models.draw_params(D=128, F=512)))
    by_rows = NamedSharding(layout.mesh, P(layout.inner.batch_axes))
    rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_rows), small_models.draw_rows(64))
    traced = jax.jit(layout.gradients(loss, AXES, MICROBATCHES)).trace(layout.place(params, AXES), rows)
    weights, in_layers = (sum(4 * a.size for a in jax.tree.leaves(tree)) for tree in (params, params["blocks"]))
    return traced.lower(lowering_platforms=("cuda",)).compile(), layout, weights, in_layers


@needs_compiler
@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("loss", [small_models.loss, STACK], ids=["loss", "stack"])
def test_a_loss_of_anybody_sends_what_its_rule_file_says(name, loss):
    program, layout, weights, in_layers = compiled(name, loss)
    rows = audit.read(program.as_text(), layout.mesh).collectives
    sent = sum(row.bytes for row in rows if row.bytes > 1e-3 * weights) / weights
    again = MICROBATCHES * N * in_layers / weights * (loss is STACK and name == "zero3")
    assert sent == pytest.approx(SENT[name] + again, rel=0.01), audit.summarize(rows)


@needs_compiler
def test_zero3_of_a_stack_holds_no_gathered_weights_and_that_of_a_loss_does():
    stack, loss = (compiled("zero3", loss) for loss in (STACK, small_models.loss))
    held = [program.memory_analysis().temp_size_in_bytes / weights for program, _, weights, _ in (stack, loss)]
    assert held[1] - held[0] > 0.7, f"{held}: three of four layers"
