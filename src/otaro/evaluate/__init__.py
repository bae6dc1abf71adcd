"""Measuring a model at each precision."""
