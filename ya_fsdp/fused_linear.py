"""Linear layers whose backward writes the weight's gradient into the gradient slot itself.

The ordinary way makes a gradient tensor per weight in the compute dtype and copies it, widened,
into the slot: 6 bytes moved per element beyond the product, and 16-bit rounding of what is about
to be summed in 32 bits. Here the matrix product's output is the slot.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .gradients import GroupGradients
from .group import ParamGroup

logger = logging.getLogger("ya_fsdp")
_said: set[str] = set()


class _Linear(torch.autograd.Function):
    """``torch.nn.functional.linear`` with its weight's gradient sent to a sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = grad.matmul(weight)
        rows = grad.reshape(-1, grad.shape[-1])
        # ``needs_weight`` is true for any weight that requires a gradient; this backward pass may
        # be after those of other tensors only.
        wanted = needs_weight and ctx.sink.wanted()
        if wanted is not False:
            inputs = x.reshape(-1, x.shape[-1])
            if wanted is None or not ctx.sink.write(rows.t(), inputs):
                grad_weight = rows.t().mm(inputs)
        if needs_bias:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None


class Sink:
    """Where one weight's gradient goes."""

    __slots__ = ("grads", "index")

    def __init__(self, grads: GroupGradients, index: int) -> None:
        self.grads = grads
        self.index = index

    def wanted(self) -> bool | None:
        """See :meth:`GroupGradients.wanted`."""
        return self.grads.wanted(self.index)

    def write(self, left: Tensor, right: Tensor) -> bool:
        """Writes (or adds) ``left @ right`` into the open gradient slot; False if none is open."""
        target = self.grads.target
        if target is None:
            return False
        out = target.views[self.index]
        add = self.grads.adds or self.index in self.grads.written
        if out.dtype == left.dtype:
            if add:
                torch.addmm(out, left, right, out=out)
            else:
                torch.mm(left, right, out=out)
        elif out.is_cuda and out.dtype == torch.float32:
            if add:
                torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, out=out)
            else:
                torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        else:
            _say_once(f"no product of {left.dtype} into {out.dtype} on {out.device.type}")
            product = left.mm(right)
            if add:
                out.add_(product)
            else:
                out.copy_(product)
        self.grads.written.add(self.index)
        return True


class _Forward:
    """Stands in for a linear layer's ``forward``; refers to the module weakly."""

    def __init__(self, module: nn.Linear, sink: Sink) -> None:
        self._module = weakref.ref(module)
        self._sink = sink

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module()
        assert module is not None
        weight, bias = module.weight, module.bias
        sink = self._sink
        plain = (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or not weight.requires_grad
            or torch.is_autocast_enabled(input.device.type)
            or weight is not sink.grads.unsharded[sink.index]
        )
        if plain:
            return functional.linear(input, weight, bias)
        sink.grads.watch(sink.index)
        result: Tensor = _Linear.apply(input, weight, bias, sink)  # type: ignore[no-untyped-call]
        return result


def fuse_linears(modules: list[nn.Module], groups: list[ParamGroup]) -> int:
    """Makes every plain ``nn.Linear`` among ``modules`` write its weight's gradient directly.

    Returns:
        The number of layers changed; others in the same groups go the ordinary way.
    """
    sinks = {
        id(param.sharded): Sink(group.grads, index)
        for group in groups
        for index, param in enumerate(group.params)
        if param.tensor_parallel is None
    }
    count = 0
    for module in modules:
        if type(module) is not nn.Linear or "forward" in module.__dict__:
            continue
        sink = sinks.get(id(module.weight))
        if sink is not None:
            module.__dict__["forward"] = _Forward(module, sink)
            sink.grads.fused = True
            count += 1
    return count


def _say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        logger.info("fused_weight_gradients: %s; the product is made and then copied", reason)
