"""One rank of an N-rank job, alone in its process: a process group whose network is a kernel.

`start(world_size, network)` makes the default process group present `world_size` ranks, of which
this process is rank 0. Compute, copies, overlap, memory and host time of whatever runs on top are
real; a collective occupies its stream, and `Network.blocks` thread blocks, for the time that the
network would take, and moves the bytes through device memory (this rank's shard stands for
everyone's). On a CPU only the copies are made, which serves measurements of host time.

Private names of torch used here, all stable from 2.11 to 2.13: `ProcessGroup._allgather_base` and
`_reduce_scatter_base` (what c10d calls), `distributed_c10d._world.pg_names` (a group written in
Python has to find its own name) and `torch._C._cuda_getCurrentRawStream` (a fifth of the time of
`torch.cuda.current_stream()`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from benchmarks import kernels
from benchmarks.network import Network, Traffic

__all__ = ["BACKEND", "EmulatedGroup", "Network", "Traffic", "emulated", "start", "stop"]

BACKEND = "emulated"

_FILL_BLOCKS = 264


class _Done(dist.Work):
    """A collective that is already in order on the stream that asked for it."""

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors or []

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        devices = sorted({t.device for t in self._tensors if t.is_cuda}, key=str)
        future: Any = torch.futures.Future(devices=devices)
        future.set_result(self._tensors)
        return future


class _Pending(_Done):
    """A collective on the group's own stream; holds its tensors until somebody waits."""

    def __init__(self, tensors: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__(tensors)
        self._stream = stream
        self._event = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Any:
        with torch.cuda.stream(self._stream):
            return super().get_future()


_DONE = _Done()


@dataclass
class _World:
    network: Network
    traffic: Traffic
    wires: dict[str, Any] = field(default_factory=dict)
    groups: weakref.WeakSet[EmulatedGroup] = field(default_factory=weakref.WeakSet)

    def wire(self, name: str) -> Any:
        if name not in self.wires:
            self.wires[name] = kernels.load().wire()
        return self.wires[name]


_current: _World = _World(Network(), Traffic())


class EmulatedGroup(dist.ProcessGroup):
    """A process group of `size` ranks in which this process is rank 0 and nobody else exists."""

    supports_avg = True  # as NCCL does; what it computes is only this rank's part anyway

    def __init__(self, rank: int, size: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, size)
        if rank:
            raise ValueError(f"an emulated group has rank 0 only, not {rank}")
        self._size = size
        self._ranks = tuple(ranks) or tuple(range(size))
        self._world = _current
        self._side: torch.cuda.Stream | None = None
        self.forget()
        _current.groups.add(self)

    def forget(self) -> None:
        """Drop what was computed from the network and what is known about addresses."""
        self._plans: dict[tuple[str, int], tuple[int, int]] = {}
        self._filled: set[tuple[int, int]] = set()
        self._link = self._world.network.link(self._ranks)

    # What torch asks of a group.
    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def pg_name(self) -> str:
        name: str = c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def __repr__(self) -> str:
        return f"EmulatedGroup(size={self._size}, network={self._world.network})"

    # Collectives; the names with an underscore are what torch before 2.13 calls.
    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        total = output.nbytes
        plan = self._plans.get(("all_gather", total)) or self._plan("all_gather", total, 1)
        self._world.traffic.add("all_gather", plan[1])
        if not output.is_cuda:
            return self._gather_on_cpu(output, source)
        if not plan[0]:
            return self._free_gather(output, source)
        return self._launch(kernels.GATHER, (output, source), (source.nbytes, total), plan[0], opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Any:
        total, shard = source.nbytes, output.nbytes
        plan = self._plans.get(("reduce_scatter", total)) or self._plan("reduce_scatter", total, 1)
        self._world.traffic.add("reduce_scatter", plan[1])
        if not output.is_cuda:
            own = source.detach().flatten()[: output.numel()]
            if own.data_ptr() != output.data_ptr():
                output.detach().copy_(own.view_as(output))
            return _DONE
        if not plan[0]:
            stream = torch._C._cuda_getCurrentRawStream(output.device.index)
            if output.data_ptr() != source.data_ptr():
                kernels.load().copy(output.data_ptr(), source.data_ptr(), shard, stream)
            return _DONE
        return self._launch(kernels.SCATTER, (output, source), (shard, total), plan[0], opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._hold("all_reduce", tensors, 2, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._hold("broadcast", tensors, 1, opts)

    def barrier(self, opts: Any = None) -> Any:
        return _DONE

    def allgather(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for pieces, source in zip(outputs, sources, strict=True):
            for piece in pieces:
                piece.detach().copy_(source.detach())
        return self._hold("all_gather", [piece for pieces in outputs for piece in pieces], 1, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None
    ) -> Any:
        for output, pieces in zip(outputs, sources, strict=True):
            output.detach().copy_(pieces[0].detach())
        every = [piece for pieces in sources for piece in pieces]
        return self._hold("reduce_scatter", every, 1, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        source_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        same = output.numel() == source.numel() and output.dtype == source.dtype
        total = source.nbytes
        plan = self._plans.get(("all_to_all", total)) or self._plan("all_to_all", total, 1)
        if same and output.is_cuda and plan[0]:
            self._world.traffic.add("all_to_all", plan[1])
            pair = (output, source)
            return self._launch(kernels.GATHER, pair, (total, total), plan[0], opts)
        if same:
            output.detach().copy_(source.detach().view_as(output))
        return self._hold("all_to_all", [source], 1, opts)

    def alltoall(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            output.detach().copy_(source.detach())
        return self._hold("all_to_all", sources, 1, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        work: Any = _DONE
        for output, source in zip(outputs, sources, strict=True):
            work = self._allgather_base(output, source, opts)
        return work

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Any:
        work: Any = _DONE
        for output, source in zip(outputs, sources, strict=True):
            work = self._reduce_scatter_base(output, source, opts)
        return work

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    allreduce_coalesced = allreduce
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # How they are carried out.
    def _plan(self, kind: str, total: int, passes: int) -> tuple[int, int]:
        wire = passes * total * (self._size - 1) // self._size
        plan = (self._world.network.nanoseconds(wire, self._ranks), wire)
        self._plans[kind, total] = plan
        return plan

    def _launch(
        self,
        kind: int,
        tensors: tuple[torch.Tensor, torch.Tensor],
        sizes: tuple[int, int],
        nanoseconds: int,
        opts: Any,
    ) -> Any:
        output, source = tensors
        world = self._world
        addresses = (output.data_ptr(), source.data_ptr())
        wire = world.wires.get(self._link[0]) or world.wire(self._link[0])
        if opts is None or not opts.asyncOp:
            stream = torch._C._cuda_getCurrentRawStream(output.device.index)
            kernels.load().run(
                wire, kind, addresses, sizes, nanoseconds, world.network.blocks, stream
            )
            return _DONE
        side = self._side_stream()
        kernels.load().run(
            wire, kind, addresses, sizes, nanoseconds, world.network.blocks, side.cuda_stream
        )
        return _Pending([output, source], side)

    def _side_stream(self) -> torch.cuda.Stream:
        """The group's own stream, behind all work of the current one: where async calls run."""
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        return self._side

    def _hold(self, kind: str, tensors: list[torch.Tensor], passes: int, opts: Any) -> Any:
        total = sum(tensor.nbytes for tensor in tensors)
        plan = self._plans.get((kind, total)) or self._plan(kind, total, passes)
        self._world.traffic.add(kind, plan[1])
        if not tensors[0].is_cuda or not plan[0]:
            return _Done(tensors)
        work = self._launch(kernels.HOLD, (tensors[0], tensors[0]), (0, 0), plan[0], opts)
        if isinstance(work, _Pending):
            work._tensors = tensors
            return work
        return _Done(tensors)

    def _free_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        addresses, shard = (output.data_ptr(), source.data_ptr()), source.nbytes
        stream = torch._C._cuda_getCurrentRawStream(output.device.index)
        if self._must_fill(addresses[0], output.nbytes):
            kernels.load().run(
                None, kernels.GATHER, addresses, (shard, output.nbytes), 0, _FILL_BLOCKS, stream
            )
        elif addresses[0] != addresses[1]:  # in place there is nothing to copy
            kernels.load().copy(*addresses, shard, stream)
        return _DONE

    def _gather_on_cpu(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        out, own = output.detach().view(-1), source.detach().reshape(-1)
        if self._must_fill(output.data_ptr(), output.nbytes):
            # By way of a copy: the shard may be a slice of the output.
            out.view(self._size, -1).copy_(own.clone())
        elif own.data_ptr() != out.data_ptr():
            out[: own.numel()].copy_(own)
        return _DONE

    def _must_fill(self, address: int, size: int) -> bool:
        network = self._world.network
        if network.bandwidth is not None or network.fill == "all":
            return True
        key = (address, size)
        if network.fill == "own" or key in self._filled:
            return False
        # A fill that is captured would be replayed with every step.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        self._filled.add(key)
        return True


def _create(options: Any, _: Any) -> EmulatedGroup:
    return EmulatedGroup(
        options.group_rank, options.group_size, options.global_ranks_in_group or ()
    )


def _register() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def start(world_size: int, network: Network | None = None) -> Traffic:
    """Make this process rank 0 of an emulated job; called again, change the world or the network.

    Call it before every model as well: a free network remembers which buffers it has filled.

    Returns:
        The counters that all groups of this job add to.
    """
    network = network or Network()
    if dist.is_initialized():
        if dist.get_backend() != BACKEND:
            raise RuntimeError(f"a process group of backend {dist.get_backend()} is running")
        if dist.get_world_size() == world_size:
            _current.network = network
            _current.traffic.reset()
            for group in _current.groups:
                group.forget()
            return _current.traffic
        stop()
    _register()
    _current.network = network
    _current.traffic.reset()
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=dist.HashStore())
    return _current.traffic


def stop() -> None:
    """End the emulated job."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _current.groups.clear()


@contextlib.contextmanager
def emulated(world_size: int, network: Network | None = None) -> Iterator[Traffic]:
    """`start` and `stop` around a block."""
    try:
        yield start(world_size, network)
    finally:
        stop()
