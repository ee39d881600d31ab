"""Computes the cost of a sampler that shares devices with the training state, in closed formulas: bytes, collectives
and seconds on one device.

A decoding step generates one token in every slot. It reads all weights and the slots' keys and values once, so HBM
bounds it up to hundreds of rows; with more rows FLOPs do. Its collectives run one after the other and hide behind
nothing, and so do the gaps between the small kernels of a layer. The sync moves each weight as `sharding.moves`
describes.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from meshtrain import hardware
from meshtrain.cost.formulas import calibrations
from meshtrain.cost.formulas.mixers import MixerCost
from meshtrain.cost.formulas.placed import Placed
from meshtrain.cost.formulas.sizes import FLOAT32, GATHER, SCATTER, SUM, Axes, Sent
from meshtrain.cost.formulas.price import Links
from meshtrain.cost.formulas.rates import Rates
from meshtrain.names import MATMUL_ROLES
from meshtrain.parallel.experts.region import ManualRegion
from meshtrain.sharding import moves
from meshtrain.sharding.rules import Layout

SYNC, TOKEN = "sync", "a token"        # labels


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """A sampler on the devices of a training run.

    placed: the model under the sampler's layout. stored: the training layout, on the same mesh. slots: number of slots
    on all devices. room: tokens of a slot. places: maps a layer's window (0: none) to the number of cache positions
    that a slot has in that layer.
    """
    placed: Placed
    stored: Layout
    slots: int
    room: int
    places: Callable[[int], int]
    _moves_by_path: dict[tuple[str, ...], moves.Moves] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def rows(self) -> float:
        """Return the number of slots on one device."""
        layout = self.placed.layout
        return self.slots / layout.num_shards(layout.batch_axes)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def itemsize(self, info) -> int:
        """Return the bytes of an element of a weight in the dtype that the sampler reads."""
        return self.placed.itemsize if info.role in MATMUL_ROLES else info.dtype.itemsize

    def read_bytes(self, info) -> float:
        return info.size * self.itemsize(info) / self._moves(info).shards(self._moves(info).after)

    def copy_bytes(self) -> float:
        """Return the bytes on one device of the weights that are copied for the sampler, because its layout differs
        from the training layout."""
        return sum(self.read_bytes(info) for info in self.placed.rows if self.is_copied(info))

    def is_copied(self, info) -> bool:
        moves = self._moves(info)
        return moves.before != moves.after or self.itemsize(info) != info.dtype.itemsize

    @functools.cached_property
    def slot_bytes(self) -> float:
        """Return the cache bytes of one slot on its device."""
        return sum(mixer.slot_bytes(self._layers(mixer), self.placed.itemsize, self.places)
                   for mixer in self.placed.mixers)

    @property
    def cache_bytes(self) -> float:
        return self.rows * self.slot_bytes

    def fitting_beside(self, state_bytes: float, usable_bytes: float) -> int:
        """Return the largest number of slots, on all devices, that fits beside `state_bytes` of training state on each
        device. A fraction of the memory (`calibrations`) stays free."""
        return self.fitting((1 - calibrations.SAMPLER_SPARE) * usable_bytes - state_bytes - self.copy_bytes())

    def fitting(self, free_bytes: float) -> int:
        """Return the largest number of slots, on all devices, whose cache takes at most `free_bytes` on each device."""
        layout = self.placed.layout
        return max(0, int(free_bytes // self.slot_bytes)) * layout.num_shards(layout.batch_axes)

    def _layers(self, mixer: MixerCost) -> float:
        return mixer.share * self.placed.cfg.num_layers

    # ---- the sync ----------------------------------------------------------------------------------------------------

    def sync(self) -> list[Sent]:
        """Return the collectives that move the trained weights to the sampler's layout. Frozen weights move only once,
        so they are not included."""
        sents = []
        for info in self.placed.rows:
            if info.trainable and self.is_copied(info):
                dtype = self.placed.dtype if info.role in MATMUL_ROLES else FLOAT32
                sents += [Sent(kind, axes, dtype, array_bytes, 1, SYNC, layer=False) for kind, axes, array_bytes
                          in self._moves(info).collectives(info.size * self.itemsize(info))]
        return sents

    def sync_s(self, rated: Rates) -> float:
        """Return the seconds of a sync: the longer of its collectives and its HBM traffic. HBM traffic reads the stored
        weights and writes them twice, once gathered and once in the sampler's order."""
        links = Links(rated, self.placed.mesh)
        moved = [info for info in self.placed.rows if info.trainable and self.is_copied(info)]
        stored = sum(i.size * i.dtype.itemsize / self._moves(i).shards(self._moves(i).before) for i in moved)
        return max(sum(map(links.one_s, self.sync())), rated.stream_s(stored + 3 * sum(map(self.read_bytes, moved))))

    def _moves(self, info) -> moves.Moves:
        if info.path not in self._moves_by_path:
            self._moves_by_path[info.path] = moves.of_weight(info.shape, info.axes, self.stored, self.placed.layout)
        return self._moves_by_path[info.path]

    # ---- a token of every slot ---------------------------------------------------------------------------------------

    def token_bytes(self, length: float) -> float:
        """Return the HBM bytes that one device reads in a decoding step if each slot has `length` tokens."""
        read = sum(self.read_bytes(info) * self._share_read(info) for info in self.placed.rows)
        for mixer in self.placed.mixers:
            read += self.rows * self._layers(mixer) * mixer.read_bytes(self.placed.itemsize, length)
        return read

    def token_flops(self, length: float) -> float:
        """Return the matmul FLOPs of a decoding step on one device if each slot has `length` tokens."""
        placed, cfg = self.placed, self.placed.cfg
        products = cfg.num_layers * sum(one.share * one.k * one.n for one in placed.layer.products)
        products += placed.head.k * placed.head.n + sum(
            info.size / self._moves(info).shards(self._moves(info).after) * self._visits(info)
            for info in placed.rows if _of_experts(info))
        attended = sum(mixer.decode_products(self._layers(mixer), length) for mixer in placed.mixers)
        return 2 * self.rows * (products + attended)

    def token(self) -> list[Sent]:
        """Return the collectives of a decoding step."""
        return [sent for sent in self._token() if sent.axes]

    def token_s(self, rated: Rates, length: float) -> dict[str, float]:
        """Return the seconds of a decoding step by what bounds it: HBM or FLOPs, whichever takes longer; collectives;
        and gaps between kernels."""
        share = rated.assumed["matmul.best"] * rated.assumed["matmul.sustained"] * rated.assumed["matmul.clock"]
        seconds = {"HBM": rated.stream_s(self.token_bytes(length)),
                   "FLOPs": self.token_flops(length) / (rated.peak(self.placed.cfg.compute_dtype) * share)}
        longest = max(seconds, key=seconds.__getitem__)
        links = Links(rated, self.placed.mesh)
        looped = sum(self._layers(mixer) for mixer in self.placed.mixers
                     if mixer.reads_in_a_loop(hardware.runs_kernels(rated.gpu)))
        gaps_s = 1e-6 * (rated.assumed["decode.gap_us"] * self.placed.cfg.num_layers
                         + rated.assumed["decode.loop_us"] * looped)
        return {longest: seconds[longest], "collectives": sum(one.runs * links.one_s(one) for one in self.token()),
                "gaps": gaps_s}

    def _token(self) -> Iterator[Sent]:
        placed, layout = self.placed, self.placed.layout

        def send(kind: str, axes: Axes, elements: float, runs: float) -> Sent:
            return Sent(kind, axes, placed.dtype, placed.itemsize * self.rows * elements, runs, TOKEN)
        width, vocab = placed.cfg.embed_dim, layout.mesh_axes("params", "vocab")
        for product in placed.layer.products:
            yield send(SUM, product.row, product.n, product.share * placed.cfg.num_layers)
        yield send(SUM, vocab, width, 1)            # of looked-up rows
        if layers := sum(info.shape[0] for info in placed.rows if _of_experts(info) and info.path[-1] == "down"):
            region = ManualRegion.of(layout)        # assumption: by gathers, also where tokens would be exchanged
            for kind in (GATHER, SCATTER):
                yield send(kind, region.gathered, width * layout.num_shards(region.gathered), layers)
            yield send(SUM, region.summed, width * layout.num_shards(region.gathered), layers)
        yield Sent(SUM, vocab, FLOAT32, 4 * self.rows, calibrations.DRAW_COLLECTIVES, TOKEN)
        yield Sent(GATHER, layout.batch_axes, "s32", 4 * self.slots, calibrations.END_COLLECTIVES, TOKEN)

    def _visits(self, info) -> float:
        """Return the mean number of tokens that one of a device's experts multiplies, per slot of the device."""
        cfg, region = self.placed.cfg, ManualRegion.of(self.placed.layout)
        return cfg.experts_per_token / cfg.num_experts * region.num_shards(region.gathered)

    def _share_read(self, info) -> float:
        """Return the fraction of a weight that a decoding step reads. Only chosen experts are read, and look-ups in an
        embedding table count 0."""
        cfg, tied = self.placed.cfg, self.placed.cfg.tie_embeddings
        if info.role == "embedding" and not (tied and info.axes[0] == "vocab"):
            return 0.0
        if not _of_experts(info):
            return 1.0
        return 1 - (1 - cfg.experts_per_token / cfg.num_experts) ** (
            self._visits(info) * self.rows * cfg.num_experts / cfg.experts_per_token)


def _of_experts(info) -> bool:
    return "expert" in info.axes and info.role == "matrix"
