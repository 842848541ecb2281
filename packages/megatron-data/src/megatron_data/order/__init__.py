"""Which tokens make up which sample.

`spans` states what a dataset asks of an order, `compat` builds Megatron's document, sample and
shuffle indices, `blend` its mixing of several datasets, `cache` keeps built indices on disk.
"""
