"""Checks that a dataset is as it was written.

verify.py     `verify`: all of it, and the report
files.py      existence, sizes and checksums of the files in a manifest; shards that it lacks
shards.py     one shard: its files, then its keys and counts, in one thread
keys.py       looks up positions by key, with 8 bytes of memory per key
samples.py    every value of every sample against the schema
groups.py     which datasets are compared with which samples of a source
compare.py    a dataset compared with its source, or with another dataset
client.py     a dataset compared with what the library of its format reads
client_reader.py  the script that reads with such a library, in its own process
work.py       findings; threads with results in order; progress
"""
