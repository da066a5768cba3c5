"""Deterministic steps that are done once, while converting, and never again while training."""
