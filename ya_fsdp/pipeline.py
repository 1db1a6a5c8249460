"""What torch's pipeline schedules ask of a sharded stage at the end of a step."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from . import _torch
from .build import schedule_of
from .unit import Phase


class PipelineState:
    """Stands where ``torch.distributed.pipelining`` looks for the state of FSDP2.

    A schedule runs the backward passes of all microbatches without communication and then tells
    every state to reduce. We hand out ourselves as the only state, without groups of torch's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._fsdp_param_groups = ()
        self._fsdp_param_group = None

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    @property
    def all_states(self) -> list[PipelineState]:
        """The states whose groups the pipeline goes through."""
        return [self]

    def _root_post_backward_final_callback(self) -> None:
        """Reduces what the microbatches added up, and reshards."""
        module = self._module()
        if module is None:
            return
        schedule = schedule_of(module)
        schedule.end_backward_pass()
        for unit in schedule.units:
            if unit.kept and unit.phase is Phase.IDLE and not unit.held:
                schedule.release(unit)


def offer_to_pipelines(module: nn.Module) -> None:
    """Lets torch's pipeline schedules find the module's :class:`PipelineState`."""
    state: Any = PipelineState(module)
    _torch.set_composable_state(module, state)
