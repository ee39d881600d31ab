"""The settings of a step other than the layout, as the formulas read them."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshtrain import hardware
from meshtrain.choices import recurrence
from meshtrain.choices.setting import GPU_PLATFORMS
from meshtrain.config.sections import Run

if TYPE_CHECKING:
    from meshtrain.cost.formulas.forward import TeacherModel


@dataclasses.dataclass(frozen=True)
class Attended:
    """The work of a run's attention.

    visited: pairs that kernels visit as a fraction of the causal half, by mixer; mixers that are not listed have 1.
    engine: the attention engine, by its name in `assumptions`. documents: whether pairs across documents are skipped.
    """
    visited: Mapping[str, float]
    engine: str
    documents: bool = False


ADAMW_BYTES = 8     # bytes of AdamW's state per parameter


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a step other than the layout. schedule: the pipeline schedule; "" without stages."""
    seq_len: int
    global_batch: int
    microbatches: int = 1
    remat: str = "none"
    schedule: str = ""
    chunks: int = 1
    method: str = "ring"
    attended: Attended = dataclasses.field(default_factory=lambda: Attended({}, "cudnn"))
    loss_chunk: int = 2048
    optimizer_bytes: float = ADAMW_BYTES    # optimizer state per parameter
    dispatch: str = "auto"      # how tokens reach their experts
    recurrence: str = "xla"     # engine of recurrences: xla, pallas

    @property
    def teacher(self) -> TeacherModel | None:
        """The model whose forward comes before each step; None without one."""
        return None

    @property
    def host_bytes(self) -> float:
        """Further bytes of optimizer state per parameter, in the host's memory."""
        return 0.0

    @classmethod
    def of(cls, run: Run, gpu: str = "", **more) -> Options:
        """Return the options of a run file. gpu: the GPU's name in the hardware table, which determines the engine of
        recurrences."""
        return cls(run.data.seq_len, run.data.global_batch, run.training.microbatches, run.training.remat,
                   method=run.context.method, loss_chunk=run.training.loss_chunk, dispatch=run.experts.dispatch,
                   recurrence=recurrence.engine(run, GPU_PLATFORMS[0], hardware.GPUS.get(gpu)).value, **more)


@dataclasses.dataclass(frozen=True)
class StepOptions(Options):
    """The settings of a step that may have a teacher, or optimizer state in the host's memory."""
    teacher: TeacherModel | None = None
    host_bytes: float = 0.0
