"""The conversion engine: every source to every format.

Each imports only those on lines below its own:

    merge
    convert
    spool
    create run
    export publish
    estimate existing publish_plan ray_engine
    bucket folder plan
    cuts partial pool
    claim splits work
    locks read_ahead shards
    export_coco stats target
"""
