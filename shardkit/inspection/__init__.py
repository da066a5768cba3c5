"""What `inspect`, `head` and `cat` show of a dataset.

Each imports only those on lines below its own:

    report
    command inspect pieces samples
"""
