"""Names and constants that several packages share: mesh axes, roles of parameters, special ids."""
from typing import NamedTuple

AXES = ("data", "fsdp", "tensor", "stage", "context")               # mesh axes
PLACEMENT = ("stage", "data", "fsdp", "context", "tensor")          # default order, slowest link first
# Values of training.remat that are tried in turn: the least recomputation and the most memory first. OFFLOAD: as full,
# but layers' inputs are kept on the host; not available with stages.
REMAT, OFFLOAD = ("none", "selective", "full"), "offload"

# Roles of parameters. router: always float32. balance: load-balancing biases of experts, which no optimizer updates.
ROLES = ("matrix", "embedding", "head", "norm", "bias", "router", "balance")
# roles that are cast to the compute dtype and have weight decay
MATMUL_ROLES = ("matrix", "embedding", "head")

LORA = "lora"          # key of a projection's adapter in the parameter tree; with adapters, other parameters are frozen
LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")   # projections that can have an adapter
# matrices of routed experts that can have an adapter in each expert, if lora.targets names them -> their name in the
# tree
LORA_EXPERTS = {"expert_gate": "gate", "expert_up": "up", "expert_down": "down"}
LORA_ALSO = ("embedding", "head", "mtp")        # what LoRA can train whole; keys of the parameter tree, or all depths
DEPTH = "mtp_"         # keys of the depths of multi-token prediction in the parameter tree: mtp_1, mtp_2, …
LAYERS = "layers"      # key of the stacked layers in the parameter tree, and the logical axis of their leading dim
# the logical axis of layers before the pipeline stages; no rule splits it, so every stage holds all of them
LEADING = "leading_layers"


class PipelineSchedule(NamedTuple):
    """The properties of a pipeline schedule, from which `parallel.pipeline.schedules` builds its table."""
    chunked: bool = False           # a stage has several chunks of layers (Megatron's virtual pipeline stages)
    split: bool = False             # weight gradients are a separate op, W
    forwards_first: bool = False    # no backward before the last forward


PIPELINE_SCHEDULES = {
    "gpipe": PipelineSchedule(forwards_first=True),
    "1f1b": PipelineSchedule(),
    "interleaved": PipelineSchedule(chunked=True),
    "zero_bubble": PipelineSchedule(split=True),
    "interleaved_zero_bubble": PipelineSchedule(chunked=True, split=True),
}
CHOSEN, REJECTED = 1, 2     # segment ids of the two answers in a sequence with a preference pair
PADDING = 0            # segment id of padding: no token attends to it, and no expert gets it
PRNG = "threefry2x32"  # jax's generator for all random bits of a run
NO_TARGET = -1         # in a batch's targets: no loss at this token
# Arrays of a batch in distillation: the teacher's most likely next tokens of each token, and their log-probabilities.
TEACHER_IDS, TEACHER_LOGP = "teacher_ids", "teacher_logp"
# Which weights of a checkpoint a command reads: the last ones, or their average by training.ema.
LAST, EMA = "last", "ema"
LINEAR, SQRT = "linear", "1-sqrt"       # shapes of the decay that a mean of checkpoints stands for
# Largest difference between the log-probabilities of a sampled token by the trainer and by the sampler.
MISMATCH_MAX = "mismatch_max"
# Columns of metrics, computed from the load of experts: a number for each layer [L], null for layers without experts.
LOAD_BY_LAYER = ("expert_load_max_by_layer", "expert_load_min_by_layer", "expert_load_entropy_by_layer")
# Name in the parameter tree -> logical axes, of the matrices of experts and the biases of their input projections.
EXPERT_AXES: dict[str, tuple[str | None, ...]] = {
    "gate": ("expert", "expert_embed", "expert_mlp"), "up": ("expert", "expert_embed", "expert_mlp"),
    "down": ("expert", "expert_mlp", "expert_embed"),
    "gate_bias": ("expert", "expert_mlp"), "up_bias": ("expert", "expert_mlp")}
# adapters of the matrices: A [E, in, R] and B [E, R, out]. The rank is not split.
EXPERT_AXES |= {f"{name}_a": (*EXPERT_AXES[name][:2], None) for name in LORA_EXPERTS.values()} | {
    f"{name}_b": ("expert", None, EXPERT_AXES[name][2]) for name in LORA_EXPERTS.values()}
