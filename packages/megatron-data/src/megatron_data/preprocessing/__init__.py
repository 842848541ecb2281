"""From text to an indexed dataset.

`encoding` turns a chunk of a source into tokens, `pool` maps chunks over processes and keeps their
order, `manifest` records what was done, `pipeline` joins them.
"""
