"""Codecs: inspecting, decoding and encoding the values of fields.

Each imports only those on lines below its own:

    frames guess sound
    media
    masks packed_images perceptual probes
    crop damage mp4 pixels
    boxes header jpeg media_info unpack
    _build array color compression extension image protobuf tokenizers/ window
"""
