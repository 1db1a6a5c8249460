"""Measurements of ya_fsdp and its peers; not part of the installed package."""
