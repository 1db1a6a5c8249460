"""The examples for Hugging Face libraries, started as their first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")
pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
YAML = """\
distributed_type: FSDP
num_processes: 2
num_machines: 1
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  ya_fsdp_num_layers_to_checkpoint: 1
  ya_fsdp_wrap: LlamaMLP
"""
SMALL = ["--max_steps=2", "--length=32", "--eval_steps=0", "--layers=2", "--hidden=32"]

pytestmark = pytest.mark.slow


def start(launcher: str, folder: Path, *words: str) -> str:
    """Runs an example on two processes; returns what it printed."""
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2"]
    else:
        (folder / "config.yaml").write_text(YAML)
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += [f"--config_file={folder / 'config.yaml'}"]
    script, *options = words
    command += [str(EXAMPLES / script), *options, f"--output_dir={folder / 'out'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_accelerate_launch_hands_our_keys_of_its_yaml_to_the_example(tmp_path: Path) -> None:
    said = start("accelerate launch", tmp_path, "hf_clm.py", *SMALL)
    assert "model.layers.1.mlp " in said
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_model_is_pretrained_under_torchrun(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    start("torchrun", tmp_path, "hf_clm.py", *SMALL, "--save_steps=1", "--sharded")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 32
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


def test_adapters_are_fine_tuned_on_chats_under_torchrun(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"what follows {i}?"},
                {"role": "assistant", "content": f"{i + 1}"},
            ]
        }
        for i in range(16)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    data = f"--data={tmp_path / 'chats.jsonl'}"
    start("torchrun", tmp_path, "hf_sft.py", "--max_steps=2", "--length=64", "--lora", data)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_whole_model_is_fine_tuned_under_accelerate_launch(tmp_path: Path) -> None:
    start("accelerate launch", tmp_path, "hf_sft.py", "--max_steps=2", "--length=64")
    assert (tmp_path / "out" / "model.safetensors").exists()
