"""The class ``YaFSDP``: a model under the classic interface, run by ``fully_shard``."""

from .model import YaFSDP

__all__ = ["YaFSDP"]
