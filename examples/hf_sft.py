"""Fine-tunes a chat model with TRL on ya_fsdp, offline on questions about Python's help pages.

    torchrun --nproc_per_node 2 examples/hf_sft.py --lora
    accelerate launch --config_file fsdp2.yaml examples/hf_sft.py --model folder --data chats.jsonl

``--data`` has a JSON object in every line, with ``messages`` of ``role`` and ``content``. Without
``--model`` a small new Llama is trained. ``--help`` lists the options. What it needs:
``pip install '.[trl]'``; docs/integrations/accelerate.md shows a fsdp2.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from hf.ending import leave
from hf.text import byte_tokenizer, help_chats
from ya_fsdp.integrations.callbacks import IterationTime, for_transformers
from ya_fsdp.integrations.transformers import attach


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="chats, a JSON object a line")
    parser.add_argument("--model", help="a model folder, with its tokenizer")
    parser.add_argument("--output_dir", default="runs/hf_sft")
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=320, help="tokens of a chat at most")
    parser.add_argument("--batch", type=int, default=2, help="chats of a rank in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lora", action="store_true", help="train adapters, of rank 8")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--report_to", default="none", help="tensorboard, wandb, ...")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.data is not None and not chosen.data.exists():
        parser.error(f"--data {chosen.data}: there is no such file or folder")
    return chosen


def read_chats(path: Path | None) -> Dataset:
    """The rows of a JSONL file, or the bundled ones."""
    if path is None:
        return Dataset.from_list(help_chats())
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows = [json.loads(line) for line in lines]
    if not rows or "messages" not in rows[0]:
        raise ValueError(
            f'{path} must have lines such as {{"messages": [{{"role": "user", ...}}]}}'
        )
    return Dataset.from_list(rows)


def model_and_tokenizer(folder: str | None) -> tuple[Any, Any]:
    """A model folder's, or a new Llama over bytes."""
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model, AutoTokenizer.from_pretrained(folder)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    """Fine-tunes and saves a model, or adapters."""
    chosen = options()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(chosen.seed)
    model, tokenizer = model_and_tokenizer(chosen.model)
    args = SFTConfig(
        output_dir=chosen.output_dir,
        max_steps=chosen.max_steps,
        max_length=chosen.length,
        per_device_train_batch_size=chosen.batch,
        learning_rate=chosen.lr,
        logging_steps=max(chosen.max_steps // 10, 1),
        save_strategy="no",
        bf16=chosen.bf16,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=chosen.report_to,
        seed=chosen.seed,
        **({"fsdp": True, "fsdp_config": {}} if ranks > 1 else {}),
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if chosen.lora else None
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=read_chats(chosen.data),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    if ranks > 1:
        attach(trainer)
    meter = IterationTime(say=print if trainer.is_world_process_zero() else None)
    trainer.add_callback(for_transformers(meter))
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"saved {sorted(os.listdir(chosen.output_dir))} in {chosen.output_dir}")


if __name__ == "__main__":
    main()
    leave()
