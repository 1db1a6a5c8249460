"""Fully sharded data parallelism for PyTorch over flat, ragged, zero-copy shards."""

from ._version import __version__
from .fully_shard import fully_shard
from .module import UnshardHandle, YaFSDPModule, register_fsdp_forward_method
from .precision import MixedPrecisionPolicy
from .ragged import RaggedShard, RaggedShardDTensor, distribute_ragged

__all__ = [
    "MixedPrecisionPolicy",
    "RaggedShard",
    "RaggedShardDTensor",
    "UnshardHandle",
    "YaFSDPModule",
    "__version__",
    "distribute_ragged",
    "fully_shard",
    "register_fsdp_forward_method",
]
