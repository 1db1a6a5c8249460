"""Checkpoints: full state dicts, Hugging Face safetensors, and a folder of resumable steps."""

from .entries import LoadResult
from .full import get_full_state_dict, load_full_state_dict
from .full_optimizer import get_full_optimizer_state_dict, load_full_optimizer_state_dict
from .hf_load import load_safetensors
from .hf_save import save_safetensors
from .peers import CheckpointError
from .store import AsyncSave, Loaded, async_save, latest, load, save
from .whole import read_whole

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "LoadResult",
    "Loaded",
    "async_save",
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "latest",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "read_whole",
    "save",
    "save_safetensors",
]
