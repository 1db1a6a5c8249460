"""Processes, devices, signals and memory."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lm.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Where this process stands among the others."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes reports."""
        return self.rank == 0

    def describe(self) -> str:
        """The devices in words."""
        name = "CPU"
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        processes = "process" if self.world_size == 1 else "processes"
        return f"{self.world_size} {processes} on {name}"

    def peak_memory(self) -> int:
        """Bytes: the most that CUDA tensors took, or on CPU the process's largest size."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def start(device_name: str) -> Runtime:
    """Joins the process group that torchrun describes, or makes one of this process alone.

    Args:
        device_name: ``auto`` takes GPUs where each process of this machine can have one of its
            own; ``cpu`` and ``cuda`` are taken by their word.

    Raises:
        UsageError: ``cuda`` was asked for and there are fewer GPUs than processes.
    """
    # Buffers and activations of changing sizes leave no gaps then: a sixth less is reserved.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_processes
    if device_name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device_name}: choose auto, cpu or cuda")
    if device_name == "cuda" and not enough_gpus:
        raise UsageError(
            f"--device cuda: {local_processes} process(es) need a GPU each, "
            f"this machine has {torch.cuda.device_count()}"
        )
    device = torch.device("cpu")
    if device_name != "cpu" and enough_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Control messages and checkpoints' plans go over gloo whatever the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in `__all__`
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    return Runtime(dist.get_rank(), world_size, device, mesh)


def make_deterministic() -> None:
    """Makes a step give the same bits each time it is computed on the same device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Only reads of memory that nobody wrote would need this, and it costs a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class StopRequest:
    """Remembers SIGINT and SIGTERM until the ranks have agreed to stop."""

    def __init__(self) -> None:
        """Installs the signal handlers."""
        self._signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; a collective call, the same answer everywhere."""
        flag = torch.tensor(self._signal)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def finish() -> None:
    """Leaves the process group and ends the process, with everything written.

    The interpreter is not asked to tear itself down: threads of gloo that outlive it abort the
    process now and then, and a run that has succeeded would end with an error.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
