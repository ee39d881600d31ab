"""Parts of the loss that CPUs and GPUs compute by other code."""
import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.model import loss


def test_one_pass_over_logits_makes_the_log_sum_exp_of_two_also_with_padding_and_large_logits():
    x = 30 * jax.random.normal(jax.random.key(0), (7, 1000)).at[:, 900:].set(-jnp.inf)
    x = x.at[1, :500].set(-jnp.inf).at[2].add(1e4).at[3].set(-jnp.inf)
    (top, total), (top_2, total_2) = loss.in_one_pass(x), loss.in_two_passes(x)
    np.testing.assert_array_equal(top, top_2)
    np.testing.assert_allclose(top + jnp.log(total), top_2 + jnp.log(total_2), rtol=1e-6)   # sums in another order
    np.testing.assert_allclose(top + jnp.log(total), jax.nn.logsumexp(x, -1), rtol=1e-6)
