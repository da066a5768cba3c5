"""Whether a dataset is what was written.

verify.py     `verify`: all of it, and the report
files.py      the files that a manifest names: there, whole, unchanged; and those it does not name
shards.py     one shard: its files, then its keys and counts, in one thread
keys.py       where every key is, in 8 bytes each
samples.py    every value of every sample, and what it should be
groups.py     which datasets are compared with which samples of a source
compare.py    a dataset beside the source it was made of, or another dataset
client.py     a dataset beside what the library of its format reads
client_reader.py  the process that reads with such a library, a script
work.py       threads whose results come in order; progress
"""
