"""A small model, its data, and workers for the tests of other libraries."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCAB = 131


def _version(package: str) -> tuple[int, ...]:
    if importlib.util.find_spec(package) is None:
        return (0, 0)
    return tuple(int(n) for n in importlib.metadata.version(package).split(".")[:2])


needs_sharded_optimizers = pytest.mark.skipif(
    _version("accelerate") < (1, 13),
    reason="accelerate before 1.13 can not load a sharded optimizer (huggingface/accelerate#3971)",
)

# fixed by huggingface/accelerate#4171
parts_tied_weights = (1, 14) <= _version("accelerate") < (1, 15)


def foreign(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A worker function that uses other libraries: their warnings pass, their singletons reset."""

    @functools.wraps(fn)
    def wrapped(rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29999",
            ACCELERATE_USE_CPU="true",
            HF_HUB_OFFLINE="1",
            TRL_EXPERIMENTAL_SILENCE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        forget_accelerate()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module="ya_fsdp")
            return fn(rank, world_size, *args, **kwargs)

    return wrapped


def forget_accelerate() -> None:
    """accelerate keeps its state in classes, one per process."""
    if importlib.util.find_spec("accelerate") is None:
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED", "YA_FSDP_")):
            del os.environ[name]


def llama(*, tied: bool = False, seed: int = 3, **overrides: Any) -> Any:
    """A Llama of odd sizes, so that shards are uneven and some are empty."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **overrides}))


def tokens(rows: int, length: int = 16, seed: int = 11) -> torch.Tensor:
    """Token ids that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens that are their own labels."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def history(trainer: Any) -> list[float]:
    """Loss and gradient norm of every logged step, one after the other."""
    logged = [h for h in trainer.state.log_history if "loss" in h]
    return [h[name] for h in logged for name in ("loss", "grad_norm")]


def byte_tokenizer() -> Any:
    """Bytes as tokens, with padding, begin and end: 259 of them, without a download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
