"""The implementations side by side: each builds a model and offers `step()`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from benchmarks import models
from benchmarks.variants import UnavailableError, Variant

_LEARNING_RATE = 1e-5
_EXACT_LEARNING_RATE = 1e-3  # so that a wrong gradient shows in the next losses
_WARMUP_BEFORE_CAPTURE = 3


@dataclass(frozen=True)
class Job:
    """What is trained, whatever the implementation.

    Attributes:
        exact: Compute in fp32, from the same weights in every implementation, with data of its own
            on every rank, so that losses can be compared.
    """

    config: models.Config
    batch: int
    sequence: int
    world: int
    device: torch.device
    exact: bool = False


class Trainer:
    """A model, an optimizer and the step over them.

    `mark` is called with the name of each part of the step as it begins (`forward`, `backward`,
    `clip`, `optimizer`, `end`); it does nothing unless a measurement replaces it.
    """

    def __init__(self, job: Job, variant: Variant) -> None:
        self.job, self.variant = job, variant
        seed = 1 + (dist.get_rank() if job.exact else 0)
        self.tokens, self.labels = models.batch_of(
            job.config, job.batch, job.sequence, job.device, seed
        )
        self.mark: Callable[[str], None] = lambda part: None
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.loss: torch.Tensor | None = None
        self.allocated_before = 0
        self.retries_before = 0
        self._replay: Callable[[], None] | None = None

    def step(self) -> None:
        """Enqueue one training step; waits for nothing."""
        if self._replay is not None:
            self._replay()
        else:
            self._eager()

    def _eager(self) -> None:
        self.mark("forward")
        self.optimizer.zero_grad(set_to_none=True)
        self._zero_grad()
        loss = self.model(self.tokens, self.labels)
        self.mark("backward")
        loss.backward()
        if self.variant.has("clip"):
            self.mark("clip")
            self.clip()
        self.mark("optimizer")
        self.update()
        self.mark("end")
        self.loss = loss.detach()

    def _zero_grad(self) -> None:
        """What the optimizer's own `zero_grad` does not reach."""

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()

    def clip(self, max_norm: float = 1.0) -> None:
        """Bound the norm of all gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        """Apply what needs the whole trainer: the capture of a graph."""
        if self.variant.has("graph"):
            self._capture()

    def _capture(self) -> None:
        if self.job.device.type != "cuda":
            raise UnavailableError("a graph needs a CUDA device")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_BEFORE_CAPTURE):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.loss = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._eager()
        self._replay = graph.replay

    def close(self) -> None:
        """Let go of everything that holds memory."""
        for name in ("model", "optimizer", "loss", "_replay", "tokens", "labels"):
            if hasattr(self, name):
                delattr(self, name)


def _adamw(parameters: Any, variant: Variant, job: Job) -> torch.optim.Optimizer:
    in_graph = variant.has("graph") or variant.has("capture")
    capturable = job.device.type == "cuda" and in_graph
    rate = _EXACT_LEARNING_RATE if job.exact else _LEARNING_RATE
    return torch.optim.AdamW(parameters, lr=rate, fused=True, capturable=capturable)


class Plain(Trainer):
    """No sharding: a bf16 model, and AdamW over as many fp32 elements as one rank would own."""

    def __init__(self, job: Job, variant: Variant, owned: int | None = None) -> None:
        super().__init__(job, variant)
        self.model = models.on_meta(job.config, torch.bfloat16)
        models.materialise(self.model, job.device)
        total = sum(parameter.numel() for parameter in self.model.parameters())
        shard = torch.randn(owned or -(-total // job.world), device=job.device)
        self._shard = nn.Parameter(shard)
        self._gradient = torch.randn_like(shard) * 1e-3
        self.optimizer = _adamw([self._shard], variant, job)

    def _zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def clip(self, max_norm: float = 1.0) -> None:
        self._shard.grad = self._gradient.clone()
        nn.utils.clip_grad_norm_([self._shard], max_norm)

    def update(self) -> None:
        if not self.variant.has("clip"):
            self._shard.grad = self._gradient
        self.optimizer.step()

    def close(self) -> None:
        super().close()
        del self._shard, self._gradient


class Sharded(Trainer):
    """`fully_shard` in FSDP2's call style, from torch or from ya_fsdp."""

    package = "torch.distributed.fsdp"

    def __init__(self, job: Job, variant: Variant) -> None:
        super().__init__(job, variant)
        package = self._package()
        reduce = torch.bfloat16 if variant.has("bf16reduce") else torch.float32
        compute = torch.float32 if job.exact else torch.bfloat16
        options: dict[str, Any] = {
            "mesh": _mesh(job, replicas=2 if variant.has("hsdp") else 1),
            "mp_policy": package.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
        }
        if variant.has("fused"):
            options["fused_weight_gradients"] = True
        options |= self._placements()
        model = models.on_meta(job.config)
        if job.exact:
            models.materialise(model, job.device)
        units = model.units()
        for unit in units:
            # The last group's backward follows its forward at once.
            last = variant.has("noreshard") or unit is units[-1]
            reshard = job.world // 2 if variant.has("hpz") and not last else not last
            package.fully_shard(unit, reshard_after_forward=reshard, **options)
        package.fully_shard(model, **options)
        if not job.exact:
            models.materialise(model, job.device)
        self.model = model
        self._configure(package)
        self.optimizer = _adamw(self._parameters(package), variant, job)

    def _package(self) -> Any:
        return importlib.import_module(self.package)

    def _placements(self) -> dict[str, Any]:
        """Further arguments of `fully_shard`."""
        return {}

    def _configure(self, package: Any) -> None:
        """Best settings, then the variant's setters."""
        for name, arguments in self.variant.setters:
            setter = getattr(self.model, name, None)
            if setter is not None:
                setter(*arguments)
            elif hasattr(package, name):
                getattr(package, name)(self.model, *arguments)
            else:
                raise UnavailableError(f"no setter {name!r} on the model or in {self.package}")

    def _parameters(self, package: Any) -> Any:
        return self.model.parameters()


class Fsdp2(Sharded):
    """torch's `fully_shard`, told to gather the next layer before it runs the current one."""

    def _placements(self) -> dict[str, Any]:
        world = self.job.world

        def place(parameter: nn.Parameter) -> Shard | None:
            # By experts, of which there are fewer than ranks, most of the traffic would be padding.
            few = parameter.ndim == 3 and parameter.shape[0] % world != 0
            return Shard(1) if few and parameter.shape[1] % world == 0 else None

        return {"shard_placement_fn": place}

    def _configure(self, package: Any) -> None:
        super()._configure(package)
        if self.variant.has("noprefetch"):
            return
        chain = [unit[0] if isinstance(unit, list) else unit for unit in self.model.units()]
        for here, following in itertools.pairwise(chain):
            here.set_modules_to_forward_prefetch([following])


class Ours(Sharded):
    """ya_fsdp, with what `fully_shard` does by itself."""

    package = "ya_fsdp"

    def _package(self) -> Any:
        try:
            package = importlib.import_module(self.package)
        except ImportError as error:
            raise UnavailableError(f"ya_fsdp does not import: {error}") from error
        if not hasattr(package, "fully_shard"):
            raise UnavailableError("this ya_fsdp has no fully_shard")
        return package

    def _configure(self, package: Any) -> None:
        for flag, name in _COLLECTIVES.items():
            if self.variant.has(flag):
                collectives = importlib.import_module("ya_fsdp.collectives")
                self.model.set_collectives(getattr(collectives, name)())
        super()._configure(package)

    def _parameters(self, package: Any) -> Any:
        if not self.variant.has("flat"):
            return self.model.parameters()
        return package.flat_parameters(self.model)

    def clip(self, max_norm: float = 1.0) -> None:
        self._package().clip_grad_norm_(self.model, max_norm)

    def finish(self) -> None:
        if self.variant.has("early"):
            self._package().optimizer_in_backward(self.model, self.optimizer)
        if not self.variant.has("capture"):
            super().finish()
            return
        try:
            graph = importlib.import_module("ya_fsdp.graph")
        except ImportError as error:
            raise UnavailableError(f"this ya_fsdp has no graph: {error}") from error

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = model(*batch)
            return loss

        batch = (self.tokens, self.labels)
        clip = 1.0 if self.variant.has("clip") else None
        captured = graph.capture_step(self.model, self.optimizer, loss_fn, batch, clip=clip)

        def replay() -> None:
            self.loss = captured(batch)

        self._replay = replay


class Ddp(Trainer):
    """DistributedDataParallel over a bf16 model, with all of the optimizer on this rank."""

    def __init__(self, job: Job, variant: Variant) -> None:
        super().__init__(job, variant)
        model = models.on_meta(job.config, torch.float32 if job.exact else torch.bfloat16)
        models.materialise(model, job.device)
        _mesh(job)
        self.model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
        self.optimizer = _adamw(self.model.parameters(), variant, job)


class Megatron(Trainer):
    """Megatron-FSDP's `fully_shard`, where the package is installed."""

    def __init__(self, job: Job, variant: Variant) -> None:
        super().__init__(job, variant)
        try:
            package: Any = importlib.import_module("megatron_fsdp")
        except ImportError as error:
            raise UnavailableError("megatron-fsdp is not installed") from error
        model = models.on_meta(job.config)
        models.materialise(model, job.device)
        optimizer = _adamw(model.parameters(), variant, job)
        self.model, self.optimizer = package.fully_shard(
            module=model,
            optimizer=optimizer,
            device_mesh=_mesh(job),
            dp_shard_dim="fsdp",
            fsdp_unit_modules=[models.Layer],
            zero_dp_strategy="optim_grads_params",
        )


_CLASSES: dict[str, type[Trainer]] = {
    "plain": Plain,
    "fsdp2": Fsdp2,
    "ours": Ours,
    "ddp": Ddp,
    "megatron": Megatron,
}


_COLLECTIVES = {
    "symmetric": "SymmetricMemoryCollectives",
    "ncclbuffers": "NcclBufferCollectives",
}


def _mesh(job: Job, replicas: int = 1) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError("a sharded implementation needs benchmarks.emulation.start() first")
    if replicas == 1:
        return init_device_mesh(job.device.type, (job.world,), mesh_dim_names=("fsdp",))
    shape = (replicas, job.world // replicas)
    return init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def _carved(multiprocessors: int, device: torch.device) -> Iterator[None]:
    """Matrix products leave so many multiprocessors to others inside the block."""
    if not multiprocessors or device.type != "cuda":
        yield
        return
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(multiprocessors)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(library)


def _collect(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def running(job: Job, variant: Variant, **options: Any) -> Iterator[Trainer]:
    """Build the variant's trainer, and free all that it held at the end.

    Raises:
        UnavailableError: The implementation or one of its options does not exist here.
    """
    trainer: Trainer | None = None
    on_gpu = job.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0
    with _carved(variant.carve, job.device):
        try:
            trainer = _CLASSES[variant.implementation](job, variant, **options)
            trainer.allocated_before, trainer.retries_before = before, retries
            _collect(on_gpu)
            trainer.finish()
            yield trainer
        finally:
            if trainer is not None:
                trainer.close()
            _collect(on_gpu)
