"""Text corpora: `.txt` and `.md` files, JSON Lines, CSV and TSV; compressed or not."""
