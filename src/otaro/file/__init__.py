"""The nested file: one directory of safetensors shards, cut by bit-plane, that holds every precision. See
FORMAT.md.
"""
