"""A whole training step as one CUDA graph: forward, backward, reductions, clip and optimizer.

Buffers of this package have fixed addresses and nothing in a step waits for the device on the
host, so that a step can be captured once and replayed: the host then pays one launch per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ya_fsdp import clip_grad_norm_, map_tensors, persistent_buffers, tensors_in

logger = logging.getLogger("ya_fsdp")

LossFn = Callable[[nn.Module, Any], Tensor]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Signature = tuple[Shapes, Hashable]

WARMUP_STEPS = 3

_CONSTANTS = (bool, int, float, str, tuple)


class CaptureError(RuntimeError):
    """A step could not be captured; the message says where and why."""


class CapturedStep:
    """What :func:`capture_step` returns: call it with a batch, get the step's loss.

    The first ``WARMUP_STEPS`` calls of a shape run eagerly (they are ordinary steps, in which
    lazily made state comes into being), the next one captures, all later ones replay. A graph holds
    what the optimizer keeps as numbers on the host (weight decay, betas, a learning rate that is no
    tensor) and whether the model trains or evaluates; where these change, another is captured.

    Attributes:
        captures: Graphs made so far.
        eager_steps: Steps run without a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        accumulation: int,
        clip: float | None,
        scaler: torch.amp.GradScaler | None,
        max_captures: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._accumulation = accumulation
        self._clip = clip
        self._scaler = scaler
        self._max_captures = max_captures
        self._warm: dict[Shapes, int] = {}
        self._graphs: dict[Signature, _Graph] = {}
        self._given_up: set[Shapes] = set()
        self._full = False
        self.captures = 0
        self.eager_steps = 0

    def __call__(self, batch: Any) -> Tensor:
        """Runs one step.

        Args:
            batch: Of the sample's structure; with accumulation a list of that many.

        Returns:
            The (mean) loss, 0-dim; after a replay a copy of the graph's own tensor.

        Raises:
            ValueError: If the batch has another number of microbatches.
        """
        if self._accumulation > 1 and len(batch) != self._accumulation:
            raise ValueError(
                f"the step was made with accumulation={self._accumulation}, but the batch is a "
                f"list of {len(batch)}"
            )
        shapes = _shapes(batch)
        signature = (shapes, (self._model.training, _settings(self._optimizer)))
        graph = self._graphs.get(signature)
        if graph is not None:
            return graph.replay(batch)
        warm = self._warm.get(shapes, 0)
        if warm < WARMUP_STEPS or not self._can_capture(shapes):
            self._warm[shapes] = warm + 1
            self.eager_steps += 1
            return self._step(batch)
        try:
            graph = _Graph(self._step, self._model, batch)
        except CaptureError as error:
            self._given_up.add(shapes)
            logger.warning("%s; steps of this shape run eagerly", error)
            self._optimizer.zero_grad(set_to_none=True)
            if self._scaler is not None:
                self._scaler.update(self._scaler.get_scale())  # forgets the step that broke off
            return self(batch)
        self._graphs[signature] = graph
        self.captures += 1
        return graph.replay(batch)

    def _can_capture(self, shapes: Shapes) -> bool:
        if shapes in self._given_up or not any(p.is_cuda for p in self._model.parameters()):
            return False
        if len(self._graphs) < self._max_captures:
            return True
        if not self._full:
            self._full = True
            logger.warning(
                "%d graphs are captured (max_captures); steps of other shapes, or with other "
                "settings of the optimizer, run eagerly. Pad batches to a few shapes; give what "
                "changes from step to step to an optimizer that has capturable=True as a tensor",
                self._max_captures,
            )
        return False

    def _step(self, batch: Any) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        parts = batch if self._accumulation > 1 else [batch]
        total: Tensor | None = None
        for part in parts:
            loss = self._loss_fn(self._model, part) / self._accumulation
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        if self._clip is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self._model, self._clip)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        assert total is not None
        return total


class _Graph:
    """One captured step and its static inputs."""

    def __init__(self, step: Callable[[Any], Tensor], model: nn.Module, batch: Any) -> None:
        self._inputs = map_tensors(batch, _static_copy)
        self._graph = torch.cuda.CUDAGraph()
        # The graph writes to these addresses for as long as it lives.
        self._kept = persistent_buffers(model)
        torch.cuda.synchronize()
        with _names_of_modules(model) as entered:
            try:
                # Other threads (a communication library's watchdog) may query events meanwhile.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self._loss = step(self._inputs)
            except Exception as error:
                where = entered[-1] if entered else "the step"
                raise CaptureError(
                    f"the step could not be captured: {where} raised {type(error).__name__}: "
                    f"{str(error).splitlines()[0] if str(error) else ''}"
                ) from error
        torch.cuda.synchronize()

    def replay(self, batch: Any) -> Tensor:
        """Copies the batch into the static inputs and runs the step."""
        for static, new in zip(tensors_in(self._inputs), tensors_in(batch), strict=True):
            static.copy_(new, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()


def capture_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    sample_batch: Any = None,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    max_captures: int = 4,
) -> CapturedStep:
    """Makes ``step(batch) -> loss``, which replays a whole training step as one CUDA graph.

    Learning rates become tensors on the device, so that schedulers of ``torch.optim`` keep
    working; evaluation and checkpoints between steps see current weights. On a device without
    graphs every step runs eagerly, with the same results.

    Args:
        model: A sharded model.
        optimizer: A stock optimizer over its parameters, of a kind that has ``capturable``.
        loss_fn: ``loss_fn(model, batch)`` gives a 0-dim loss.
        sample_batch: Not needed; a batch whose shape will be captured first.
        accumulation: Microbatches per step; ``batch`` is then a list of that many.
        clip: Clip the global gradient norm at this value.
        scaler: For fp16; the loss returned is the one before scaling. On a GPU the optimizer has to
            be one that skips a step on the device (``fused=True``).
        max_captures: How many shapes get a graph; further ones run eagerly.

    Raises:
        TypeError: If model, optimizer or loss function is something else.
        ValueError: If ``accumulation`` or ``max_captures`` is less than 1, or the optimizer would
            ask the host whether the scaler found an overflow.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a Module, got {model!r}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be an Optimizer, got {optimizer!r}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a GradScaler, got {scaler!r}")
    if accumulation < 1 or max_captures < 1:
        raise ValueError(
            f"accumulation and max_captures must be at least 1, got {accumulation}, {max_captures}"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        if scaler is not None and not _is_fused(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} reads on the host whether gradients overflowed, which "
                "a graph can not; make it with fused=True (Adam, AdamW, SGD and Adagrad have it)"
            )
        make_capturable(optimizer, device)
    return CapturedStep(model, optimizer, loss_fn, accumulation, clip, scaler, max_captures)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves what an optimizer keeps on the host (step counts, learning rates) to the device."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], device=device, dtype=torch.float32)
            else:
                group["lr"] = group["lr"].to(device)
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor) and step.device.type != device.type:
            state["step"] = step.to(device)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _shapes(batch: Any) -> Shapes:
    return tuple((tuple(t.shape), t.dtype) for t in tensors_in(batch))


def _settings(optimizer: torch.optim.Optimizer) -> Hashable:
    """What a graph of the optimizer's step holds as constants."""
    return tuple(
        tuple((name, value) for name, value in group.items() if isinstance(value, _CONSTANTS))
        for group in optimizer.param_groups
    )


def _static_copy(tensor: Tensor) -> Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    return tensor.to(device, copy=True)


@contextmanager
def _names_of_modules(model: nn.Module) -> Iterator[list[str]]:
    """The names of modules in the order in which their forward began."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    entered: list[str] = []

    def note(module: nn.Module, _: Any) -> None:
        entered.append(names.get(id(module), type(module).__name__))

    handle = register_module_forward_pre_hook(note)
    try:
        yield entered
    finally:
        handle.remove()
