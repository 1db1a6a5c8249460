"""Hugging Face transformers' ``Trainer``, and with it TRL's trainers.

One line after the trainer is made::

    from ya_fsdp.integrations.transformers import attach

    trainer = attach(SFTTrainer(model, args=args, train_dataset=data))

or the mixin, before the trainer's class::

    class MyTrainer(YaFSDPTrainerMixin, Trainer): ...
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import FullyShardedDataParallelPlugin

from .accelerate import YaFSDPAccelerator, YaFSDPPlugin, engage
from .config import YaFSDPConfig

logger = logging.getLogger("ya_fsdp.integrations")

T = TypeVar("T")
_CLASSES: dict[type, type] = {}


class YaFSDPTrainerMixin:
    """Goes before a ``Trainer`` class and makes it shard with ya_fsdp.

    ``evaluate()`` and ``predict()`` work before ``train()``, and :meth:`save_model` writes a
    loadable model whatever the state-dict type. Settings of the trainer's own ``fsdp_config`` hold;
    ours stand beside them, as ``fsdp_config={"ya_fsdp": {"num_layers_to_checkpoint": 8}}``.

    Attributes:
        ya_fsdp_config: The options; ``None``: from ``args.fsdp_config``, the environment and the
            YAML of ``accelerate launch``.
    """

    ya_fsdp_config: YaFSDPConfig | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the trainer's accelerator, then makes it ours."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _engage_trainer(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a model that ``from_pretrained`` loads.

        A checkpoint during training of the type ``SHARDED_STATE_DICT`` holds no such model, as in
        the plain trainer; ``accelerate merge-weights`` makes one of it.

        Args:
            output_dir: Where to; ``args.output_dir`` by default.
            _internal_call: Whether the trainer itself calls, for a checkpoint.
        """
        trainer: Any = self
        folder = output_dir or trainer.args.output_dir
        if _has_full_state_dicts(trainer) or not _is_ours(trainer):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif _internal_call:
            logger.info("%s gets shards (SHARDED_STATE_DICT) and no loadable model", folder)
            # Whether the best checkpoint is there is asked before the shards are written.
            Path(folder).mkdir(parents=True, exist_ok=True)
            return
        else:
            trainer._save(folder, state_dict=trainer.accelerator.get_state_dict(trainer.model))
        if _is_ours(trainer) and trainer.args.should_save:
            _write_dtype(Path(folder) / "config.json", trainer)


def attach(trainer: T, config: YaFSDPConfig | None = None) -> T:
    """Makes a trainer shard with ya_fsdp.

    Args:
        trainer: A ``Trainer`` or a trainer of TRL that has not trained or evaluated yet.
        config: The options; by default from ``args.fsdp_config``, the environment and the YAML of
            ``accelerate launch``.

    Returns:
        The same trainer. Its class is now ``YaFSDP<Original>``, with
        :class:`YaFSDPTrainerMixin` before the original.

    Raises:
        RuntimeError: If the trainer has prepared its model already.
        TypeError: If it is no ``Trainer``.
    """
    if not hasattr(trainer, "create_accelerator_and_postprocess"):
        raise TypeError(f"attach takes a transformers Trainer, got {type(trainer).__name__}")
    cls = type(trainer)
    if config is not None:
        trainer.__dict__["ya_fsdp_config"] = config
    if not isinstance(trainer, YaFSDPTrainerMixin):
        if cls not in _CLASSES:
            _CLASSES[cls] = type(f"YaFSDP{cls.__name__}", (YaFSDPTrainerMixin, cls), {})
        trainer.__class__ = _CLASSES[cls]
    _engage_trainer(trainer)
    return trainer


def _engage_trainer(trainer: Any) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    mapping = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    config = trainer.ya_fsdp_config or YaFSDPConfig.discover(mapping)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None and args.fsdp_plugin_args is not None:
        # On CPU accelerate drops the plug-in that the trainer made of its arguments.
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if plugin is None:
        plugin = YaFSDPPlugin(state_dict_type="FULL_STATE_DICT", ya_fsdp=config)
    engage(accelerator, YaFSDPPlugin.from_plugin(plugin, config))
    trainer.is_fsdp_enabled = getattr(accelerator.state, "fsdp_plugin", None) is not None


def _is_ours(trainer: Any) -> bool:
    accelerator = trainer.accelerator
    return isinstance(accelerator, YaFSDPAccelerator) and accelerator.ya_fsdp_enabled


def _has_full_state_dicts(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is None or "FULL_STATE_DICT" in str(plugin.state_dict_type)


def _write_dtype(path: Path, trainer: Any) -> None:
    """Corrects the dtype in ``config.json``, which transformers reads off the master weights."""
    dtype = trainer.accelerator.loaded_dtype(trainer.model)
    if dtype is None or not path.exists():
        return
    content = json.loads(path.read_text())
    name = str(dtype).removeprefix("torch.")
    for key in ("dtype", "torch_dtype"):
        if key in content and content[key] != name:
            content[key] = name
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


__all__ = ["YaFSDPTrainerMixin", "attach"]
