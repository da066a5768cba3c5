"""Deterministic steps that are applied once, while converting.

Each imports only those on lines below its own:

    pipeline steps
    audio images text
    box_fields items single_image transform
    elsewhere filtered geometry mask_fields packing
"""
