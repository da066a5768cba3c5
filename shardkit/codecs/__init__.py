"""Codecs: inspecting, decoding and encoding the values of fields.

Each imports only those on lines below its own:

    given
    crop frames masks packed_images perceptual sound
    damage media pixels
    boxes header jpeg media_info
    _build array color compression extension image protobuf tokenizers/ window
"""
