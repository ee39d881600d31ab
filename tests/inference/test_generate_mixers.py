"""What a model goes on with from its cache is what whole passes give, for every mixer: 200 tokens, alone and beside
rows of other lengths, on one device and on eight."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
from test_hybrids import MODELS, run_of

from meshtrain import assembly, trained
from meshtrain.inference.generate import GenerationLimits, Generator

NEW = 200
PROMPTS = [[5, 6, 7], [200, 3, 90, 41, 17, 8, 2, 44, 31, 77, 250], [12]]


def made(model: str, mesh: dict):
    """(mesh, its Execution for generation, the model, drawn parameters)."""
    run = run_of(model, mesh, "zero3")
    made = assembly.assemble(run, jax.devices()[:math.prod(mesh.values() or [1])])
    params = parity.draw_parameters(made, 1)
    return trained.wrap(made, jax.device_put(params, made.program.step.state.sharding.params))


def completed(loaded, prompts):
    with jax.set_mesh(loaded.mesh), jax.default_matmul_precision("highest"):
        found = Generator(loaded.model, loaded.ex, loaded.params).complete(prompts, GenerationLimits(NEW))
    return [one.tokens for one in found]


@pytest.mark.parametrize("model", [pytest.param(model, marks=sampling.GRID) for model in MODELS])
def test_the_cache_gives_what_whole_passes_give(model):
    alone = made(model, {})
    together = completed(alone, PROMPTS)
    assert completed(alone, PROMPTS[1:2]) == together[1:2]
    assert completed(made(model, dict(data=2, fsdp=2, tensor=2)), PROMPTS) == together
    T = max(map(len, PROMPTS)) + NEW
    rows = np.zeros((len(PROMPTS), T), np.int32)
    for row, prompt, answer in zip(rows, PROMPTS, together):
        row[:len(prompt) + NEW] = prompt + answer
    index = np.broadcast_to(np.arange(T), rows.shape)
    batch = dict(tokens=rows, segments=np.ones_like(rows), index=index, positions=index, sequence=np.arange(len(rows)))

    def logits(params):
        x_BTD = alone.model.through_layers(alone.ex, params, jax.tree.map(jnp.asarray, batch))
        return alone.model.head_logits(alone.ex, params, x_BTD)
    with jax.set_mesh(alone.mesh), jax.default_matmul_precision("highest"):
        wanted = np.asarray(jax.jit(logits)(alone.params)).argmax(-1)
    for prompt, answer, row in zip(PROMPTS, together, wanted):
        assert answer == row[len(prompt) - 1:len(prompt) - 1 + NEW].tolist()
