"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.errors import UsageError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; ``dim`` must be a multiple of twice this number.
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads.
        rope_base: base of the rotary frequencies.
        checkpoint_layers: the first so many blocks recompute their activations in backward.
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    rope_base: float = 10_000.0
    checkpoint_layers: int = 0

    def __post_init__(self) -> None:
        """Checks that the heads divide the width.

        Raises:
            UsageError: the numbers do not fit each other.
        """
        if self.dim % (2 * self.heads):
            raise UsageError(f"dim {self.dim} is not a multiple of 2 * heads ({2 * self.heads})")
        if self.heads % self.kv_heads:
            raise UsageError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Width inside the feed-forward part: 8/3 of ``dim``, a multiple of 32."""
        return -(-8 * self.dim // 3 // 32) * 32


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    inverse_frequency: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.heads
        self.q = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.register_buffer("inverse_frequency", config.rope_base**-exponent, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Maps ``x`` (batch, length, dim) to the same shape.

        ``positions`` (length,) is an integer tensor, so that a policy that casts a module's
        floating-point inputs leaves the rotary angles in float32.
        """
        batch, length, _ = x.shape
        split = (batch, length, -1, self.head_dim)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.grouped
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + half) of the last dim of ``x`` by the angle of its position."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``x`` (..., dim) to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, recompute: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)
        self.recompute = recompute
        self._run: Callable[[Tensor, Tensor], Tensor] = self._compute

    def compile_compute(self) -> None:
        """Compiles what the block computes, and none of what is hooked around it."""
        self._run = torch.compile(self._compute, fullgraph=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Maps ``x`` (batch, length, dim) to the same shape."""
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._run, x, positions, use_reentrant=False)
            return out
        return self._run(x, positions)

    def _compute(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """The language model: token embedding, blocks, norm and output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config, recompute=index < config.checkpoint_layers)
            for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``tokens`` (batch, length) to logits (batch, length, vocab_size)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if parameter.shape[-1] > 512 else parameter.shape[-1] ** -0.5 / 2
            # Each block adds two terms to the residual stream, whose sum should keep its size.
            if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                std /= (2 * self.config.layers) ** 0.5
            nn.init.normal_(parameter, std=std)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, computed in float32.

    Args:
        logits: (batch, length, vocab_size).
        targets: (batch, length), integers.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
