"""Datasets: finding and opening them, views of them, and how they are shown.

Each imports only those on lines below its own:

    concatenated find incomplete
    dataset
    display/
    folders views
    card conditions open_shards sequence_reader statistics
"""
