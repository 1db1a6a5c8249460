"""Fully sharded data parallelism for PyTorch over flat, ragged, zero-copy shards."""
