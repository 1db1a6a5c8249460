"""Llama-shaped decoders to measure with, built on the meta device and filled per rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    """Shape of a decoder.

    Attributes:
        hidden: Width of the feed-forward layer (of one expert, in a mixture).
        experts: Experts per layer; 0 is a dense feed-forward layer.
        top_k: Experts that an average token is sent to.
        world: Ranks of the emulated job at which the model is measured by default.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 32000
    experts: int = 0
    top_k: int = 2
    world: int = 64


CONFIGS = {
    "1B": Config(2048, 22, 32, 4, 5632),
    "7B": Config(4096, 32, 32, 32, 11008),
    "8B": Config(4096, 32, 32, 8, 14336, vocabulary=128256),
    "13B": Config(5120, 40, 40, 40, 13824),
    "34B": Config(8192, 48, 64, 8, 22016, world=128),
    "70B": Config(8192, 80, 64, 8, 28672, world=256),
    "narrow": Config(512, 96, 8, 8, 1376),
    "moe": Config(2048, 16, 16, 16, 2816, experts=16, top_k=2),
    "tiny": Config(64, 4, 4, 2, 192, vocabulary=256),
}


def config_of(name: str, layers: int | None = None, width: int | None = None) -> Config:
    """The configuration of that name, optionally with another depth or scaled to another width."""
    try:
        config = CONFIGS[name]
    except KeyError:
        raise ValueError(f"no model {name!r}; there are {', '.join(CONFIGS)}") from None
    if width is not None:
        hidden = max(8, config.hidden * width // config.width // 8 * 8)
        config = replace(config, width=width, hidden=hidden, vocabulary=min(config.vocabulary, 512))
    return replace(config, layers=layers) if layers is not None else config


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.grouped = config.heads != config.kv_heads
        self.wq = nn.Linear(config.width, config.heads * self.head, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.heads * self.head, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.grouped
        )
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """SwiGLU experts that choose their tokens: every shape is static, nothing waits for the GPU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.experts, self.top_k = config.experts, config.top_k
        self.router = nn.Linear(config.width, config.experts, bias=False)
        shape = (config.experts, config.width, config.hidden)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.w3 = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        capacity = max(1, flat.shape[0] * self.top_k // self.experts)
        weight, index = self.router(flat).softmax(-1).t().topk(min(capacity, flat.shape[0]))
        chosen = flat[index]
        hidden = F.silu(torch.bmm(chosen, self.w1)) * torch.bmm(chosen, self.w3)
        out = (torch.bmm(hidden, self.w2) * weight.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(flat).index_add(0, index.flatten(), out.to(flat.dtype)).view_as(x)


class Layer(nn.Module):
    """One decoder layer: nine parameters when dense."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn = Mixture(config) if config.experts else FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Token embedding, layers, norm and head; returns the mean cross-entropy in fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = _rotary_table(tokens.shape[1], self.config, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def units(self) -> list[nn.Module | list[nn.Module]]:
        """What is sharded as one group each, in forward order; the root comes after them."""
        return [self.embed, *self.layers, [self.norm, self.head]]


_tables: dict[tuple[int, int, torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


def _rotary_table(
    length: int, config: Config, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    # Kept outside the module: a buffer would have to be filled after `to_empty` in every wrapper.
    head = config.width // config.heads
    key = (length, head, device, dtype)
    if key not in _tables:
        frequency = 10000 ** (-torch.arange(0, head, 2, device=device).float() / head)
        angle = torch.outer(torch.arange(length, device=device).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        _tables[key] = (angle.cos().to(dtype), angle.sin().to(dtype))
    return _tables[key]


def on_meta(config: Config, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model without memory."""
    with torch.device("meta"):
        return Decoder(config).to(dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    to_local = getattr(parameter, "to_local", None)
    found: torch.Tensor = to_local() if to_local is not None else parameter
    return found.detach()


@torch.no_grad()
def materialise(model: Decoder, device: torch.device, seed: int = 0) -> None:
    """Give the model memory on `device` and random weights; of sharded parameters, the shard."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    torch.manual_seed(seed)
    small = 0.02 / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        local = _local(parameter)
        if "norm" in name:
            local.fill_(1.0)
        else:
            local.normal_(0.0, small if name.endswith(("wo.weight", "w2.weight", "w2")) else 0.02)


def unit_elements(config: Config) -> list[int]:
    """Parameter elements of every unit, in forward order."""
    counts = []
    for unit in on_meta(config).units():
        modules = unit if isinstance(unit, list) else [unit]
        counts.append(sum(p.numel() for module in modules for p in module.parameters()))
    return counts


def batch_of(
    config: Config, batch: int, sequence: int, device: torch.device, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and labels of shape `(batch, sequence)`."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(config.vocabulary, (2, batch, sequence), generator=generator)
    tokens, labels = data.to(device)
    return tokens, labels
