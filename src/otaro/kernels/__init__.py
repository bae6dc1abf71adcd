"""Arithmetic on packed planes: `ops` is the contract, `reference` plain torch and the oracle, `cpu` the C++
in csrc/.
"""
