"""Lightning on two ranks, against one process with plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("lightning", reason="the extra [lightning] is not installed")

from tests.harness import WorkerPool
from tests.integrations.support import foreign

STEPS, BATCH = 4, 8


class Net(nn.Module):
    """Blocks in a list, by which units are found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 9, generator=generator)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch(step))
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


class Rows(torch.utils.data.IterableDataset[Any]):
    """This rank's half of every batch."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Any:
        for step in range(STEPS):
            yield tuple(part.chunk(self.world_size)[self.rank] for part in batch(step))


def pretend_torchrun() -> None:
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")


def averaged(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@foreign
def fit(rank: int, world_size: int, folder: str, by_name: bool) -> Any:
    pretend_torchrun()
    from lightning.pytorch import LightningModule, Trainer

    from ya_fsdp import YaFSDPModule
    from ya_fsdp.integrations import YaFSDPConfig
    from ya_fsdp.integrations.callbacks import IterationTime, for_lightning
    from ya_fsdp.integrations.lightning import YaFSDPStrategy

    losses = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.model, *rows)
            losses.append(averaged(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    def make_trainer() -> Any:
        strategy = "ya_fsdp" if by_name else YaFSDPStrategy(YaFSDPConfig())
        return Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=world_size,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            use_distributed_sampler=False,
            callbacks=[for_lightning(meter)],
            default_root_dir=folder,
        )

    meter = IterationTime()
    module = Module()
    trainer = make_trainer()
    rows = torch.utils.data.DataLoader(Rows(rank, world_size), batch_size=None)
    trainer.fit(module, rows)
    units = sum(isinstance(m, YaFSDPModule) for m in module.modules())
    trainer.save_checkpoint(f"{folder}/checkpoint")
    whole = {n: p.full_tensor().detach() for n, p in module.model.named_parameters()}
    return losses, units, len(meter.seconds), whole


@pytest.mark.parametrize("by_name", [True, False])
def test_the_trainer_trains_as_one_process(
    world2: WorkerPool, tmp_path: Path, by_name: bool
) -> None:
    got, units, timed, whole = world2.run(fit, str(tmp_path), by_name)[0]
    losses, state = plain()
    assert got == pytest.approx(losses, rel=1e-5)
    assert units == 4  # three blocks and the root
    assert timed == STEPS
    assert all(torch.allclose(whole[name], state[name], atol=1e-5) for name in state)
    assert any((tmp_path / "checkpoint").glob("*.distcp"))


@foreign
def fabric_run(rank: int, world_size: int, folder: str) -> Any:
    pretend_torchrun()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from ya_fsdp.integrations import YaFSDPConfig
    from ya_fsdp.integrations.lightning import parallelize

    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize(YaFSDPConfig()),
        data_parallel_size=world_size,
        tensor_parallel_size=1,
    )
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        if step == 2:
            fabric.save(f"{folder}/fabric", {"model": model, "optimizer": optimizer})
        x, y = (part.chunk(world_size)[rank] for part in batch(step))
        # Two micro-batches, the first of which communicates nothing.
        for index, (micro_x, micro_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            with fabric.no_backward_sync(model, enabled=index == 0):
                loss = loss_of(model, micro_x, micro_y) / 2
                fabric.backward(loss)
            losses.append(averaged(loss))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    fabric.load(f"{folder}/fabric", {"model": model, "optimizer": optimizer})
    x, y = (part.chunk(world_size)[rank] for part in batch(2))
    again = averaged(loss_of(model, x, y))
    return [a + b for a, b in zip(losses[::2], losses[1::2], strict=True)], again


def test_fabric_trains_as_one_process_and_resumes(world2: WorkerPool, tmp_path: Path) -> None:
    got, again = world2.run(fabric_run, str(tmp_path))[0]
    losses, _ = plain()
    assert got == pytest.approx(losses, rel=1e-5)
    assert again == pytest.approx(losses[2], rel=1e-5)
