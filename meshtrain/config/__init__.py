"""The run file: sections, checks across keys, error messages, command lines. This package imports no jax and no model.
"""

from meshtrain.config.checks import (APART_FROM_LAYOUT, OF_LAYOUT, SIZE_KEYS, is_address, mesh_sizes, note_custom,
                                     notes, problems)
from meshtrain.config.command_line import OF_TRAINED, Arguments, Command, Option, number, one_of, whole
from meshtrain.config.from_python import words
from meshtrain.config.layouts import on_devices
from meshtrain.config.messages import SECTIONS, ConfigError, restarting, user_errors
from meshtrain.config.sections import (Checkpoint, Component, Context, Data, Distributed, Experts, Identity, Lora, Mesh,
                                       Metrics, Model, Optimizer, Pipeline, Run, Sharding, Training, Validation,
                                       WeightGroups)
from meshtrain.config.to_toml import dump, shape_table
from meshtrain.shipped import locate_shipped
from meshtrain.names import AXES

__all__ = [
    "APART_FROM_LAYOUT", "AXES", "ConfigError", "SECTIONS", "SIZE_KEYS", "dump", "is_address", "locate_shipped",
    "mesh_sizes", "OF_LAYOUT", "OF_TRAINED", "note_custom", "notes", "on_devices", "problems", "restarting",
    "shape_table", "user_errors", "words", "Command", "Arguments", "Option", "number", "one_of", "whole", "Checkpoint",
    "Component", "Context", "Data", "Distributed", "Experts", "Identity", "Lora", "Mesh", "Metrics", "Model",
    "Optimizer", "Pipeline", "Run", "Sharding", "Training", "Validation", "WeightGroups"]
