"""Other libraries on ya_fsdp. Each submodule imports its library; nothing here does.

``accelerate``, ``transformers`` (TRL included), ``lightning``, ``torchtitan``, and ``callbacks``,
which any of them can use. :class:`YaFSDPConfig` holds the options of all.
"""

from .config import YaFSDPConfig

__all__ = ["YaFSDPConfig"]
