"""Text to train on that needs no network, and a tokenizer that needs no vocabulary."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

BYTES = 256
SPECIAL = ("<pad>", "<bos>", "<eos>")
# A chat template that every model can learn: a line of the role, the text, an end.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def read_text(path: Path | None) -> str:
    """Text of a file, of all ``*.txt`` and ``*.md`` of a folder, or Python's own help pages.

    Args:
        path: A text file, a folder of them, a folder made by ``datasets.Dataset.save_to_disk``
            with a column ``text``, or ``None``.

    Raises:
        FileNotFoundError: If there is no such path, or no text in it.
    """
    if path is None:
        return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    if path.is_file():
        return path.read_text(errors="replace")
    if (path / "dataset_info.json").exists():
        from datasets import load_from_disk

        return "\n\n".join(load_from_disk(str(path))["text"])
    files = sorted(f for kind in ("*.txt", "*.md") for f in path.rglob(kind))
    if not files:
        raise FileNotFoundError(f"no text in {path}: it needs *.txt or *.md files")
    return "\n\n".join(f.read_text(errors="replace") for f in files)


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, with padding, begin and end: 259 of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
    )
    made.chat_template = CHAT_TEMPLATE
    return made


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of tokens, each its own labels.

    Args:
        tokens: All tokens, shape (count,).
        length: Tokens of a block; what is left at the end is dropped.
    """

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        count = len(tokens) // length
        if count == 0:
            raise ValueError(f"{len(tokens)} tokens do not fill a block of {length}")
        self.blocks = tokens[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "labels": block}


def help_chats() -> list[dict[str, Any]]:
    """Questions about Python with the first paragraph of its help pages as answers."""
    chats = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        paragraphs = [p.strip() for p in text.split("\n\n") if p.strip()]
        # The first is a title, underlined with stars.
        answer = next((p for p in paragraphs[1:] if "***" not in p and len(p) > 40), None)
        if answer is not None:
            question = f"What does Python's help say on {topic}?"
            chats.append(
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": " ".join(answer.split())[:240]},
                    ]
                }
            )
    return chats
