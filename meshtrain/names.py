"""Names shared by several rooms: mesh axes, roles of parameters, special ids."""
from typing import NamedTuple

AXES = ("data", "fsdp", "tensor", "stage", "context")               # of the mesh
PLACEMENT = ("stage", "data", "fsdp", "context", "tensor")          # their order from the slowest link to the fastest

# Of parameters. router: float32 wherever it is used; balance: biases of the choice of experts, no optimizer touches
# them.
ROLES = ("matrix", "embedding", "head", "norm", "bias", "router", "balance")
# cast to the compute dtype, and decayed by the optimizer
MATMUL_ROLES = ("matrix", "embedding", "head")

LORA = "lora"          # key of a projection's adapter in the parameter tree: the rest is frozen where there is one
LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")   # projections that can have an adapter
LAYERS = "layers"      # key of the stacked layers in the parameter tree, and the logical axis of their leading dim
# that axis of layers before the stages of a pipeline: no rule splits it, every stage has all of them
LEADING = "leading_layers"


class PipelineSchedule(NamedTuple):
    """The properties of a pipeline schedule; `parallel.pipeline.schedules` makes its table."""
    chunked: bool = False           # a stage has several chunks of layers (Megatron's virtual pipeline stages)
    split: bool = False             # weight gradients are an op of their own, W
    forwards_first: bool = False    # no backward before the last forward


PIPELINE_SCHEDULES = {
    "gpipe": PipelineSchedule(forwards_first=True),
    "1f1b": PipelineSchedule(),
    "interleaved": PipelineSchedule(chunked=True),
    "zero_bubble": PipelineSchedule(split=True),
    "interleaved_zero_bubble": PipelineSchedule(chunked=True, split=True),
}
CHOSEN, REJECTED = 1, 2     # segments of a sequence that holds a pair of preferences
PADDING = 0            # segment of what fills a sequence up: no token sees it, and no expert gets it
PRNG = "threefry2x32"  # jax's generator of all random bits of a run
NO_TARGET = -1         # in a batch's targets: no loss at this token
AUX_LOSS = "aux_loss"  # the one entry of a layer's aux that is added to the objective
EXPERT_LOAD = "expert_load"    # in a layer's aux: tokens by layer and expert [L, E]
# In a layer's aux, with optimizer.qk_clip: by layer and head [L, N], zero in other layers' rows, a bound of the scores:
# the largest log-sum-exp of a token's, not below 0.
SCORE_BOUND = "score_bound"
# Of drawn tokens: the largest difference of the trainer's log-probability and the sampler's.
MISMATCH_MAX = "mismatch_max"
MAXIMA = {SCORE_BOUND, MISMATCH_MAX}    # of an aux: its maximum is taken where others are summed; none is below 0
# Of a row of metrics, made of EXPERT_LOAD: numbers of each layer [L], null where it has no experts.
LOAD_BY_LAYER = ("expert_load_max_by_layer", "expert_load_min_by_layer", "expert_load_entropy_by_layer")
# Logical axes of the experts' matrices and of the biases of their inward ones, by their names in the parameter tree.
EXPERT_AXES = {"gate": ("expert", "expert_embed", "expert_mlp"), "up": ("expert", "expert_embed", "expert_mlp"),
               "down": ("expert", "expert_mlp", "expert_embed"),
               "gate_bias": ("expert", "expert_mlp"), "up_bias": ("expert", "expert_mlp")}
# Scopes of what no compiler knows: around a condition, how often it holds in how many executions; around the matmuls of
# experts, the rows that a device has where all experts are equally busy; around a loop, that it runs where they are
# not, or how often it runs at most.
TAKEN, BALANCED_ROWS, FURTHER_ROUNDS = "taken_{}_of_{}", "balanced_rows_{}", "further_rounds"
AT_MOST = "at_most_{}_trips"
