"""The numbers: what a precision is, and how weights become codes and codes become values. Pure torch, no
model.
"""
