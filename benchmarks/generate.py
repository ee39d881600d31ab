"""python benchmarks/generate.py: tokens per second with a KV cache, compared with whole forward passes and with the
limit of the memory.

Whole passes are what a sampler without a cache computes: for every token the forward of all seq_len positions, of which
it reads one. With a cache, a token reads every weight once and the keys and values before it. The memory limit is the
last column but one: the tokens of a machine that only reads these bytes at the speed of its memory. This speed is
measured as a sum over an array of the weights' size. Both samplers are greedy and must agree.

Lockstep is a sampler whose rows begin together and end with the longest row. The other sampler refills slots when
sequences end. The lengths are geometric: every token is one of the stop tokens with the same probability. Times are CPU
seconds, measured in turns. Uses the devices of the machine and writes benchmarks/generate.md.
"""
from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, words
from meshtrain import config, trained
from meshtrain import devices as local_devices
from meshtrain.inference import placement
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.model import transformer
from meshtrain.sharding.mesh import MeshSpec

SHAPES = {      # name: (layers, width, heads, kv heads, MLP, vocabulary)
    "1 million": (4, 128, 4, 4, 384, 64),
    "2 million": (4, 192, 4, 4, 512, 512),
    "25 million": (8, 512, 8, 4, 1408, 4096),
}
CASES = [("2 million", 256, 1), ("2 million", 1024, 1), ("2 million", 256, 8), ("25 million", 256, 1),
         ("25 million", 256, 8)]
PROMPT, NEW, WHOLE = 16, 64, 4     # tokens; whole passes need only a few
SAMPLES, MOST, SLOTS, TURNS = 512, 224, (16, 64), 3


def placed(name: str, devices) -> trained.LoadedModel:
    """Return a model with random weights on one device."""
    layers, width, heads, kv_heads, mlp, vocab = SHAPES[name]
    run = config.Run(model=dict(vocab_size=vocab, embed_dim=width, num_layers=layers,
                                num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp,
                                compute_dtype="float32" if devices[0].platform == "cpu" else "bfloat16"))
    model, spec = transformer.build(run.model), MeshSpec({})
    mesh, layout = spec.build(devices), placement.command(model, spec.sizes)
    with jax.set_mesh(mesh):
        return trained.LoadedModel(model, mesh, trained.execution(run, model, layout, mesh),
                                   jax.jit(model.init)(jax.random.key(0)), trained.Compiler(mesh, {}))


def whole_passes(made: trained.LoadedModel, prompts: np.ndarray, seq_len: int):
    """Return a function that samples the next WHOLE tokens by whole forward passes."""
    index = jnp.broadcast_to(jnp.arange(seq_len), (len(prompts), seq_len))
    batch = {"segments": jnp.ones_like(index), "positions": index, "index": index,
             "sequence": jnp.zeros(len(prompts), jnp.int32)}

    @jax.jit
    def sample(p, tokens_BT):
        def extend(i, tokens_BT):
            x_BTD = made.model.through_layers(made.ex, p, {**batch, "tokens": tokens_BT})
            logits_BV = made.model.head_logits(made.ex, p, jax.lax.dynamic_slice_in_dim(x_BTD, i, 1, 1))[:, 0]
            return jax.lax.dynamic_update_slice(
                tokens_BT, jnp.argmax(logits_BV, -1)[:, None].astype(jnp.int32), (0, i + 1))
        return jax.lax.fori_loop(PROMPT - 1, PROMPT - 1 + WHOLE, extend, tokens_BT)[:, PROMPT:PROMPT + WHOLE]
    tokens = np.zeros((len(prompts), seq_len), np.int32)
    tokens[:, :PROMPT] = prompts
    return lambda: np.asarray(sample(made.read, tokens))


def seconds(call, repeats: int = 2) -> tuple[float, object]:
    """Return (the smallest seconds of several runs, the result). A first run, which compiles, is not counted."""
    found, least = call(), float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        found = call()
        least = min(least, time.perf_counter() - began)
    return least, found


def bytes_per_s(nbytes: int) -> float:
    """Return the rate at which the device reads this many bytes that are already in its memory."""
    array, total = jnp.ones(nbytes // 4, jnp.float32), jax.jit(jnp.sum)
    return nbytes / seconds(lambda: total(array).block_until_ready(), 5)[0]


def measure(name: str, seq_len: int, rows: int, devices) -> str:
    made = placed(name, devices)
    with jax.set_mesh(made.mesh):
        cfg, generator = made.model.cfg, made.generator()
        prompts = np.random.default_rng(rows).integers(0, cfg.vocab_size, (rows, PROMPT))
        one, _ = seconds(lambda: generator.complete(prompts.tolist(), GenerationLimits(1)))
        all_s, answers = seconds(lambda: generator.complete(prompts.tolist(), GenerationLimits(NEW)))
        whole_s, plain = seconds(whole_passes(made, prompts, seq_len))
    assert [answer.tokens[:WHOLE] for answer in answers] == plain.tolist(), "the two samplers do not agree"
    step, whole = (all_s - one) / (NEW - 1), whole_s / WHOLE
    size = made.ex.numerics.dtype.itemsize
    weights = sum(info.size for info in made.model.parameters() if info.name != "embedding/table") * size
    kept = rows * 2 * cfg.num_layers * (PROMPT + NEW // 2) * cfg.num_kv_heads * cfg.head_dim * size
    limit = (weights + kept) / bytes_per_s(weights)
    print(name, seq_len, rows, step, whole, limit, flush=True)
    return (f"| {name} | {seq_len:,} | {rows} | {rows / whole:,.1f} | {rows / step:,.1f} | {whole / step:,.0f} | "
            f"{weights / 1e6:,.1f} + {kept / 1e6:,.2f} | {rows / limit:,.0f} | {limit / step:.0%} |")


def refilled(devices) -> list[str]:
    """Return the rows of the second table: batches of `slots` samples in lockstep, compared with slots that are
    refilled."""
    made, lines = placed("1 million", devices), []
    stops = tuple(range(3))
    prompts = np.random.default_rng(0).integers(2, 64, (SAMPLES, PROMPT)).tolist()
    limits, how = GenerationLimits(MOST, stops), Picking(1.0)
    with jax.set_mesh(made.mesh):
        for slots in SLOTS:
            generator = dataclasses.replace(made.generator(), slots=slots)

            def lockstep() -> list:
                return [answer for at in range(0, SAMPLES, slots)
                        for answer in generator.complete(prompts[at:at + slots], limits, how)]
            ways = {"lockstep": lockstep, "refilled": lambda: generator.complete(prompts, limits, how)}
            spent, answers = {name: [] for name in ways}, {name: way() for name, way in ways.items()}    # compile
            assert answers["lockstep"] == answers["refilled"], "the two do not agree"
            for _ in range(TURNS):
                for name, way in ways.items():
                    began = time.process_time()
                    way()
                    spent[name].append(time.process_time() - began)
            tokens = sum(len(one.tokens) for one in answers["refilled"])
            slow, fast = (sorted(spent[name])[TURNS // 2] for name in ("lockstep", "refilled"))
            lines.append(f"| {slots} | {SAMPLES} | {tokens / SAMPLES:.1f}, {MOST} | {tokens / slow:,.0f} | "
                         f"{tokens / fast:,.0f} | {slow / fast:.2f} |")
            print(lines[-1], flush=True)
    return lines


def main(argv) -> int:
    words.Parser(__doc__).parse_args(argv)
    devices = local_devices.start(config.Run(run=config.Identity(compilation_cache="")))[:1]
    table = [measure(*case, devices) for case in CASES]
    lines = ["# Generation", "",
             "Written by `python benchmarks/generate.py`. The first lines of this script say what is measured and how.", "",
             machine.line("" if devices[0].platform == "cpu" else devices[0].device_kind, "jax", "jaxlib"), "",
             f"Prompts of {PROMPT} tokens, {NEW} new tokens. The machine was shared, so rates can be compared only within "
             "a row.", "",
             "| parameters | seq_len of whole passes | rows | tokens/s, whole passes | tokens/s, cached | times as "
             "fast | MB read per token step: weights + cache | tokens/s at the memory's speed | reached |",
             "|" + "---|" * 9, *table, "",
             "## Slots that are filled again", "",
             "Sampled at temperature 1 from a model of a million parameters. Medians of several turns. Attention reads up "
             "to the length of the longest sequence in the slots. In lockstep, all sequences begin together, so this "
             "length is large only at the end.", "",
             "| slots | samples | tokens of a sample: mean, largest | tokens a CPU second, lockstep | refilled | times as fast |",
             "|" + "---|" * 6, *refilled(devices), ""]
    (ROOT / "benchmarks" / "generate.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
