"""Names for the forward of wrapped modules in profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.profiler import record_function


def name_ranges(modules: Mapping[str, nn.Module], names: Mapping[str, str]) -> None:
    """Every forward of a module shows as ``YaFSDP::forward (name)`` in profiles."""
    for fqn, module in modules.items():
        open_ranges: list[record_function] = []
        label = f"YaFSDP::forward ({names[fqn]})"

        def begin(*_: Any, label: str = label, ranges: list[Any] = open_ranges) -> None:
            shown: Any = record_function(label)
            ranges.append(shown.__enter__())

        def end(*_: Any, ranges: list[Any] = open_ranges) -> None:
            if ranges:
                ranges.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
