"""Tokenizers: from text to ids, the same as by the library that a tokenizer was made for."""

from shardkit.codecs.tokenizers.names import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "open_copy"]
