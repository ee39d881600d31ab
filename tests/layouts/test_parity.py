"""Every pair of choices computes what one device computes. Of the table's cells the core has some with every choice once.

`python tests/parity.py 20` prints a table, which is made anew where a choice is added.
"""
import parity
import pytest

TABLE = """
hsdp_zero1 data none tensor none gather offload llama none all lora lion float32 4
tensor data none tensor gpipe none none llama none none none lion bfloat16 1
zero1 data none none gpipe ulysses full dropout softmax all lora lion float32 1
zero2 data fsdp tensor none none none olmo none none lora lion float32 1
zero3 none none tensor gpipe gather selective gemma sent none none lion float32 1
zero3_experts_fsdp none fsdp tensor none none offload gpt2 softmax none none adamw float32 4
zero3_experts_tensor data fsdp none interleaved none selective gemma none all lora lion bfloat16 2
zero3 data fsdp none zero_bubble none full llama none period lora muon float32 1
zero3_experts_tensor data none tensor none ring offload olmo sigmoid none none lion float32 2
zero1 none fsdp tensor none ulysses selective dropout none none none adafactor bfloat16 4
tensor none fsdp none interleaved_zero_bubble gather none llama sent all lora lion float32 2
hsdp data fsdp tensor none none selective llama softmax none lora adafactor float32 1
zero3_experts_fsdp data none tensor gpipe none selective gpt2 none period lora lion float32 1
ddp none none tensor interleaved gather full llama none none none muon bfloat16 2
hsdp_zero1 none fsdp none zero_bubble ulysses none llama sigmoid all none lion float32 1
zero2 data fsdp tensor none none full olmo sent period none lion float32 4
ddp data none tensor none ring none gemma softmax period lora lion float32 4
hsdp_zero1 data none tensor interleaved_zero_bubble none selective dropout sigmoid none lora adamw float32 2
hsdp none fsdp none 1f1b ring full gpt2 none all none lion bfloat16 1
tensor data fsdp tensor none none offload dropout sent none lora muon float32 1
zero2 none none tensor zero_bubble ring selective llama none none lora lion float32 2
zero3 data fsdp none none ulysses offload olmo none period lora lion bfloat16 2
zero3_experts_tensor none none tensor gpipe gather selective olmo softmax all lora lion float32 2
zero3_experts_fsdp data none none interleaved ulysses none gpt2 sent none lora adafactor float32 2
hsdp data none tensor none gather full gpt2 sigmoid none lora muon float32 4
hsdp_zero1 none none tensor interleaved_zero_bubble ulysses full gemma none none none lion bfloat16 2
ddp data none none 1f1b gather none dropout none period lora lion float32 1
zero1 none fsdp tensor gpipe none selective llama softmax none lora muon float32 1
zero2 none none tensor gpipe ring selective dropout none none lora adamw bfloat16 1
ddp data none none interleaved ring selective llama sent none lora adamw float32 4
zero3_experts_fsdp none fsdp tensor zero_bubble none selective llama none none lora muon bfloat16 4
hsdp_zero1 none fsdp none 1f1b ulysses selective llama none none lora muon float32 2
ddp data fsdp tensor none none offload gemma sigmoid none lora adafactor float32 1
zero2 data fsdp none gpipe none selective llama none none lora muon float32 4
ddp data none none interleaved_zero_bubble ring selective llama none period lora lion float32 4
ddp none fsdp tensor interleaved none selective llama sigmoid period lora lion float32 2
zero3_experts_tensor data none none zero_bubble gather selective llama none none lora muon float32 1
ddp none fsdp tensor 1f1b none selective llama none none lora lion float32 4
""".strip().splitlines()
CELLS = [dict(zip(parity.CHOICES, row.split(), strict=True)) for row in TABLE]


def cover(cells: list[dict[str, str]]) -> list[dict[str, str]]:
    """Few of the cells, with every choice of all of them: always the one with the most choices that are new."""
    taken, left = [], {choice for cell in cells for choice in cell.items()}
    while left:
        taken.append(max(cells, key=lambda cell: len(left & set(cell.items()))))
        left -= set(taken[-1].items())
    return taken


CORE = cover(CELLS)


def test_the_table_has_every_pair_of_choices():
    assert all(map(parity.possible, CELLS))
    assert set().union(*map(parity.pairs, CELLS)) >= parity.every_pair()


def test_the_core_has_every_choice_in_few_cells():
    assert {choice for cell in CORE for choice in cell.items()} == {choice for cell in CELLS for choice in cell.items()}
    assert len(CORE) <= 12


@pytest.mark.parametrize("cell", [
    pytest.param(cell, marks=[] if cell in CORE else pytest.mark.full, id=row.replace(" none", "").replace(" ", "-"))
    for cell, row in zip(CELLS, TABLE, strict=True)])
def test_a_cell_equals_one_device(cell):
    parity.check(parity.run_of(cell), 0, parity.BFLOAT16 if cell["dtype"] == "bfloat16" else parity.FLOAT32)
