"""Tokenizers: text to ids, identical to those of the library for which a tokenizer was made."""

from shardkit.codecs.tokenizers.names import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "open_copy"]
