"""Numbers of layers are added, combined and divided by what each is a mean over."""
import jax
import jax.numpy as jnp

from meshtrain.model.stats import LayerStats, Normalizers


def stats_of(loss: float, load: list, bound: float) -> LayerStats:
    return LayerStats.of("token", aux_loss=jnp.float32(loss)) | LayerStats.of(
        "target", expert_load=jnp.array(load)) | LayerStats.of("step", score_bound=jnp.float32(bound))


def values(stats: LayerStats) -> dict:
    return {name: stat.value.tolist() for name, stat in stats.by_name.items()}


def test_sums_are_added_and_of_maxima_the_largest_is_kept():
    both = stats_of(1, [2.0, 0.0], 5) + stats_of(3, [1.0, 1.0], 4)
    assert values(both) == dict(aux_loss=4, expert_load=[3, 1], score_bound=5)


def test_a_missing_name_counts_as_zero_on_either_side():
    one, other = LayerStats.of("target", a=jnp.float32(1)), LayerStats.of("target", b=jnp.float32(2))
    assert values(one + other) == values(other + one) == dict(a=1, b=2)
    assert values(one + LayerStats()) == values(LayerStats() + one) == dict(a=1)


def test_numbers_that_do_not_count_change_nothing():
    total, new = stats_of(1, [2.0, 0.0], 5), LayerStats.of("step", score_bound=jnp.float32(9))
    assert values(total + new.where(jnp.bool_(False))) == values(total)
    assert values(total + new.where(jnp.bool_(True))) == values(total) | dict(score_bound=9)


def test_a_step_reports_means_over_tokens_and_targets_and_maxima_as_they_are():
    replicas = jax.tree.map(lambda *a: jnp.stack(a), stats_of(1, [2.0, 0.0], 5), stats_of(3, [2.0, 4.0], 4))
    metrics = replicas.combine().metrics(Normalizers(targets=jnp.float32(2), tokens=jnp.float32(8)))
    assert {name: a.tolist() for name, a in metrics.items()} == dict(aux_loss=0.5, expert_load=[2, 2], score_bound=5)
