"""Checks that a dataset is as it was written.

Each imports only those on lines below its own:

    verify
    compare repair
    client groups samples
    shards
    diff files
    client_reader matching work
"""
