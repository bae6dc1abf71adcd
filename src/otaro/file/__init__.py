"""The nested file: a directory of safetensors shards, cut by bit-plane, with every precision (FORMAT.md)."""
