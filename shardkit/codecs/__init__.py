"""Codecs: inspecting, decoding and encoding the values of fields.

Each imports only those on lines below its own:

    frames masks packed_images perceptual sound
    crop damage media pixels
    boxes header jpeg media_info
    _build array color compression extension image protobuf tokenizers/ window
"""
