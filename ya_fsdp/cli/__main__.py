"""``python -m ya_fsdp.cli`` is the command ``ya-fsdp``."""

from . import main

main()
