"""Codecs: inspecting, decoding and encoding the values of fields."""
