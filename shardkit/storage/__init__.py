"""Files and objects: local disks, buckets and web servers, and the cache of their bytes.

Each imports only those on lines below its own:

    pages
    byte_source page_cache walk
    fs patterns
    remote/
    announced checksums pointers
"""
