"""The `.bin`/`.idx` pair that Megatron reads and writes, byte for byte.

`format` knows the layout, `reader` maps a pair into memory, `builder` writes one atomically.
"""
