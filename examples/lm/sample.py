"""Text from a trained model."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    count: int,
    length: int,
    device: torch.device,
    temperature: float = 0.7,
) -> bytes:
    """Continues ``prompt`` by ``count`` bytes.

    Every rank of a sharded model must call this with the same arguments: each forward gathers
    weights from all ranks, and the generator on each draws the same bytes.

    Args:
        model: maps (1, length) tokens to (1, length, 256) logits.
        prompt: at least one byte.
        count: bytes to add.
        length: the model sees at most so many of the last bytes.
        device: where the model computes.
        temperature: 0 takes the likeliest byte each time.
    """
    generator = torch.Generator().manual_seed(0)
    text = list(prompt)
    window = torch.zeros(1, length, dtype=torch.int64, device=device)
    for _ in range(count):
        seen = text[-length:]
        # One shape for all steps, so that a compiled model compiles once; what stands behind
        # the last byte cannot be seen by it.
        window[0, : len(seen)] = torch.tensor(seen, device=device)
        logits = model(window)[0, len(seen) - 1].float().cpu()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / temperature, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)
