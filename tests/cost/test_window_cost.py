"""What windows cost by formulas: the pairs of queries and keys that kernels visit, a model's FLOPs, the price of a
step."""
import random

import numpy as np
import pytest
import test_roofline

from meshtrain import config, design
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas import attention_pairs, flops
from meshtrain.cost.formulas.options import Attended
from meshtrain.cost.formulas.place import place
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout


# A window of a quarter: 7/16 of the causal half. Of a chunk whose queries begin 4,096 tokens after its keys a corner is
# within one of 1,024.
@pytest.mark.parametrize("target, extra, products, pairs", [
    ("__cudnn$fmhaSoftmax",
     'backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL", "sliding_window_length": 1024}}', 2, 7 / 32),
    ("__cudnn$fmhaSoftmax",
     'backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL", "sliding_window_length": 0}}', 2, 1 / 2),
    ("__gpu$xla.gpu.triton",
     'metadata={op_name="attention/meshtrain_attention_dq_causal_window1024/pallas_call"}', 3, 7 / 32),
    ("__gpu$xla.gpu.triton", 'metadata={op_name="attention/meshtrain_attention_dq_window5120_ahead4096/pallas_call"}',
     3, 1 / 2 + 7 / 32),
    ("__gpu$xla.gpu.triton", 'metadata={op_name="attention/meshtrain_attention_dkv_window1024_ahead4096/pallas_call"}',
     4, 1 / 32)])
def test_a_windowed_kernel_counts_what_it_computes(target, extra, products, pairs):
    line = test_roofline.lined(test_roofline.attention(target, extra), packed=False)
    kernel = next(kernel for kernel in line.kernels if kernel.part == "attention")
    assert kernel.flops == pytest.approx(products * 2 * (2 * 32 * 128) * 4096**2 * pairs, rel=1e-3)


def test_pairs_within_a_window_are_those_that_can_be_counted():
    for queries, keys, ahead, window in ((256, 256, 0, 100), (256, 256, 256, 300), (300, 200, 512, 450),
                                         (64, 64, 300, 200), (128, 512, 700, 5000)):
        apart = ahead + np.arange(queries)[:, None] - np.arange(keys)
        counted = ((apart >= 0) & (apart < window)).sum()
        assert attention_pairs.band_pairs(queries, keys, ahead, window) == pytest.approx(counted, rel=.03, abs=1)
    near, far = (attention_pairs.band_pairs(512, 512, ahead, 4096, 1000, 1.5) / 512**2 for ahead in (512, 2048))
    assert 0 < far < near < 1, "few documents reach far"


@pytest.mark.parametrize("mean, window", [(1500, 700), (1e9, 1024), (1500, 9000)])
def test_the_visited_share_of_a_window_is_that_of_drawn_documents(mean, window):
    """Documents laid end to end, the row cut out of them anywhere; 300 rows: the mean's error is about 2%."""
    drawn, block, length, visited, num_rows = random.Random(0), 128, 4096, 0, 300
    for _ in range(num_rows):
        edge, starts = -int(drawn.uniform(20, 40) * mean), []
        while edge < length:
            starts.append(edge)
            edge += max(1, round(drawn.lognormvariate(np.log(mean) - 1.5**2 / 2, 1.5)))
        for first in range(0, length, block):
            own = max(0, max(start for start in starts if start <= first), first - window + 1)
            visited += block * (first + block - own // block * block)
    assert attention_pairs.row_share(length, mean, 1.5, window=window) == pytest.approx(
        visited / num_rows / (length**2 / 2), rel=0.06)


GEMMA = dict(vocab_size=32000, embed_dim=1024, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=4096)


def test_a_models_flops_are_those_of_the_pairs_that_its_layers_see():
    """A token of a row of 8,192 sees 4,096 before it in the mean; within a window of 2,048 it sees 1,792."""
    S = 8192
    of = lambda **more: flops.model_flops_per_token(
        transformer.build(cfg := config.Model(**GEMMA, **more)).parameters(), cfg, S)
    seen = sum(min(t + 1, 2048) for t in range(S)) / S
    pair = 12 * 8 * 128                                  # forward and backward of a layer
    assert of() - of(window=2048) == pytest.approx(8 * pair * (S / 2 - seen), rel=1e-3)
    assert of() - of(window=2048, mixers="WWWF") == pytest.approx(6 * pair * (S / 2 - seen), rel=1e-3)
    # of 8 layers the third and sixth
    assert of() - of(window=2048, mixers="WWF") == pytest.approx(6 * pair * (S / 2 - seen), rel=1e-3)
    assert of(window=S) == of() == of(window=S - 1, mixers="F")


def test_a_layer_of_a_period_has_the_products_of_one_layer():
    """And of whole rows the price has the pairs of windows, of packed ones what their documents leave of them."""
    layout, mesh = Layout(rules.parse(""), dict.fromkeys(AXES, 1)), MeshSpec({})
    placed = {every: place(transformer.build(cfg := config.Model(**GEMMA, window=1024,
                                                                 mixers="W" * max(0, every - 1) + ("F" if every else "W"))).parameters(), cfg, layout, mesh)
              for every in (0, 3)}
    assert placed[3].layer.products == placed[0].layer.products and placed[3].layer.largest == placed[0].layer.largest
    assert placed[3].layer.used == pytest.approx(placed[0].layer.used) and placed[3].held.stored == placed[0].held.stored
    run = config.Run(model=dict(**GEMMA, window=1024, mixers="WWWF"),
                     data=dict(seq_len=8192, global_batch=1, document_mask=False))
    assumed = Assumptions("h100")
    attended = lambda run: attention_pairs.count(run, layout, assumed)
    assert attended(run) == Attended({"F": 1.0, "W": pytest.approx((2 - 1 / 8) / 8)}, "cudnn", documents=False)
    packed = run.replace(data={"document_mask": True})
    whole = attention_pairs.row_share(8192, 2000, 1.5)
    near = attention_pairs.row_share(8192, 2000, 1.5, window=1024)
    assert attended(packed) == Attended({"F": pytest.approx(whole), "W": pytest.approx(near)},
                                              "mosaic", documents=True) and near < whole / 2
    capped = run.replace(model={"score_softcap": 50.0})
    assert attended(capped).engine == "mosaic"


def test_stages_are_priced_by_whole_periods():
    run = config.Run(model=dict(**GEMMA | dict(num_layers=10), window=64, mixers="WWWF"), mesh=dict(stage=2),
                     sharding=dict(rules="sharding_rules/ddp.toml"), data=dict(seq_len=256, global_batch=4),
                     training=dict(microbatches=4))
    spec = MeshSpec(dict(stage=2))
    made = design.make(run, spec, "cpu", None)
    placed = place(made.model.parameters(), run.model, made.layout, spec)
    assert placed.layer.depth == 8 and any("padded with 6 identity layers" in note for note in made.notes)
