"""Prices a forward without a backward: the forward of a teacher before each step of a run with training.objective =
"distill".

The formulas are those of a step whose layers have no backward. The teacher's weights lie beside the training state. Its
temporaries are freed before the step begins, so only the bytes beyond the step's temporaries count.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshtrain.cost.formulas import calibrations, flops, price, traffic
from meshtrain.cost.formulas.options import Attended, Options
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.formulas.sizes import FLOAT32, GATHER, ONCE, Sent
from meshtrain.model.divergence import GROUP
from meshtrain.sharding.rules import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherModel:
    """The teacher of a run, without a layout. place: maps (layout of the run, context method) to the teacher's layout.
    flops_per_token: FLOPs of its forward."""
    place: Callable[[Layout, str], tuple[Placed, Attended]]
    top_tokens: int
    flops_per_token: float

    def beside(self, student: Placed, options: Options) -> TeacherCost:
        """Return the costs beside a student under a layout."""
        placed, attended = self.place(student.layout, options.method)
        placed = dataclasses.replace(placed, mesh=student.mesh)
        remat = "full" if options.remat == "offload" else options.remat         # a forward copies nothing to the host
        kept = 8 * self.top_tokens * options.microbatches * student.tokens(options)     # an id and a number
        return TeacherCost(self, placed, dataclasses.replace(options, attended=attended, remat=remat), kept)


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherCost:
    """The costs of a teacher's forward on one device. kept_bytes: bytes of a step's predictions."""
    teacher: TeacherModel
    placed: Placed
    options: Options
    kept_bytes: float

    def add(self, held: dict, memory_bytes: dict[str, int] | None = None, with_batch: bool = False) -> dict:
        """Return the memory of a step and its teacher, by kind. The teacher adds its weights, its predictions, and the
        part of its temporaries that is larger than those of the step. held: the memory of the step. memory_bytes: the
        memory of the compiled forward; None: the memory by the formulas. with_batch: whether the total of `held`
        includes the predictions, which are arguments of the step."""
        own = memory_bytes or self.memory_bytes
        beyond = max(0, own["temporaries"] - (held["activations"] or 0) - (held["grads"] or 0))
        of_teacher = own["weights"] + own["predictions"] + beyond
        total = held["total"] and held["total"] + of_teacher - with_batch * own["predictions"]
        return held | {"teacher": of_teacher, "total": total}

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the weights as they are stored, of the predictions, and of the temporaries of the forward."""
        return {"weights": int(self.placed.held.stored_bytes), "predictions": int(self.kept_bytes),
                "temporaries": int(self._temporaries())}

    def _temporaries(self) -> float:
        """The copies of weights that all microbatches read, and the larger of: the arrays of a layer with the gathered
        weights of two layers; the logits of a chunk, the candidates among them, and the gathered head."""
        placed, size, tokens = self.placed, self.placed.itemsize, self.placed.tokens(self.options)
        h, n, stream = placed.cfg.embed_dim, placed.head.n, placed.cfg.embed_dim / placed.stream_shards
        mixer = placed.mean(lambda mixer: mixer.inward + mixer.outputs)
        layer = size * tokens * (2 * stream + h + max(mixer, (1 + placed.cfg.gated) * placed.mlp_width))
        if experts := placed.route(self.options):
            layer = max(layer, experts.inputs_bytes + 2 * size * tokens * stream)
        chosen = min(tokens, self.options.loss_chunk) * (4 * n + 8 * min(n, self.teacher.top_tokens * GROUP))
        loss = chosen + 3 * size * tokens * stream + size * n * placed.head.k * placed.by_layer
        copies = placed.held.moved if placed.by_layer else size * placed.held.cast
        return copies + max(layer + 2 * size * placed.layer.used * placed.by_layer, loss)

    @property
    def collectives(self) -> list[Sent]:
        """The collectives of the forward, with those that find the largest logits of all shards of the vocabulary."""
        placed, options = self.placed, self.options
        vocab = placed.layout.mesh_axes("activations", "vocab")
        chosen = 4 * placed.tokens(options) * self.teacher.top_tokens * placed.layout.num_shards(vocab)
        found = [Sent(GATHER, vocab, dtype, chosen, options.microbatches, "tensor", "", False)
                 for dtype in (FLOAT32, "s32") if vocab]
        return [sent._replace(overlaps="") if sent.overlaps == ONCE else sent
                for sent in traffic.of(placed, options)] + found

    @property
    def matmul_flops(self) -> float:
        """The FLOPs of matmuls, without attention and recurrences."""
        return flops.count_executed(self.placed, self.options)

    def seconds(self, rated: Rates) -> float:
        """Return the seconds of the forward."""
        placed, options, head = self.placed, self.options, self.placed.head
        work, tokens = price.LayerTimes(placed, rated, options), placed.tokens(options)
        waits = price.Waits(placed, rated, options, work, self.collectives)
        head_s = rated.product_s(tokens, head.n, head.k, placed.cfg.compute_dtype, placed.itemsize) + rated.stream_s(
            calibrations.CHOSEN_LOGIT * tokens * head.n)
        busy_s = options.microbatches * (placed.layers(options) * work.forward_s + head_s) + sum(waits.exposed.values())
        return busy_s * (1 + rated.assumed["step.overhead"])
