"""Every pair of choices computes what one device computes: a table of cells that always run.

`python tests/parity.py 20` prints a table, which is made anew where a choice is added.
"""
import parity
import pytest

TABLE = """
hsdp data fsdp none none ring selective gpt2 softmax all lora lion float32 2
hsdp_zero1 data none tensor gpipe none full gemma none period lora adafactor bfloat16 4
tensor none fsdp tensor none gather offload olmo sigmoid period none muon float32 4
zero1 none fsdp none 1f1b ulysses full dropout sent none none adafactor float32 2
zero2 none none tensor zero_bubble ulysses selective gpt2 none all none lion bfloat16 1
zero3 data none none interleaved gather none olmo none none lora muon bfloat16 2
zero3_experts_fsdp none none tensor interleaved_zero_bubble ring none gemma softmax none none adamw float32 4
zero3_experts_tensor data fsdp none zero_bubble none none llama sigmoid period lora adamw float32 2
tensor data none tensor 1f1b none selective dropout sent all lora lion float32 4
zero2 data fsdp none none ulysses offload gemma softmax period lora adafactor float32 1
hsdp_zero1 none fsdp none gpipe gather full llama softmax all none muon float32 1
zero3_experts_fsdp none fsdp none none ring offload dropout none period lora adamw bfloat16 1
zero3 none fsdp tensor interleaved none selective gpt2 sigmoid none none lion float32 4
ddp none none tensor interleaved_zero_bubble gather selective gemma sent period lora muon float32 2
hsdp data none none interleaved_zero_bubble none full olmo sigmoid all none muon float32 4
zero3_experts_tensor none none tensor none ring offload llama sent none none adamw float32 4
zero1 data none tensor none none offload llama none all lora muon bfloat16 2
hsdp none none tensor 1f1b gather none gpt2 none period none adamw bfloat16 1
tensor none none none gpipe ring selective olmo sigmoid none none adafactor float32 1
zero3_experts_fsdp data none none zero_bubble ring full gpt2 sent none none muon float32 1
ddp none fsdp none gpipe ulysses none gemma sigmoid all none adamw float32 2
tensor none fsdp none interleaved_zero_bubble ulysses selective llama none none none adamw bfloat16 4
zero3_experts_tensor none none none zero_bubble gather none dropout none none none muon bfloat16 4
ddp data none none interleaved ulysses none olmo sent all none adamw float32 2
ddp none none none interleaved ring full llama none period none adamw bfloat16 2
ddp none none tensor none none none olmo softmax none none adamw float32 1
zero2 none fsdp none none none full llama none none none muon float32 1
hsdp_zero1 none fsdp none none none none dropout softmax none none adamw float32 1
ddp none none none 1f1b ring none dropout sigmoid none none adamw float32 1
zero3 none none none none ring offload gpt2 none none none adamw float32 1
zero3_experts_fsdp none none tensor none none none llama none none none adamw float32 1
""".strip().splitlines()
CELLS = [dict(zip(parity.CHOICES, row.split(), strict=True)) for row in TABLE]


def test_the_table_has_every_pair_of_choices():
    assert all(map(parity.possible, CELLS))
    assert set().union(*map(parity.pairs, CELLS)) >= parity.every_pair()


@pytest.mark.parametrize("cell", CELLS, ids=[row.replace(" none", "").replace(" ", "-") for row in TABLE])
def test_a_cell_equals_one_device(cell):
    parity.check(parity.run_of(cell), 0, parity.BFLOAT16 if cell["dtype"] == "bfloat16" else parity.FLOAT32)
