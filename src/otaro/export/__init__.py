"""A nested model at one precision in the formats of others: hf, gguf, compressed-tensors, mlx
(docs/export.md).
"""
