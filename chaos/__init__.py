"""Breaks things and judges the result."""
