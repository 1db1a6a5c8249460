"""Long-lived worker processes that run distributed tests.

Starting a process that imports torch costs seconds, so a test file starts its processes once
and sends them one test function after another:

    def losses(rank, world_size, steps): ...          # module level, so that it can be pickled

    def test_two_ranks_agree(world2):
        first, second = world2.run(losses, 10)
        assert first == second

The processes form one group over gloo, or over NCCL with all ranks on one GPU when
``YA_FSDP_TEST_NCCL=1`` is set and there is a GPU.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

# Set here because the fork server reads it when it imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from tests.strict_device import strict_device

DEFAULT_TIMEOUT = 60.0
# Ranks still running this long after another rank raised are waiting for it in a collective.
GRACE_AFTER_FAILURE = 3.0
START_TIMEOUT = 120.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp"])


class WorkerError(RuntimeError):
    """A worker process died, or raised something that cannot be sent to the parent."""


class WorkerTimeout(WorkerError):
    """A test function did not end in time on every rank."""


def uses_nccl() -> bool:
    """Whether worker groups use NCCL (``YA_FSDP_TEST_NCCL=1`` and a GPU)."""
    return os.environ.get("YA_FSDP_TEST_NCCL") == "1" and torch.cuda.is_available()


def test_device() -> torch.device:
    """The device on which a worker's tensors live: ``cuda:0`` under NCCL, else ``cpu``."""
    if uses_nccl():
        return torch.device("cuda", 0)
    return torch.device("cpu", 0) if _is_strict() else torch.device("cpu")


def _is_strict() -> bool:
    """Whether tensors that a test forgot to put on ``test_device()`` are looked for."""
    return os.environ.get("YA_FSDP_TEST_STRICT_DEVICE") == "1"


test_device.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name


class WorkerPool:
    """``world_size`` processes in one process group, started at the first ``run``."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._folder: Path | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Calls ``fn(rank, world_size, *args, **kwargs)`` on every rank.

        Args:
            fn: a module-level function; it and its arguments and results must be picklable.
            timeout: seconds until the processes are killed.

        Returns:
            What each rank returned, in rank order. Tensors travel by value.

        Raises:
            Exception: the exception of the first rank that raised, its type kept, with every
                failing rank's traceback as a note.
            WorkerTimeout: no answer in time; the note says where each rank was.
            WorkerError: a process died.
        """
        if not self._processes:
            self._start()
        payload = pickle.dumps((fn, args, kwargs))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(payload)
            except OSError as error:
                self.close()
                raise WorkerError(f"rank {rank} was dead before {fn.__name__}") from error
        answers = self._collect(fn.__name__, timeout)
        failures = {rank: a for rank, a in enumerate(answers) if a is None or a[0] != "ok"}
        if not failures:
            return [pickle.loads(answer[1]) for answer in answers if answer is not None]
        # After a failure on some ranks only, the others may hold half of a collective.
        if any(answer is None or answer[0] != "raised" for answer in answers):
            self.close()
        raise _to_exception(failures)

    def close(self) -> None:
        """Kills the processes; the next ``run`` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ya_fsdp_test_"))
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_worker_main,
                args=(rank, self.world_size, str(self._folder), theirs, uses_nccl()),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        answers = self._collect("the start of the workers", START_TIMEOUT)
        failures = {rank: a for rank, a in enumerate(answers) if a is None or a[0] != "ok"}
        if failures:
            self.close()
            raise _to_exception(failures)

    def _collect(self, name: str, timeout: float) -> list[tuple[str, Any] | None]:
        answers: list[tuple[str, Any] | None] = [None] * self.world_size
        waiting = dict(zip(self._pipes, itertools.count(), strict=False))
        deadline = time.monotonic() + timeout
        failed = False
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(left, 0))
            if not ready:
                if failed:
                    return answers
                where = self._stacks()
                self.close()
                raise WorkerTimeout(
                    f"{name}: ranks {sorted(waiting.values())} of {self.world_size} did not "
                    f"end within {timeout:g} s\n{where}"
                )
            for pipe in ready:
                assert isinstance(pipe, multiprocessing.connection.Connection)
                rank = waiting.pop(pipe)
                answers[rank] = self._receive(rank, pipe)
                if answers[rank][0] != "ok" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        return answers

    def _receive(self, rank: int, pipe: multiprocessing.connection.Connection) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            return "died", f"the process died, exit code {self._processes[rank].exitcode}"
        return answer

    def _stacks(self) -> str:
        assert self._folder is not None
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        parts = []
        for rank in range(self.world_size):
            path = self._folder / f"stack{rank}"
            text = path.read_text() if path.exists() else "no stack\n"
            parts.append(f"--- rank {rank}\n{text}")
        return "".join(parts)


def _to_exception(failures: dict[int, Any]) -> BaseException:
    """The first real failure as an exception, all ranks' tracebacks as notes."""
    reported = {rank: answer for rank, answer in failures.items() if answer is not None}
    # A death explains the errors that the other ranks report about their lost connection.
    dead = [rank for rank, answer in reported.items() if answer[0] == "died"]
    first = dead[0] if dead else min(reported)
    kind, content = reported[first]
    error: BaseException
    if kind == "died":
        error = WorkerError(f"rank {first}: {content}")
    elif content[0] is None:
        error = WorkerError(f"rank {first} raised an exception that cannot be pickled")
    else:
        error = pickle.loads(content[0])
    for rank, answer in sorted(failures.items()):
        if answer is None:
            error.add_note(f"[rank {rank}] still running, killed")
        elif answer[0] == "raised":
            error.add_note(f"[rank {rank}]\n{answer[1][1]}")
    return error


def _worker_main(
    rank: int,
    world_size: int,
    folder: str,
    pipe: multiprocessing.connection.Connection,
    nccl: bool,
) -> None:
    stacks: IO[str] = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115 (lives as long as us)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    # Ctrl-C goes to the parent, which kills us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        _join_group(rank, world_size, folder, nccl)
        answer: tuple[str, Any] = ("ok", None)
    except BaseException as error:
        answer = ("raised", _pack(error))
    pipe.send_bytes(pickle.dumps(answer))
    gc.freeze()  # Makes the collections below look only at what the tests leave behind.
    while True:
        try:
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # The parent has gone: there is nobody to shut the group down with.
        try:
            pipe.send_bytes(pickle.dumps(_call(rank, world_size, payload)))
        except OSError:
            os._exit(0)
        gc.collect()


def _join_group(rank: int, world_size: int, folder: str, nccl: bool) -> None:
    backend = "gloo"
    if nccl:
        # NCCL refuses two ranks on one GPU of one host, so each rank claims a host of its own.
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        torch.backends.cudnn.allow_tf32 = (
            False  # the default: three digits, in RNNs and convolutions
        )
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=DEFAULT_TIMEOUT * 2),
    )


def _call(rank: int, world_size: int, payload: bytes) -> tuple[str, Any]:
    try:
        # Unpickling imports the test file, whose imports may warn for reasons not under test.
        fn, args, kwargs = pickle.loads(payload)
        torch.manual_seed(0)
        with warnings.catch_warnings(), strict_device() if _is_strict() else nullcontext():
            warnings.simplefilter("error")
            result = fn(rank, world_size, *args, **kwargs)
        return "ok", pickle.dumps(result)
    except BaseException as error:
        return "raised", _pack(error)


def _pack(error: BaseException) -> tuple[bytes | None, str]:
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None, text
    return data, text
