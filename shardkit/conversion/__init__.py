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
    part_lock scratch shares work
    commit lock read_ahead shards store_commit
    claim key_shares stats strata target
"""
