"""Chooses how tokens reach their experts and what computes the experts, and checks that the layout allows it."""
from __future__ import annotations

from meshtrain.choices.setting import Choice, Setting
from meshtrain.config.sections import Run
from meshtrain.kernels import activations, grouped, mosaic
from meshtrain.parallel.experts import all_to_all
from meshtrain.parallel.experts.dispatch import RoutedExperts
from meshtrain.parallel.experts.region import ManualRegion
from meshtrain.sharding.rules import Layout


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why experts.dispatch does not fit the layout; empty if it fits."""
    if not run.model.num_experts or run.experts.dispatch != "all_to_all" or not (against := _against_exchange(layout)):
        return []
    return [f'experts.dispatch="all_to_all": {against}; use "gather"']


def choose(setting: Setting) -> Choice[RoutedExperts | None]:
    """Choose how the experts are computed; None if the model has none. If an axis splits the experts, a line
    reports the choice.
    """
    run, layout, gpu = setting.run, setting.layout, setting.gpu
    if not run.model.num_experts:
        return Choice(None)
    engine = grouped.loop() if setting.platform == "cpu" else grouped.kernels(
        programs=gpu.num_sms or 0 if gpu and mosaic.is_taken_on(gpu) else 0)
    sent = dispatch(run.experts.dispatch, run.model.experts_per_token, layout)
    experts = RoutedExperts(engine, run.model.num_experts, activations.find(run.model.activation),
                            saves_inward=saves_inward(run.training.remat, layout.sizes["stage"]),
                            by_all_to_all=sent.value == "all_to_all",
                            adapter_scale=run.lora.alpha / run.lora.rank if run.lora.rank else 1.0)
    if not (axes := ManualRegion.of(layout).own):
        return Choice(experts)
    over = " × ".join(f"{axis} {layout.sizes[axis]}" for axis in axes)
    return Choice(experts, (", because ".join((f"experts: {sent.value} over {over}", *sent.why)),))


def dispatch(asked: str, K: int, layout: Layout) -> Choice[str]:
    """Choose "gather" or "all_to_all", with the reason.

    Each way, gather sends (n-1)·T·D elements, and all_to_all sends CAPACITY_FACTOR·K·T·D·(n-1)/n elements.
    """
    if asked != "auto":
        return Choice(asked, (f"experts.dispatch={asked}",))
    if reason := _against_exchange(layout):
        return Choice("gather", (reason,))
    if layout.sizes["stage"] > 1:
        return Choice("gather", ("a pipeline cannot split the rounds of an all-to-all into B and W",))
    num_shards = layout.num_shards(ManualRegion.of(layout).experts)
    is_cheaper = num_shards < all_to_all.CAPACITY_FACTOR * K
    return Choice("gather" if is_cheaper else "all_to_all", (
        f"{num_shards} shards are {'fewer' if is_cheaper else 'not fewer'} than {all_to_all.CAPACITY_FACTOR} × {K} "
        "experts per token",))


def saves_inward(remat: str, stages: int) -> bool:
    """Return whether the outputs of gate and up are saved for the backward.

    Saving avoids two of eleven matmuls, and takes memory for rows as wide as two experts. With remat `selective` these
    outputs would be most of the residuals. In pipelines they would fill every slot.
    """
    return remat == "none" and stages == 1


def _against_exchange(layout: Layout) -> str:
    region = ManualRegion.of(layout)
    if region.inner or not region.experts:
        return (f"{layout.rules.path} [params] splits experts over {list(region.experts)} and their width over "
                f"{list(region.inner)}, but an all-to-all needs experts that are split, with whole widths")
    if region.summed:
        return f"{layout.rules.path} splits no tokens over {list(region.summed)}, which splits experts"
    return ""
