"""Architectures under one budget: planned, trained, measured, reported."""
