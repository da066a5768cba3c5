"""The conversion engine: every source to every format.

Each imports only those on lines below its own:

    merge
    convert
    create run
    export parts publish
    estimate existing outline partials
    plan ray_engine store_partial
    cuts partial ray_node
    claim pool split
    part_lock scratch shares work
    commit lock read_ahead shards store_commit
    key_shares stats strata target
"""
