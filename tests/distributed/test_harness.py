"""The harness that every distributed test relies on."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.harness import WorkerError, WorkerPool, WorkerTimeout, test_device


def _sum_of_ranks(rank: int, world_size: int, scale: float) -> float:
    value = torch.tensor(float(rank + 1) * scale, device=test_device())
    dist.all_reduce(value)
    return float(value)


def _process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def _raise_everywhere(rank: int, world_size: int) -> None:
    raise KeyError(f"from rank {rank}")


def _raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _sleep(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def _warn(rank: int, world_size: int) -> None:
    warnings.warn("watch out", stacklevel=1)


def test_every_rank_takes_part_and_returns_its_value(world2: WorkerPool) -> None:
    assert world2.run(_sum_of_ranks, 10.0) == [30.0, 30.0]


def test_processes_are_kept_from_one_test_function_to_the_next(world2: WorkerPool) -> None:
    first = world2.run(_process_id)
    assert first == world2.run(_process_id)
    assert len(set(first)) == 2


def test_an_exception_on_every_rank_keeps_its_type_and_the_processes(world2: WorkerPool) -> None:
    before = world2.run(_process_id)
    with pytest.raises(KeyError, match="from rank 0") as caught:
        world2.run(_raise_everywhere)
    notes = "".join(caught.value.__notes__)
    assert "[rank 0]" in notes and "[rank 1]" in notes and "_raise_everywhere" in notes
    assert world2.run(_process_id) == before


def test_an_exception_on_one_rank_is_raised_although_the_other_waits(world2: WorkerPool) -> None:
    with pytest.raises(ValueError, match="only here"):
        world2.run(_raise_on_rank_one)
    assert world2.run(_sum_of_ranks, 1.0) == [3.0, 3.0]


def test_a_hang_ends_with_the_stack_of_the_hanging_rank(world2: WorkerPool) -> None:
    with pytest.raises(WorkerTimeout, match=r"ranks \[0\]") as caught:
        world2.run(_sleep, timeout=1.0)
    assert "_sleep" in str(caught.value)
    assert world2.run(_sum_of_ranks, 1.0) == [3.0, 3.0]


def test_the_death_of_a_process_is_reported_with_its_exit_code(world2: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 1: the process died, exit code 7"):
        world2.run(_die)
    assert world2.run(_sum_of_ranks, 1.0) == [3.0, 3.0]


def test_a_warning_in_a_worker_is_an_error(world2: WorkerPool) -> None:
    with pytest.raises(UserWarning, match="watch out"):
        world2.run(_warn)
