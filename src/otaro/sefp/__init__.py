"""The numbers: what a precision is, and how weights become codes, and codes values. Pure torch, no model."""
