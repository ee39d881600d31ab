"""Costs of a run with [rl] between its steps: moving weights to the sampler, memory while sampling, tokens per second.

Compares the formulas with the compiled programs of the sampler.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from meshtrain import hardware
from meshtrain.assembly import Assembly
from meshtrain.cost.formulas import rates, traffic
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.decode import Sampling
from meshtrain.cost.program import audit, roofline
from meshtrain.inspection import memory


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingCosts:
    """Costs of sampling on the devices of the run. costs: the costs by formulas. programs: the compiled programs
    "fill", "decode" and, if weights move, "sync". training_bytes: bytes per device of the compiled step. assumed: see
    `Inspected`."""
    made: Assembly
    costs: Sampling
    programs: Mapping[str, jax.stages.Compiled]
    training_bytes: int
    assumed: Mapping[str, float]

    def as_json(self) -> dict:
        """Return the costs per device as JSON. Times are null unless compiled for a GPU of known speed."""
        costs, gpu, held = self.costs, roofline.gpu_of(self.made.mesh), self._memory_bytes()
        rated = gpu and rates.Rates(gpu, Assumptions(gpu.name, self.assumed))
        sizes, layout = self.made.mesh_spec.sizes, costs.placed.layout

        def collectives(name: str) -> list[dict]:
            if name not in self.programs:
                return []
            return audit.summarize(audit.read(self.programs[name].as_text(), self.made.mesh).collectives)
        beside = held["compiled"]["total"] - held["compiled"]["cache"]
        usable = gpu and hardware.usable_bytes(gpu)
        parts = rated and costs.token_s(rated, costs.room)
        token_s, rl = parts and sum(parts.values()), self.made.run.rl
        passes = -(-rl.prompts * rl.samples // costs.slots) * rl.max_tokens
        return {
            "slots": costs.slots, "room": costs.room, "rules": layout.rules.path, "memory_bytes": held,
            "peak_bytes": max(held["compiled"]["total"], self.training_bytes),
            "slots_that_fit": usable and costs.fitting(usable - beside),
            "sync": {"collectives": {"formula": traffic.summarize(costs.sync(), sizes),
                                     "compiled": collectives("sync")},
                     "time_s": rated and costs.sync_s(rated)},
            "decode": {"hbm_bytes": round(costs.token_bytes(costs.room)), "flops": round(costs.token_flops(costs.room)),
                       "collectives": {"formula": traffic.summarize(costs.token(), sizes),
                                       "compiled": collectives("decode")},
                       "time_s": parts and {**parts, "total": token_s},
                       "batch_s_at_most": token_s and passes * token_s,
                       "tokens_per_s_per_gpu": token_s and costs.slots / token_s / self.made.mesh_spec.num_devices}}

    def _memory_bytes(self) -> dict[str, dict[str, Any]]:
        """Return bytes per device by kind. formula: has no temporaries. compiled: weights are the output of `sync`, the
        cache is the aliased output of `decode`. Temporaries are those of the larger of `fill` and `decode`, or those of
        `sync` beyond the size of the cache, which does not exist then."""
        state = {name: memory.formula(self.made)[name] for name in ("params", "optimizer")}
        ruled = {"state": sum(state.values()), "weights": round(self.costs.copy_bytes()),
                 "cache": round(self.costs.cache_bytes), "temporaries": None}
        by_name = {name: one.memory_analysis() for name, one in self.programs.items()}
        later = max(by_name[name].temp_size_in_bytes for name in ("fill", "decode"))
        cache = by_name["decode"].alias_size_in_bytes
        frozen = sum(self.costs.read_bytes(info) for info in self.costs.placed.rows
                     if not info.trainable and self.costs.is_copied(info))
        weights = round(frozen) + (by_name["sync"].output_size_in_bytes if "sync" in by_name else 0)
        first = by_name["sync"].temp_size_in_bytes if "sync" in by_name else 0
        compiled = {"state": ruled["state"], "weights": weights, "cache": cache,
                    "temporaries": max(later, first - cache)}

        def total(held: dict[str, int | None]) -> dict[str, int | None]:
            return held | {"total": sum(filter(None, held.values()))}
        return {"formula": total(ruled), "compiled": total(compiled)}
