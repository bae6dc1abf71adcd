"""Arithmetic on packed planes: `ops` is the contract, `reference` the oracle in torch, `cpu` C++ (csrc/)."""
