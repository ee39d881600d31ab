"""Documents that share a row are as if each had a row of its own, for every mixer, through the whole model: the loss of
every token, and the gradient of every leaf. Lengths from one token on, across the chunks of recurrences."""
import jax
import numpy as np
import parity
import pytest

from meshtrain import config
from meshtrain.kernels import recurrence
from meshtrain.model import params
from meshtrain.names import NO_TARGET, PADDING

CHUNK = 32
T = 4 * CHUNK + 16
BASE = dict(vocab_size=259, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, norm_eps=1e-2,
            compute_dtype="float32")
LINEAR = dict(key_heads=2, value_heads=4, key_dim=8, value_dim=6, norm_eps=1e-2)
MODELS = {
    "attention": BASE | dict(mixers="FWNV", num_layers=4, window=5, attention_sinks=True, attention_gate=True),
    "delta": BASE | dict(mixers="G", num_layers=2, linear=LINEAR),
    "kda and latents": BASE | dict(
        mixers="KFN", num_layers=3, linear=LINEAR | dict(key_heads=4, value_dim=8), num_kv_heads=4, head_dim=14,
        latent=dict(kv_dim=12, query_dim=10, rope_dim=6, value_dim=10)),
    "mamba": BASE | dict(mixers="M", num_layers=2, linear=LINEAR | dict(conv_bias=True)),
}
# Of each row; what is left is padding. The second ends its first document at the end of a chunk, the third has one that
# is longer than a chunk after one of a single token.
ROWS = [range(1, 16), [CHUNK, 1, 1, 2, 3, CHUNK - 5, 1], [1, CHUNK + 9, 5, 1, 40]]


def batches() -> tuple[dict, dict]:
    """(packed, each document in a row of its own)."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 259, (2, length)) for length in row] for row in ROWS]
    return rows_of(documents), rows_of([[one] for row in documents for one in row])


def rows_of(rows) -> dict:
    batch = {name: np.zeros((len(rows), T), np.int32) for name in ("tokens", "positions", "segments")}
    batch |= {"targets": np.full((len(rows), T), NO_TARGET, np.int32), "index": np.tile(np.arange(T), (len(rows), 1)),
              "sequence": np.arange(len(rows))}
    for row, documents in enumerate(rows):
        at = 0
        for number, (tokens, targets) in enumerate(documents):
            here = slice(at, at + len(tokens))
            batch["tokens"][row, here], batch["targets"][row, here] = tokens, targets
            batch["positions"][row, here], batch["segments"][row, here] = np.arange(len(tokens)), PADDING + 1 + number
            at += len(tokens)
        assert at <= T
    return {name: a.astype(np.int32) for name, a in batch.items()}


def computed(model: str, mesh: dict, *batches: dict):
    """Of each batch (its tokens' losses in order, gradients)."""
    run = config.Run(mesh=mesh, sharding=dict(rules=str(parity.RULES / "ddp.toml")), model=MODELS[model],
                     data=dict(seq_len=T, global_batch=len(batches[0]["tokens"])), training=dict(loss_chunk=T))
    made = parity.assemble(run)
    program, step = made.program, made.program.step
    # Decays as at the start, weak and strong: of drawn ones little would leak.
    weights = params.map_params(made.model.parameters(), lambda info, pair: pair[info.path[-1] in ("A_log", "dt_bias")],
                            jax.tree.map(lambda *pair: pair, parity.draw_parameters(made, 0),
                                         jax.device_get(made.model.init(jax.random.key(0)))))

    @jax.jit
    def both(p, batch):
        one = {name: a[0, 0] for name, a in batch.items()}
        x = made.model.through_layers(step.ex, p, one)
        return made.model.head_token_nll(step.ex, p, x, one["targets"]), program.gradients(p, batch, None)[0]
    back = slice(None) if step.order is None else np.argsort(step.order)
    found = []
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        placed = jax.device_put(weights, step.state.sharding.params)
        for batch in batches:
            nll, grads = jax.device_get(both(placed, program.place(batch)))
            real = batch["targets"] != NO_TARGET
            found.append((nll[:, back][real], grads))
    return found


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """So that a short row has several."""
    monkeypatch.setattr(recurrence, "DELTA_CHUNK", CHUNK)
    monkeypatch.setattr(recurrence, "SUM_CHUNK", CHUNK)


@pytest.mark.parametrize("model", [
    pytest.param(model, marks=pytest.mark.long) if model == "kda and latents" else model for model in MODELS])
def test_packed_documents_are_as_each_alone(model):
    packed, alone = batches()
    one_document = packed | {"segments": np.minimum(packed["segments"], 1)}
    (nll, grads), (leaked, _) = computed(model, {}, packed, one_document)
    (expected, expected_grads), = computed(model, {}, alone)
    np.testing.assert_allclose(nll, expected, rtol=2e-5, atol=2e-5)
    parity.check_leaves(grads, expected_grads)
    assert np.abs(leaked - expected).max() > 0.01, "documents that see each other are found"
    if model == "kda and latents":      # both ways of carrying what is before a chunk, in zigzag order
        (nll, grads), = computed(model, dict(context=2), packed)
        np.testing.assert_allclose(nll, expected, rtol=2e-5, atol=2e-5)
        parity.check_leaves(grads, expected_grads)
