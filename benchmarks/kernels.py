"""Builds `emulation.cu` and launches its kernels with as little host time as can be had.

The library is plain CUDA C called through `ctypes`: compiling takes two seconds (no torch headers)
and a call a few microseconds. Where `nvcc` is missing, the device code goes through NVRTC, which
every CUDA build of torch brings; its launches cost more host time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch

GATHER, SCATTER, HOLD = 0, 1, 2

_SOURCE = Path(__file__).with_name("emulation.cu")
_THREADS = 512
_UNITS = (16, 4, 2, 1)


class Kernels(Protocol):
    """What an emulated process group needs from a device."""

    def wire(self) -> Any:
        """A new wire: collectives given the same one follow each other."""

    def run(
        self,
        wire: Any,
        kind: int,
        addresses: tuple[int, int],
        sizes: tuple[int, int],
        nanoseconds: int,
        blocks: int,
        stream: int,
    ) -> None:
        """Enqueue one kernel; `addresses` are (output, input), `sizes` (shard, total) in bytes."""

    def copy(self, output: int, source: int, size: int, stream: int) -> None:
        """Enqueue a copy of `size` bytes."""


def _find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home) / "bin" / "nvcc"
    return shutil.which("nvcc") or (str(beside) if beside.exists() else None)


def build_library(capability: tuple[int, int], nvcc: str) -> Path:
    """Compile the library for one compute capability; a build of the same source is reused."""
    arch = f"{capability[0]}{capability[1]}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + arch.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"emulation_{digest}.so"
    if not library.exists():
        # Renamed into place, so that two processes that build at once do not meet half a file.
        partial = library.with_suffix(f".{os.getpid()}")
        command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        subprocess.run([*command, str(_SOURCE), "-o", str(partial)], check=True)
        partial.replace(library)
    return library


class CompiledKernels:
    """Kernels from `nvcc`, wires kept in C."""

    def __init__(self, library: Path) -> None:
        # PyDLL keeps the interpreter lock: handing it over costs more than the launch does.
        loaded = ctypes.PyDLL(str(library))
        pointer, word, integer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        loaded.emulation_wire.restype = pointer
        loaded.emulation_run.argtypes = [
            pointer, integer, pointer, pointer, word, word, word, integer, pointer,
        ]  # fmt: skip
        loaded.emulation_copy.argtypes = [pointer, pointer, word, pointer]
        self.wire = loaded.emulation_wire
        self._run = loaded.emulation_run
        self._copy = loaded.emulation_copy

    def run(
        self,
        wire: Any,
        kind: int,
        addresses: tuple[int, int],
        sizes: tuple[int, int],
        nanoseconds: int,
        blocks: int,
        stream: int,
    ) -> None:
        error = self._run(wire, kind, *addresses, *sizes, nanoseconds, blocks, stream)
        if error:
            raise RuntimeError(f"emulated collective of {sizes[1]} bytes: CUDA error {error}")

    def copy(self, output: int, source: int, size: int, stream: int) -> None:
        error = self._copy(output, source, size, stream)
        if error:
            raise RuntimeError(f"copy of {size} bytes: CUDA error {error}")


class RuntimeKernels:
    """The same device code through NVRTC; wires are torch events and end at graph captures."""

    def __init__(self) -> None:
        from torch.cuda._utils import _check_cuda, _get_gpu_runtime_library

        source = "#define EMULATION_DEVICE_ONLY\n" + _SOURCE.read_text()
        names = [
            f"emulated_{kind}_{unit}"
            for kind in ("all_gather", "reduce_scatter")
            for unit in _UNITS
        ]
        self._kernels = {
            name: torch.cuda._compile_kernel(source, name)  # type: ignore[attr-defined]
            for name in [*names, "emulated_hold"]
        }
        self._check = _check_cuda
        self._launch = _get_gpu_runtime_library().cuLaunchKernel

    def wire(self) -> dict[str, Any]:
        return {"event": torch.cuda.Event(), "stream": None}

    def run(
        self,
        wire: Any,
        kind: int,
        addresses: tuple[int, int],
        sizes: tuple[int, int],
        nanoseconds: int,
        blocks: int,
        stream: int,
    ) -> None:
        follow = wire is not None and not torch.cuda.is_current_stream_capturing()
        if follow and wire["stream"] not in (None, stream):
            torch.cuda.ExternalStream(stream).wait_event(wire["event"])
        name, values = "emulated_hold", [ctypes.c_uint64(nanoseconds)]
        if kind != HOLD:
            bits = addresses[0] | addresses[1] | sizes[0]
            unit = next(unit for unit in _UNITS if bits % unit == 0)
            name = f"emulated_{'all_gather' if kind == GATHER else 'reduce_scatter'}_{unit}"
            counts = [ctypes.c_uint32(size // unit) for size in sizes]
            values = [*map(ctypes.c_uint64, addresses), *counts, *values]
        packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
        handle = ctypes.c_void_p(stream)
        function = self._kernels[name].func
        self._check(self._launch(function, *grid, *block, 0, handle, packed, None))
        if follow:
            wire["event"].record(torch.cuda.ExternalStream(stream))
            wire["stream"] = stream

    def copy(self, output: int, source: int, size: int, stream: int) -> None:
        if output != source and size:
            self.run(None, GATHER, (output, source), (size, size), 0, 16, stream)


_loaded: list[Kernels] = []


def load() -> Kernels:
    """The kernels of the current CUDA device, built on the first call."""
    if not _loaded:
        nvcc = _find_nvcc()
        if nvcc is None:
            _loaded.append(RuntimeKernels())
        else:
            _loaded.append(CompiledKernels(build_library(torch.cuda.get_device_capability(), nvcc)))
    return _loaded[0]
