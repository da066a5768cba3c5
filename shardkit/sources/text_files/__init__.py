"""Text files and tables, read as records with their offsets: lines, JSON, rows of CSV and TSV.

Each imports only those on lines below its own:

    records
    blocks encodings quotes
"""
