"""The end of a program whose process group was made for it.

Threads of gloo that outlive the interpreter end the process with "terminate called without an
active exception", and torchrun then reports a run as failed that has succeeded. They end with the
last reference to the group; ours are given up here.
"""

from __future__ import annotations

import atexit
import gc
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch_mesh import forget_groups
from .agreement import Trail
from .flat_gradient import FlatGradient
from .mesh import MeshInfo


def leave_at_exit() -> None:
    """Destroys the default process group, one of gloo, when the program ends."""
    atexit.register(_leave, id(dist.group.WORLD))


def _leave(made: int) -> None:
    # After an error others may be stuck in a collective, and a group waits for its own.
    if getattr(sys, "last_value", None) is not None:
        return
    if dist.is_initialized():
        if id(dist.group.WORLD) != made:
            return
        dist.destroy_process_group()
    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            forget_groups(found)
        elif type(found) is MeshInfo:
            del found.shard_group
        elif type(found) is FlatGradient:
            found.groups = ()
        elif type(found) is Trail:
            found.forget_groups()
