"""Chooses what computes a run's layers: one choice for each kind of layer, none of which looks at another."""
from __future__ import annotations

from meshtrain import hardware
from meshtrain.choices import attention, experts, mlp, recurrence
from meshtrain.choices.setting import Choice, Refusal, Setting
from meshtrain.model.execution import Engines

# field of Engines -> module with its `choose`, in the order in which their lines are shown
CHOICES = {"attention": attention, "recurrence": recurrence, "mlp": mlp, "experts": experts}


def choose(setting: Setting) -> Choice[Engines]:
    """Make every choice of CHOICES. Raises: Refusal with the faults of all of them."""
    chosen: dict[str, Choice] = {}
    faults: list[str] = []
    for name, module in CHOICES.items():
        try:
            chosen[name] = module.choose(setting)
        except Refusal as refusal:
            faults += refusal.faults
    if faults:
        raise Refusal(*faults)
    values = {name: choice.value for name, choice in chosen.items()}
    return Choice(Engines(**values, by_kernels=hardware.runs_kernels(setting.gpu)),
                  tuple(line for choice in chosen.values() for line in choice.why))
