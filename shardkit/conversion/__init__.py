"""The conversion engine: every source to every format.

Each imports only those on lines below its own:

    merge
    convert
    create run
    parts publish
    estimate existing outline
    plan
    export
    partials ray_engine
    cuts ray_node store_partial
    partial pool split
    claim scratch shares work
    commit part_lock read_ahead shards store_commit
    key_shares lock stats strata
    target
"""
