"""Codecs: what encoded values are, and how they are decoded and encoded."""
