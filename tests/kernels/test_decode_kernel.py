"""The kernel that reads the KV cache on GPUs: its numbers by Pallas' interpreter against every score held in float64;
the same tokens as transformers' with it in models of all kinds, whatever splits heads and slots; and what the GPU's
compiler makes of it and of the program around it. No GPU is needed."""
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
import sampling
import test_generate
from jax.sharding import PartitionSpec as P
from kernel_resources import compile_dumped, used

from meshtrain import assembly, config, hardware, trained
from meshtrain.cost.program import compile, hlo
from meshtrain.inference import cache, placement
from meshtrain.inference.generate import GenerationLimits, Generator
from meshtrain.kernels import decode, rotation
from meshtrain.kernels.engine import Scores
from meshtrain.model import transformer
from meshtrain.rl import samplers
from meshtrain.sharding.mesh import MeshSpec
from test_generate import EIGHT, ONE

needs_wheels = pytest.mark.skipif(compile.missing_wheels(), reason=f"extra gpu-compile: {compile.missing_wheels()}")


def attended(token, cache, layer, at_S, scores, window, sinks_N):
    """`decode.attend` in float64, a slot at a time, over positions instead of places."""
    q_SNH, key_SKH, value_SKV = token
    keys, values = (np.array(x, np.float64) for x in cache)
    o_SNV, R = np.zeros((*q_SNH.shape[:2], values.shape[-1])), values.shape[3]
    for s in np.flatnonzero(at_S >= 0):
        at = at_S[s]
        keys[layer, s, :, at % R], values[layer, s, :, at % R] = key_SKH[s], value_SKV[s]
        seen = np.arange(max(at - window + 1, 0) if window else 0, at + 1)
        k, v = (x[layer, s, :, seen % R][None] for x in (keys, values))
        every = np.ones((1, 1, len(seen)), bool)
        o, lse = plain_attention.forward(np.float64(q_SNH[None, s:s + 1]), k, v, every, scores)
        o_SNV[s] = (o if sinks_N is None else o * np.exp(lse - np.logaddexp(lse, sinks_N))[..., None])[0, 0]
    return o_SNV, keys, values


def drawn(rng, S: int, N: int, K: int, H: int, V: int, R: int, dtype="float32"):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
    return (decode.Token(normal(S, N, H), normal(S, K, H), normal(S, K, V)),
            (normal(3, S, K, R, H), normal(3, S, K, R, V)))


# (slots, query heads, key heads, widths of keys and values, places), window, softcap, sinks: parts of few slots, many
# slots in one part, widths that are no power of two, places that are written again, more heads than a tensor core's rows
CASES = [((5, 6, 2, 32, 16, 192), 0, 0.0, True), ((2, 8, 1, 64, 64, 128), 100, 30.0, False),
         ((4, 3, 3, 24, 40, 128), 0, 0.0, False), ((150, 4, 2, 16, 16, 64), 33, 0.0, True),
         ((1, 20, 1, 128, 128, 512), 0, 50.0, True), ((3, 2, 1, 256, 256, 128), 64, 0.0, False)]


@pytest.mark.parametrize("shape, window, softcap, sinks", CASES)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_a_token_reads_what_its_slot_has_written_and_is_written_behind_it(
        shape, window, softcap, sinks, dtype, tolerance):
    rng = np.random.default_rng(sum(shape))
    S, N, *_, R = shape
    edges = np.array([-1, 0, 1, 15, 16, 63, R - 1] + [R, R + 1, 5 * R + 7] * bool(window), np.int32)
    sinks_N = rng.standard_normal(N).astype(np.float32) if sinks else None
    call = jax.jit(partial(decode.attend, scores=Scores(softcap=softcap), window=window, sinks_N=sinks_N,
                           interpret=True))
    for _ in range(3):
        given = drawn(rng, *shape, dtype)
        at_S = np.where(rng.random(S) < 0.6, rng.choice(edges, S), rng.integers(0, R, S)).astype(np.int32)
        found, cache = call(*given, 1, at_S)
        wanted, *wanted_cache = attended(*jax.tree.map(np.float32, given), 1, at_S, Scores(softcap=softcap), window, sinks_N)
        assert found.dtype == jnp.dtype(dtype)
        assert np.abs(np.float64(found) - wanted).max() <= tolerance * np.abs(wanted).max()
        assert all((np.float64(a) == b).all() for a, b in zip(cache, wanted_cache, strict=True))


def test_a_slot_has_the_same_bits_whatever_the_others_have_and_what_it_has_not_written_is_not_seen():
    rng = np.random.default_rng(0)
    token, before = drawn(rng, 3, 4, 2, 32, 32, 256)
    call = jax.jit(partial(decode.attend, scores=Scores(), interpret=True))
    o, cache = call(token, before, 0, np.array([70, 200, -1], np.int32))
    other = [x.at[:, 1:].set(7.0) for x in before]
    other = [x.at[:, 0, :, 70:].set(1e30) for x in other]
    again, _ = call(token, tuple(other), 0, np.array([70, 5, 255], np.int32))
    assert (again[0] == o[0]).all() and (again[1] != o[1]).any() and not o[2].any()
    assert all((a[:, 2] == b[:, 2]).all() for a, b in zip(cache, before)), "a slot without a token is written"


def test_what_does_not_fit_is_left_to_the_loop():
    assert all(decode.fits(*of) for of in ((1, 64, 64, 64), (32, 128, 128, 64), (16, 256, 256, 128), (8, 96, 80, 192)))
    assert not any(decode.fits(*of) for of in ((64, 128, 128, 64), (1, 576, 512, 64), (1, 64, 64, 96)))
    assert [hardware.runs_kernels(gpu and hardware.get(gpu)) for gpu in ("h100", "a100-80gb", "b200", "mi300x", "cpu", None)
            ] == [True] * 3 + [False] * 3


def test_heads_that_share_a_key_head_over_devices_are_left_to_the_loop():
    """Three key heads on two devices, each of which has all of them and half of the query heads."""
    run = config.Run(model=dict(vocab_size=64, embed_dim=96, num_layers=1, num_heads=6, num_kv_heads=3, head_dim=16))
    keys = jax.ShapeDtypeStruct((1, 4, 3, 64, 16), "float32")
    one, two = (placement.command(transformer.build(run.model), MeshSpec({"tensor": n}).sizes) for n in (1, 2))
    assert cache._in_one_kernel(one, 6, keys, keys) and not cache._in_one_kernel(two, 6, keys, keys)


KINDS = ("gemma2", "gpt_oss", "qwen3", "ministral", "gemma3", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize("name, sizes", [
    pytest.param(name, sizes, marks=() if (name, sizes) in (("gemma2", EIGHT), ("gpt_oss", ONE)) else sampling.GRID)
    for name in KINDS for sizes in (ONE, EIGHT)] + [pytest.param("llama3.2", {"tensor": 4, "data": 2}, marks=sampling.GRID)])
def test_tokens_equal_those_of_transformers_with_the_kernel(name, sizes, monkeypatch):
    """Softcaps, windows that are written again, sinks; latents and recurrences, which it leaves alone."""
    mesh, made = test_generate.generator(name, **sizes)
    calls = []

    def interpreted(*args, of=decode.attend, **given):
        calls.append(args[0].q_SNH.shape)
        return of(*args, **given, interpret=True)
    monkeypatch.setattr(decode, "attend", interpreted)
    monkeypatch.setattr(rotation, "forward", partial(rotation.forward, interpret=True))
    prompts, wanted = test_generate.golden(name)
    engines = dataclasses.replace(made.ex.engines, by_kernels=True)
    made = dataclasses.replace(made, ex=dataclasses.replace(made.ex, engines=engines), kept={})
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        found = made.complete(prompts, GenerationLimits(len(wanted[0])))
    assert [one.tokens for one in found] == wanted
    assert bool(calls) == (name != "deepseek_v3")
    assert all(S * sizes.get("data", 1) >= 3 for S, *_ in calls)


# ---- compiled for GPUs -----------------------------------------------------------------------------------------------

SIZES = [(4, 64, 64, "bfloat16"), (32, 128, 128, "bfloat16"), (2, 256, 256, "bfloat16"), (4, 192, 128, "bfloat16"),
         (4, 96, 96, "bfloat16"), (4, 256, 256, "float32")]


@needs_wheels
@pytest.mark.parametrize("gpu, size", [
    pytest.param(gpu, size, marks=() if (gpu, size) == ("h100", SIZES[1]) else pytest.mark.long)
    for gpu in ("a100-80gb", "h100", "b200") for size in SIZES])
def test_compiled_for_a_gpu_it_spills_nothing_and_fits_its_shared_memory(gpu, size, tmp_path):
    G, H, V, dtype = size
    S, K, L, R = 64, 8, 4, 2048
    mesh = MeshSpec({}).build(compile.topology(f"{gpu}:1"))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))
    args = (decode.Token(array(dtype, S, K * G, H), array(dtype, S, K, H), array(dtype, S, K, V)),
            (array(dtype, L, S, K, R, H), array(dtype, L, S, K, R, V)), array("int32"), array("int32", S))
    with jax.set_mesh(mesh):
        call = jax.shard_map(partial(decode.attend, scores=Scores(softcap=30.0)), in_specs=P(), out_specs=P(),
                             check_vma=False)
        compile_dumped(jax.jit(call, donate_argnums=1).lower(*args), tmp_path)
    (one,) = used(decode.NAME, gpu, tmp_path).values()
    assert one.spilled_bytes == 0


@needs_wheels
@pytest.mark.parametrize("gpus, mesh", [("h100:1", {}), pytest.param("h100:4", dict(fsdp=2, tensor=2),
                                                                     marks=pytest.mark.long)])
def test_on_gpus_a_layer_reads_its_cache_in_one_kernel_and_its_weights_where_they_are(gpus, mesh):
    run = config.Run(mesh=mesh, sharding=dict(rules="sharding_rules/zero3.toml"), model=dict(
        vocab_size=4096, embed_dim=512, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=2048),
        data=dict(global_batch=4, seq_len=512))
    made = assembly.assemble(run, compile.topology(gpus))
    layout = placement.beside(made.model, made.layout)
    ex = trained.execution(made.run, made.model, layout, made.mesh)
    sampler = samplers.LocalSampler(made, ex, 64, 512)
    with jax.set_mesh(made.mesh):
        shapes = sampler.sync.abstract()
        decoded = Generator(made.model, ex, shapes, sampler.compile, 64, 512).programs(100)["decode"]
    text = decoded.as_text()
    assert len(re.findall(rf"{decode.NAME}/pallas_call", text)) and text.count('"__gpu$xla.gpu.triton"') == 1
    loops = [one for body in hlo.parse(text).computations.values() for one in body.values() if one.op == "while"]
    assert len(loops) == 2, "tokens, and layers"
    shards = layout.num_shards(layout.batch_axes), layout.num_shards(layout.mesh_axes("activations", "kv_heads"))
    cache_bytes = 2 * 3 * 64 * 4 * 512 * 64 * 2 // (shards[0] * shards[1])
    memory = decoded.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    # a layer's inward weights of the MLP: 4 MB; on jax 0.10 XLA copies a slice of weights before cuBLAS reads it
    if jax.__version_info__ >= (0, 11):
        assert not re.findall(r"(?m)^ .*= bf16\[(?:512,\d{4}|\d{4},512)\]\S* (?!parameter|get-tuple|bitcast)\w", text)
    assert memory.temp_size_in_bytes < cache_bytes // 2
