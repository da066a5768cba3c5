"""Datasets: finding and opening them, views of them, and how they are shown.

Each imports only those on lines below its own:

    concatenated find
    dataset
    display/ statistics
    folders views
    card conditions readers
"""
