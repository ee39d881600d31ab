"""Measure sampling between the training steps of a run with [rl] on a GPU: weight sync, prefill and decoding, compared
with the predictions of `inspect`.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import gpu_speed
from benchmarks.gpu_record import ROOT, Item
from meshtrain import assembly, config, hardware, run_files
from meshtrain.cost.formulas import assumptions
from meshtrain.cost.formulas.rates import Rates
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.rl import samplers


class Sizes(NamedTuple):
    """prompt, answer: tokens. The first token of an answer is sampled from the last token of the prompt. overrides: of
    the run."""
    slots: tuple[int, ...] = (64, 512)
    prompt: int = 129
    answer: int = 257
    rounds: int = 3
    overrides: tuple[str, ...] = ()


def run_of(slots: int, count: int, sizes: Sizes) -> config.Run:
    given = "--mesh.fsdp", count, "--rl.slots", slots, "--rl.prompts", max(slots // 8, 1), *sizes.overrides
    return run_files.load([str(ROOT / "configs/llama3.2-1b-rl.toml"), *map(str, given)])


def median_s(call: Callable, rounds: int) -> float:
    """Return the median over calls, without the first one, which compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(slots: int, devices, sizes: Sizes, directory: Path) -> dict:
    """Return Item's results. All answers have the same length, so all slots are full until the end."""
    gpu_speed.take_turn(directory)
    made = assembly.assemble(run_of(slots, len(devices), sizes), devices)
    sampler, params = samplers.make(made), assembly.initialize(made).params
    rng, rl = np.random.default_rng(0), made.run.rl
    prompts = rng.integers(0, made.run.model.vocab_size, (slots // rl.samples, sizes.prompt)).tolist()

    def answered(tokens: int):
        with jax.set_mesh(made.mesh):
            return generator.complete(prompts, GenerationLimits(tokens), Picking(1.0),
                                      samples=[rl.samples] * len(prompts))
    sync_s = median_s(lambda: sampler.weights(params), sizes.rounds)
    generator = sampler.generator(params)
    one_s, all_s = (median_s(lambda: answered(tokens) and None, sizes.rounds) for tokens in (1, sizes.answer))
    token_s = (all_s - one_s) / (sizes.answer - 1)
    gpu = hardware.from_device_kind(devices[0].device_kind)
    rated = gpu and gpu.hbm_bytes_per_s and Rates(gpu, assumptions.Assumptions(gpu.name, {}))
    told = rated and sum(sampler.costs.token_s(rated, sizes.prompt + sizes.answer / 2).values())

    def ms(s: float | None) -> str:
        return f"{1e3 * s:.3g}" if s else "–"
    return {"row": {"sync, ms": ms(sync_s), "by inspect": ms(rated and sampler.costs.sync_s(rated)),
                    "prompts, ms": ms(one_s), "a token of all slots, ms": ms(token_s), "by inspect, ms": ms(told),
                    "tokens/s a GPU": f"{slots / token_s / len(devices):,.0f}"}}


def items(devices, directory: Path, sizes: Sizes = Sizes()) -> list[Item]:
    return [Item(f"sampling/1B, {slots} slots", partial(measure, slots, devices, sizes, directory), 40, alone=True)
            for slots in sizes.slots]
