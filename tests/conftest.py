"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import WorkerPool


def _pool(world_size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def world1() -> Iterator[WorkerPool]:
    """One process in a group of its own."""
    yield from _pool(1)


@pytest.fixture(scope="module")
def world2() -> Iterator[WorkerPool]:
    """Two processes in one group, started once for the test file."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def world3() -> Iterator[WorkerPool]:
    """Three processes in one group, started once for the test file."""
    yield from _pool(3)


@pytest.fixture(scope="module")
def world4() -> Iterator[WorkerPool]:
    """Four processes in one group, started once for the test file."""
    yield from _pool(4)


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Two processes, then three."""
    found: WorkerPool = request.getfixturevalue(f"world{request.param}")
    return found


@pytest.fixture(params=[1, 2, 3], ids=["1 rank", "2 ranks", "3 ranks"])
def any_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """One process, then two, then three."""
    found: WorkerPool = request.getfixturevalue(f"world{request.param}")
    return found
