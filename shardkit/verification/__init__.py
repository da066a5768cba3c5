"""Checks that a dataset is as it was written.

verify.py     `verify`: all of it, and the report
files.py      the files that a manifest names: there, whole, unchanged; and those it does not name
shards.py     one shard: its files, then its keys and counts, in one thread
keys.py       the position of every key, in 8 bytes each
samples.py    every value of every sample against the schema
groups.py     which datasets are compared with which samples of a source
compare.py    a dataset compared with its source, or with another dataset
client.py     a dataset compared with what the library of its format reads
client_reader.py  the process that reads with such a library, a script
work.py       findings; threads whose results come in order; progress
"""
