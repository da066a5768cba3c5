"""Deterministic steps that are applied once, while converting."""
