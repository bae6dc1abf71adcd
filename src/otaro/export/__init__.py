"""A nested model at a precision in others' formats: hf, gguf, compressed-tensors, mlx (docs/export.md)."""
