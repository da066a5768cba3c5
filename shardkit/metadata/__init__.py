"""What is written about a dataset: the manifest, the recipe, schemas, splits.

Each imports only those on lines below its own:

    sizes
    manifest
    job recipe shared_schema splits
"""
