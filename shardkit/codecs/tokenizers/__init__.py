"""Tokenizers: text to ids, identical to those of the library for which a tokenizer was made."""

from importlib.util import find_spec

from shardkit.codecs.tokenizers.names import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.tokenizer import Tokenizer
from shardkit.helpers.extras import missing

for _library in ("tokenizers", "tiktoken", "huggingface_hub"):
    if find_spec(_library) is None:
        raise missing("text", "a tokenizer", _library)

__all__ = ["Tokenizer", "load_tokenizer", "open_copy"]
