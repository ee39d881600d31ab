"""Whole updates against an independent implementation (`reference`), and logits against Hugging Face's.

Every other comparison of numbers sets one of our layouts against another. Here nothing on the expected side was
computed by meshtrain: five steps of the compiled program must leave the parameters where the plain formulas leave them.
"""
import copy
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from meshtrain import assembly, config, trained
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.training.state import State

ROOT = Path(__file__).resolve().parent.parent
V, T, SEQUENCES, STEPS = 61, 24, 8, 5
SIZES = dict(vocab_size=V, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
             mlp_dim=20, compute_dtype="float32")
GPT2 = dict(norm="layernorm", activation="gelu", position="learned", max_seq_len=T + 3,
            attention_bias="all", mlp_bias=True,
            num_kv_heads=4, head_dim=4, tie_embeddings=True)  # fmt: skip

# Settings of [model], [training] and [optimizer]. Gradients here have norms of 1 to 3: a clip at 0.5 always bites, one
# at 100 never.
CASES = {
    "llama, adamw, cosine": (
        dict(qk_norm="head", rope_scaling=dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=16),
             rope_theta=100.0),
        dict(microbatches=4, z_loss=1e-2, grad_clip=0.5),
        dict(name="adamw", schedule="cosine", warmup_steps=2, final_fraction=0.2, weight_decay=0.3)),
    # eps is large: a key's bias changes no softmax, and Adam would make its rounding error a whole step.
    "gpt2, adamw, linear": (
        GPT2, dict(microbatches=2, grad_clip=0.5, remat="full"),
        dict(name="adamw", schedule="linear", warmup_steps=1, eps=1e-3, weight_decay=0.3)),
    "tied bfloat16 llama, lion, warm-up beyond the run": (
        dict(tie_embeddings=True, param_dtype="bfloat16"), dict(grad_clip=0.0),
        dict(name="lion", schedule="cosine", warmup_steps=50, b2=0.98, weight_decay=0.3)),
    "llama, adafactor, wsd": (
        dict(mlp_bias=True), dict(grad_clip=0.0, remat="selective"),
        dict(name="adafactor", schedule="wsd", warmup_steps=1, decay_steps=2, weight_decay=0.3)),
    "llama with biases, muon, constant": (
        dict(attention_bias="qkv"), dict(grad_clip=100.0, z_loss=1e-3),
        dict(name="muon", schedule="constant", warmup_steps=2, learning_rate=0.05, weight_decay=0.3)),
}  # fmt: skip


class Case:
    """A run, its compiled step, random parameters, and the reference beside it."""

    def __init__(self, model: dict, training: dict, optimizer: dict):
        self.run = config.Run(
            sharding=dict(rules=str(ROOT.parent / "sharding_rules" / "ddp.toml")), model=SIZES | model,
            data=dict(seq_len=T, global_batch=SEQUENCES), training=dict(steps=STEPS, loss_chunk=10) | training,
            optimizer=dict(learning_rate=0.01) | optimizer,
        )  # fmt: skip
        self.made = assembly.assemble(self.run, jax.devices()[:1])
        self.settings = self.run.model_dump()
        self.gradients = reference.Training(self.settings, {}).gradients   # compiled once for all runs of this case

    @functools.cached_property
    def step(self):
        with jax.default_matmul_precision("highest"):
            return self.made.program.compile()

    def params(self) -> dict:
        """Every leaf random, scales and biases too: those that start as ones and zeros would hide a fault."""
        rng = np.random.default_rng(0)
        draw = lambda info: (rng.normal(size=info.shape) * (0.3 if info.role != "norm" else 0.1) + (
            info.role == "norm"))
        rows = {info.path: draw(info).astype(info.dtype) for info in self.made.model.parameters()}
        tree = {}
        for path, leaf in rows.items():
            functools.reduce(lambda node, key: node.setdefault(key, {}), path[:-1], tree)[path[-1]] = leaf
        return tree

    def train(self, params, batches) -> tuple[dict, list[dict]]:
        """(parameters, metrics of each step) of the compiled program."""
        spec = self.made.program.step.state
        opt_state = jax.device_get(spec.tx.init(params))
        state, rows = jax.device_put(State(np.int32(0), params, opt_state), spec.sharding), []
        for batch in batches:
            state, metrics = self.step(state, self.made.program.place(batch))
            rows.append({name: np.asarray(value).item() for name, value in metrics.items()})
        return jax.device_get(state.params), rows

    def expected(self, params, batches) -> tuple[dict, list[dict]]:
        training = reference.Training(self.settings, params)
        training.gradients = self.gradients
        with jax.default_matmul_precision("highest"):
            rows = [training.step(batch) for batch in batches]
        return training.params, rows


@functools.cache
def case(name: str) -> Case:
    return Case(*CASES[name])


def batch_of(step: int) -> dict:
    """Packed documents; microbatches with very different counts of targets; token V - 1 in the third step alone."""
    rng = np.random.default_rng(step)
    shape = (SEQUENCES, T)
    starts = rng.random(shape) < 0.15
    starts[:, 0] = True
    index = np.tile(np.arange(T), (SEQUENCES, 1))
    targets = rng.integers(0, V, shape)
    targets[:, :-1][starts[:, 1:]] = -1
    targets[: SEQUENCES // 4] = np.where(rng.random((SEQUENCES // 4, T)) < 0.8, -1, targets[: SEQUENCES // 4])
    tokens = rng.integers(0, V - 1, shape)
    if step == 2:
        tokens[1, 3] = V - 1
    batch = {"tokens": tokens, "targets": targets, "segments": np.cumsum(starts, 1), "index": index,
             "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1),
             "sequence": step * SEQUENCES + np.arange(SEQUENCES)}  # fmt: skip
    return {name: x.astype(np.int32) for name, x in batch.items()}


def check_metrics(got, expected):
    for step, (row, plain) in enumerate(zip(got, expected, strict=True), 1):
        assert (row["skipped"], row["tokens"]) == (plain["skipped"], plain["tokens"]), step
        # One float32 rounding of the same formula.
        np.testing.assert_allclose(row["learning_rate"], plain["learning_rate"], rtol=1e-6, err_msg=f"step {step}")
        # float32 sums in another order, through updates that agree to 1e-3 of a step.
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(row[name], plain[name], rtol=2e-4, err_msg=f"{name} of step {step}")


def moved(after, before):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), after, before)


@pytest.mark.parametrize("name", CASES)
def test_five_updates_equal_the_plain_formulas(name):
    one, batches = case(name), [batch_of(step) for step in range(STEPS)]
    params = one.params()
    got, rows = one.train(copy.deepcopy(params), batches)
    expected, plain = one.expected(params, batches)
    check_metrics(rows, plain)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    # the way of an element whose update is always 1
    rates = sum(row["learning_rate"] for row in plain)
    got, expected = moved(got, params), moved(expected, params)
    if one.run.model.param_dtype == "bfloat16":
        # Weights of 0.3 are rounded to 0.001 in every step, on either side of a tie now and then.
        chex.assert_trees_all_close(got, expected, atol=0.004)
        different = [np.mean(a != b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)]
        assert max(different) < 0.05, different
    else:
        # Gradients agree to 1e-5 of the largest; Adam's division by small roots and Newton–Schulz magnify that.
        chex.assert_trees_all_close(got, expected, atol=1e-3 * rates)


def test_a_step_that_is_not_finite_changes_nothing_and_the_schedule_goes_on():
    """The row of a token that occurs in step 3 alone is infinite: loss and gradients of that step are NaN."""
    one, batches = case("llama, adamw, cosine"), [batch_of(step) for step in range(STEPS)]
    params = one.params()
    params["embedding"]["table"][V - 1] = np.inf
    got, rows = one.train(copy.deepcopy(params), batches)
    with np.errstate(invalid="ignore"):                       # decay of an infinite weight
        expected, plain = one.expected(params, batches)
    assert [row["skipped"] for row in rows] == [False, False, True, False, False]
    check_metrics(rows, plain)
    got, expected = ({**tree, "embedding": {"table": tree["embedding"]["table"][: V - 1]}} for tree in (got, expected))
    chex.assert_trees_all_close(got, expected, atol=2e-5)   # half a thousandth of a step's learning rate


def test_a_sample_goes_on_with_the_likeliest_token_of_the_plain_logits():
    """With a head of large weights the likeliest token has all the probability, whatever the temperature."""
    made = case("llama, adamw, cosine").made
    params = case("llama, adamw, cosine").params()
    params["head"]["kernel"] *= 1000
    bos, count, model = 3, 9, made.run.model_dump()["model"]
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        (answer,) = trained.wrap(made, params).generator().complete([[bos]], GenerationLimits(count), Picking(0.8))
        got = np.array([bos, *answer.tokens])
        batch = {"tokens": got[None], "positions": np.arange(count + 1)[None],
                 "segments": np.ones((1, count + 1), np.int32)}
        expected = np.asarray(reference.logits(model, jax.tree.map(jnp.asarray, params), batch))[0].argmax(-1)
    assert got[0] == bos and len(set(got.tolist())) > 3
    np.testing.assert_array_equal(got[1:], expected[:-1])


# ---- logits of another implementation --------------------------------------------------------------------------------

# Ours <- theirs in `model.layers.{l}.`; a torch Linear is [out, in].
LLAMA = {
    "attention_norm/scale": "input_layernorm", "mlp_norm/scale": "post_attention_layernorm",
    "attention/query/kernel": "self_attn.q_proj", "attention/key/kernel": "self_attn.k_proj",
    "attention/value/kernel": "self_attn.v_proj", "attention/out/kernel": "self_attn.o_proj",
    "attention/query_norm/scale": "self_attn.q_norm", "attention/key_norm/scale": "self_attn.k_norm",
    "mlp/gate/kernel": "mlp.gate_proj", "mlp/up/kernel": "mlp.up_proj", "mlp/down/kernel": "mlp.down_proj",
}  # fmt: skip


def tensors(folder: Path) -> dict:
    """The float32 tensors of a safetensors file: 8 bytes of header length, a JSON header, raw numbers."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    read = lambda entry: np.frombuffer(raw[start:], np.float32)[slice(*(n // 4 for n in entry["data_offsets"]))]
    return {name: read(entry).reshape(entry["shape"]) for name, entry in header.items()}


def llama_leaf(theirs: dict, path: str, shape) -> np.ndarray:
    ends = {"embedding/table": "model.embed_tokens", "final_norm/scale": "model.norm", "head/kernel": "lm_head"}
    if path in ends:
        return theirs[f"{ends[path]}.weight"].T if path == "head/kernel" else theirs[f"{ends[path]}.weight"]
    name = LLAMA[path.removeprefix("layers/")]
    return np.stack([theirs[f"model.layers.{layer}.{name}.weight"].T.reshape(shape[1:]) for layer in range(shape[0])])


def gpt2_leaf(theirs: dict, path: str, shape) -> np.ndarray:
    kind = {"kernel": "weight", "scale": "weight", "table": "weight", "bias": "bias"}[path.rsplit("/", 1)[1]]
    ends = {"embedding": "wte", "position": "wpe", "final_norm": "ln_f"}
    if path.split("/")[0] in ends:
        return theirs[f"transformer.{ends[path.split('/')[0]]}.{kind}"]
    block = path.removeprefix("layers/").rsplit("/", 1)[0]
    names = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention/out": "attn.c_proj", "mlp/up": "mlp.c_fc",
             "mlp/down": "mlp.c_proj"}  # fmt: skip
    each = lambda name: [theirs[f"transformer.h.{layer}.{name}.{kind}"] for layer in range(shape[0])]
    if block in names:
        return np.stack(each(names[block])).reshape(shape)
    third = ("query", "key", "value").index(block.split("/")[1])     # columns q, k, v of one matrix
    return np.stack([np.split(x, 3, -1)[third] for x in each("attn.c_attn")]).reshape(shape)


def model_settings(theirs: dict) -> dict:
    if theirs["model_type"] == "gpt2":
        return dict(vocab_size=theirs["vocab_size"], embed_dim=theirs["n_embd"], num_layers=theirs["n_layer"],
                    num_heads=theirs["n_head"], mlp_dim=4 * theirs["n_embd"], norm="layernorm", activation="gelu",
                    position="learned", max_seq_len=theirs["n_positions"], attention_bias="all", mlp_bias=True,
                    tie_embeddings=True)  # fmt: skip
    rope = theirs["rope_parameters"]
    scaled = {} if rope["rope_type"] == "default" else dict(
        rope_scaling={key: value for key, value in rope.items() if key != "rope_theta"})
    return scaled | dict(
        vocab_size=theirs["vocab_size"], embed_dim=theirs["hidden_size"], num_layers=theirs["num_hidden_layers"],
        num_heads=theirs["num_attention_heads"], num_kv_heads=theirs["num_key_value_heads"],
        head_dim=theirs["head_dim"],
        mlp_dim=theirs["intermediate_size"], norm_eps=theirs["rms_norm_eps"], rope_theta=rope["rope_theta"],
        # fmt: skip
        qk_norm="head" if theirs["model_type"] == "qwen3" else "off", tie_embeddings=theirs["tie_word_embeddings"])


@pytest.mark.parametrize("name", ["gpt2", "llama3.2", "qwen3"])
def test_logits_equal_those_of_hugging_face(name):
    """A tiny random model written by transformers 5.23 with its logits (float32): ours and the reference's equal
    them."""
    folder = ROOT / "goldens" / name
    golden, theirs = np.load(folder / "golden.npz"), json.loads((folder / "config.json").read_text())
    tokens = golden["tokens"]
    B, length = tokens.shape
    model = model_settings(theirs)
    run = config.Run(sharding=dict(rules=str(ROOT.parent / "sharding_rules" / "ddp.toml")),
                     # fmt: skip
                     model=dict(compute_dtype="float32") | model, data=dict(seq_len=length, global_batch=B))
    made = assembly.assemble(run, jax.devices()[:1])
    weights, params = tensors(folder), {}
    for info in made.model.parameters():
        leaf = (gpt2_leaf if name == "gpt2" else llama_leaf)(weights, info.name, info.shape)
        rows = info.shape[-1 if info.role == "head" else 0] - theirs["vocab_size"]
        if info.name in ("embedding/table", "head/kernel"):
            # Rows beyond the vocabulary are padding: whatever stands there, it must not show.
            leaf = np.pad(leaf, [(0, 0), (0, rows)] if info.role == "head" else [(0, rows), (0, 0)],
                          constant_values=3.0)
        chex.assert_shape(leaf, info.shape)
        functools.reduce(lambda node, key: node.setdefault(key, {}), info.path[:-1],
                         params)[info.path[-1]] = jnp.array(leaf)
    index = jnp.tile(jnp.arange(length), (B, 1))
    batch = {"tokens": jnp.array(tokens), "positions": index, "index": index, "segments": jnp.ones_like(index),
             "sequence": jnp.arange(B), "targets": jnp.zeros_like(index)}  # fmt: skip

    @jax.jit
    def ours(params, batch):
        ex = made.program.step.ex
        return made.model.head_logits(ex, params, made.model.through_layers(ex, params, batch))

    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        got, plain = ours(params, batch), reference.logits(run.model_dump()["model"], params, batch)
    chex.assert_shape([got, plain], golden["logits"].shape)
    # Logits up to 8 or so; either implementation is some 2e-5 from float64.
    np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
    np.testing.assert_allclose(plain, golden["logits"], atol=1e-4)
