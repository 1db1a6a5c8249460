"""The search for the units that stay gathered, against trying every selection."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.residency import best_choice

items = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=7)


def highest(costs: list[int], values: list[int], budget: int) -> int:
    indices = range(len(costs))
    selections = [s for n in range(len(costs) + 1) for s in combinations(indices, n)]
    fitting = [s for s in selections if sum(costs[i] for i in s) <= budget]
    return max(sum(values[i] for i in s) for s in fitting)


@given(items, st.integers(0, 60))
def test_no_selection_within_the_budget_saves_more(
    pairs: list[tuple[int, int]], budget: int
) -> None:
    costs, values = [c for c, _ in pairs], [v for _, v in pairs]
    chosen = best_choice(costs, values, budget)
    assert chosen == sorted(set(chosen))
    assert sum(costs[i] for i in chosen) <= budget
    assert sum(values[i] for i in chosen) == highest(costs, values, budget)


@given(st.integers(1, 9), st.integers(0, 9))
def test_of_equal_units_the_last_ones_are_kept(n: int, fitting: int) -> None:
    assert best_choice([5] * n, [4] * n, 5 * fitting + 4) == list(range(max(0, n - fitting), n))


def test_hundreds_of_units_of_different_sizes_fill_the_budget_nearly() -> None:
    costs = [1_000_003 * (i % 17 + 3) + 7 * i for i in range(300)]
    budget = sum(costs) // 3
    chosen = best_choice(costs, costs, budget)
    assert 0.99 * budget < sum(costs[i] for i in chosen) <= budget
