"""Arithmetic on packed planes. `reference` is plain torch: it runs everywhere and judges every faster backend."""
