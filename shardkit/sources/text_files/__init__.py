"""Text files and tables, read as records with their offsets: lines, JSON, rows of CSV and TSV.

records.py     a file: its lines, JSON objects or rows, or its whole text
encodings.py   decoding, lines, and detection of encodings
blocks.py      the bytes, decompressed
"""
