"""Scripts that know nothing of ya_fsdp, run by ``ya_fsdp.run`` and by ``accelerate launch``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from tests.harness import WorkerPool
from tests.integrations.support import foreign
from ya_fsdp import fully_shard
from ya_fsdp.run import main, swapped_fully_shard

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None
    or importlib.util.find_spec("transformers") is None,
    reason="the extras [accelerate] and [transformers] are not installed",
)

# Stock accelerate with FSDP2; two lines make it shard on CPU, where it would not by itself.
SCRIPT = """\
import json, sys
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tests.integrations.support import llama, parts_tied_weights, tokens

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **json.loads(sys.argv[2])
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
accelerator.state.fsdp_plugin = plugin
accelerator.state.distributed_type = DistributedType.FSDP
rank = accelerator.process_index
tied = not parts_tied_weights
model = llama(tied=tied, seed=3 if rank == 0 else 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
losses = []
for step in range(4):
    batch = tokens(4)[2 * rank : 2 * rank + 2]
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
bases = [base.__module__ for base in type(model).__mro__]
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"losses": losses, "ours": "ya_fsdp.module" in bases}, file)
"""


@foreign
def run_script(rank: int, world_size: int, folder: str, enabled: bool, options: str) -> Any:
    os.environ["YA_FSDP_ENABLED"] = str(enabled)
    main([f"{folder}/script.py", folder, options])
    return json.loads(Path(f"{folder}/{rank}.json").read_text())


@needs_accelerate
@pytest.mark.parametrize(
    "options", [{"cpu_ram_efficient_loading": True}, {"activation_checkpointing": True}]
)
def test_an_unmodified_script_gives_the_losses_of_fsdp2(
    world2: WorkerPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if "cpu_ram_efficient_loading" not in options:
        (tmp_path / "script.py").write_text(SCRIPT.replace("3 if rank == 0 else 4", "3"))
    ours = world2.run(run_script, str(tmp_path), True, json.dumps(options))[0]
    theirs = world2.run(run_script, str(tmp_path), False, json.dumps(options))[0]
    assert (ours["ours"], theirs["ours"]) == (True, False)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["losses"][-1] < ours["losses"][0] - 0.3


def test_the_swap_ends_with_its_block_even_after_an_error() -> None:
    before = fsdp.fully_shard
    with swapped_fully_shard():
        assert fsdp.fully_shard is not before
    with pytest.raises(KeyError), swapped_fully_shard():
        raise KeyError
    assert fsdp.fully_shard is before
    assert fsdp.fully_shard is not fully_shard


def test_offloading_is_refused_and_a_16_bit_output_is_warned_of_once() -> None:
    layer = torch.nn.Linear(2, 2)
    with swapped_fully_shard():
        with pytest.raises(NotImplementedError, match="does not offload to CPU"):
            fsdp.fully_shard(layer, offload_policy=fsdp.CPUOffloadPolicy())
        policy = fsdp.MixedPrecisionPolicy(output_dtype=torch.bfloat16)
        # Without a process group the call itself can not succeed; the warning comes before.
        with pytest.warns(UserWarning, match="coarse steps"), pytest.raises(RuntimeError):
            fsdp.fully_shard(layer, mp_policy=policy)


def test_a_script_sees_its_own_arguments_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "it.py").write_text("import sys, beside\nprint(sys.argv[1:], beside.VALUE)\n")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main([str(tmp_path / "it.py"), "--steps", "3"])
    said = capsys.readouterr()
    assert said.out == "['--steps', '3'] 7\n"
    assert "it.py never called torch.distributed.fsdp.fully_shard" in said.err


def test_no_script_and_a_missing_one_end_with_the_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"nowhere.py is no file"):
        main(["nowhere.py"])
