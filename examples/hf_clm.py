"""Pre-trains a Llama with transformers' Trainer on ya_fsdp, offline on Python's own help pages.

    torchrun --nproc_per_node 2 examples/hf_clm.py
    accelerate launch --config_file fsdp2.yaml examples/hf_clm.py --data my_texts/ --bf16
    torchrun --nproc_per_node 2 examples/hf_clm.py --model path/to/a/model --data file.txt

A single process trains too, unsharded. ``--help`` lists the options. What it needs:
``pip install '.[transformers]'``; docs/integrations/accelerate.md shows a fsdp2.yaml.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf.ending import leave
from hf.text import Blocks, byte_tokenizer, read_text
from ya_fsdp.integrations import YaFSDPConfig
from ya_fsdp.integrations.callbacks import (
    IterationTime,
    ProfilerTrace,
    for_transformers,
    unit_report,
)
from ya_fsdp.integrations.transformers import attach


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="a text file, a folder of texts or of a dataset")
    parser.add_argument("--model", help="a model folder to go on from, with its tokenizer")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/hf_clm"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=4, help="rows of a rank in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--eval_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=0, help="0 saves at the end alone")
    parser.add_argument("--resume", help="a checkpoint-N folder of an earlier run")
    parser.add_argument("--sharded", action="store_true", help="checkpoints in shards")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--recompute", type=int, default=0, help="layers to recompute, -1 is all")
    parser.add_argument("--profile", type=Path, help="a folder for traces (Perfetto)")
    parser.add_argument("--report_to", default="none", help="tensorboard, wandb, ...")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.data is not None and not chosen.data.exists():
        parser.error(f"--data {chosen.data}: there is no such file or folder")
    return chosen


def model_and_tokenizer(chosen: argparse.Namespace) -> tuple[Any, Any]:
    """A model folder's, or a new Llama over bytes."""
    if chosen.model:
        model = AutoModelForCausalLM.from_pretrained(chosen.model)
        return model, AutoTokenizer.from_pretrained(chosen.model)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=chosen.hidden,
        intermediate_size=chosen.hidden * 8 // 3,
        num_hidden_layers=chosen.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(chosen.length, 512),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def training_arguments(chosen: argparse.Namespace, ranks: int) -> TrainingArguments:
    """The trainer's own settings; it knows FSDP in several processes only."""
    kind = "SHARDED_STATE_DICT" if chosen.sharded else "FULL_STATE_DICT"
    sharding = {"fsdp": True, "fsdp_config": {"state_dict_type": kind}} if ranks > 1 else {}
    return TrainingArguments(
        output_dir=str(chosen.output_dir),
        max_steps=chosen.max_steps,
        per_device_train_batch_size=chosen.batch,
        per_device_eval_batch_size=chosen.batch,
        gradient_accumulation_steps=chosen.accumulate,
        learning_rate=chosen.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(chosen.max_steps // 20, 1),
        logging_steps=max(chosen.max_steps // 20, 1),
        eval_strategy="steps" if chosen.eval_steps else "no",
        eval_steps=chosen.eval_steps or None,
        save_strategy="steps" if chosen.save_steps else "no",
        save_steps=chosen.save_steps or 500,
        bf16=chosen.bf16,
        use_cpu=not torch.cuda.is_available(),
        report_to=chosen.report_to,
        seed=chosen.seed,
        **sharding,
    )


def main() -> None:
    """Trains, saves, reloads what was saved and lets it write."""
    chosen = options()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(chosen.seed)
    model, tokenizer = model_and_tokenizer(chosen)
    tokens = tokenizer(read_text(chosen.data), return_tensors="pt")["input_ids"][0]
    held_out = max(len(tokens) // 50, chosen.length * 2)
    args = training_arguments(chosen, ranks)
    trainer = Trainer(
        model,
        args,
        train_dataset=Blocks(tokens[:-held_out], chosen.length),
        eval_dataset=Blocks(tokens[-held_out:], chosen.length),
        processing_class=tokenizer,
    )
    if ranks > 1:
        config = YaFSDPConfig.discover()
        if chosen.recompute:
            config.num_layers_to_checkpoint = chosen.recompute
        attach(trainer, config)
    per_step = ranks * chosen.batch * chosen.accumulate * chosen.length
    meter = IterationTime(per_step, say=print if trainer.is_world_process_zero() else None)
    traces = [ProfilerTrace(chosen.profile)] if chosen.profile else []
    trainer.add_callback(for_transformers(meter, *traces))
    trainer.train(resume_from_checkpoint=chosen.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        if ranks > 1:
            print(unit_report(trainer.model))
        print(f"saved {args.output_dir}; it writes:")
        print(sample(args.output_dir, tokenizer))


def sample(folder: str, tokenizer: Any, prompt: str = "The ") -> str:
    """What a saved model writes."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=80, do_sample=False)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
    leave()
