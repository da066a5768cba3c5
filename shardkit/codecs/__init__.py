"""Codecs: inspecting, decoding and encoding the values of fields.

Each imports only those on lines below its own:

    damage
    given values
    crop frames masks packed_images perceptual sound
    media pixels
    header jpeg media_info shapes
    boxes image volumes
    _build array color compression extension protobuf rle tiff tokenizers/ window
"""
