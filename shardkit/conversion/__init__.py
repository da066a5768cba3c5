"""The conversion engine: every source to every format.

Each imports only those on lines below its own:

    merge
    convert
    create run
    export parts publish
    estimate existing outline ray_engine
    plan ray_node
    bucket cuts folder
    partial pool split
    claim shares work
    locks read_ahead shards
    key_shares stats strata target
"""
