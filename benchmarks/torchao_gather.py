"""Losses with torchao's weight classes under ya_fsdp and under FSDP2, on two gloo ranks.

    pip install torchao && python -m benchmarks.torchao_gather

Prints one line per class and whether all losses are equal to the last bit.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import fsdp

import ya_fsdp

WIDTH, STEPS, WORLD = 64, 5, 2


def float8(model: Any) -> tuple[Any, torch.dtype]:
    """``Float8Linear`` with the all-gather in 8 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config), torch.float8_e4m3fn


def int8(model: Any) -> tuple[Any, torch.dtype]:
    """Weights of the int8 mixed-precision training, here without int8 products."""
    from torchao.prototype.quantized_training import int8_mixed_precision as module

    config = module.Int8MixedPrecisionTrainingConfig(
        output=False, grad_input=False, grad_weight=False
    )
    kind = module.Int8MixedPrecisionTrainingLinearWeight
    return _wrapped(model, lambda weight: kind(weight, config)), torch.bfloat16


def mxfp8(model: Any) -> tuple[Any, torch.dtype]:
    """Weights whose products are made in emulated mxfp8."""
    from torchao.prototype.moe_training import config as configs
    from torchao.prototype.moe_training import tensor

    config = configs.MXFP8TrainingOpConfig(kernel_preference=configs.KernelPreference.EMULATED)
    kind = tensor.MXFP8TrainingWeightWrapperTensor
    return _wrapped(model, lambda weight: kind(weight, config)), torch.bfloat16


def _wrapped(model: Any, wrap: Any) -> Any:
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(wrap(layer.weight.detach()))
    return model


def losses(rank: int, convert: Any, library: Any) -> list[float]:
    """Losses of a few AdamW steps."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
    model, dtype = convert(model)
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if library is ya_fsdp:
        options["all_gather_dtype_to_param_cls"] = {dtype: type(model[0].weight)}
    for module in (model[0], model[2], model):
        library.fully_shard(module, mp_policy=library.MixedPrecisionPolicy(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(WORLD, 32, WIDTH, generator=generator)[rank]
        loss = (model(x).float() - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def run(rank: int, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    for convert in (float8, int8, mxfp8):
        ours = losses(rank, convert, ya_fsdp)
        theirs = losses(rank, convert, fsdp)
        if rank == 0:
            verdict = "equal to FSDP2's" if ours == theirs else f"FSDP2: {theirs}"
            print(f"{convert.__name__}: {[round(v, 4) for v in ours]}, {verdict}", flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive the interpreter


def main() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port,), WORLD)


if __name__ == "__main__":
    main()
