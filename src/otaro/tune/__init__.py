"""Tuning once for all precisions."""
