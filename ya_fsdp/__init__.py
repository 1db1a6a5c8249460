"""Fully sharded data parallelism for PyTorch over flat, ragged, zero-copy shards."""

from . import debug
from ._version import __version__
from .buffer_groups import set_buffer_groups
from .clipping import clip_grad_norm_
from .communication import persistent_buffers, set_reduce_unused
from .communication_sms import set_communication_sms
from .flat import (
    flat_optimizer_state_dict,
    flat_parameters,
    load_flat_optimizer_state_dict,
)
from .fully_shard import fully_shard
from .gathering import UnshardHandle
from .module import YaFSDPModule, register_fsdp_forward_method
from .optimizer_in_backward import OptimizerInBackward, optimizer_in_backward
from .precision import MixedPrecisionPolicy
from .ragged import RaggedShard, RaggedShardDTensor, distribute_ragged
from .residency import set_resident_budget
from .tree import map_tensors, tensors_in
from .wrapper import YaFSDP

__all__ = [
    "MixedPrecisionPolicy",
    "OptimizerInBackward",
    "RaggedShard",
    "RaggedShardDTensor",
    "UnshardHandle",
    "YaFSDP",
    "YaFSDPModule",
    "__version__",
    "clip_grad_norm_",
    "debug",
    "distribute_ragged",
    "flat_optimizer_state_dict",
    "flat_parameters",
    "fully_shard",
    "load_flat_optimizer_state_dict",
    "map_tensors",
    "optimizer_in_backward",
    "persistent_buffers",
    "register_fsdp_forward_method",
    "set_buffer_groups",
    "set_communication_sms",
    "set_reduce_unused",
    "set_resident_budget",
    "tensors_in",
]
