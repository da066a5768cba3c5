"""Deterministic steps that are applied once, while converting.

Each imports only those on lines below its own:

    pipeline
    chats images
    audio text transform
    elsewhere items on_image packing single_image
"""
