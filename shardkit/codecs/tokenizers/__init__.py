"""Tokenizers: from text to numbers, as the library that a tokenizer was made for would do it."""

from shardkit.codecs.tokenizers.names import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "open_copy"]
