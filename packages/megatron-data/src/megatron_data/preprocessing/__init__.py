"""From JSON lines to an indexed dataset.

`chunks` reads sources and cuts them at line ends, `encoding` turns a chunk into tokens, `pool`
maps chunks over processes and keeps their order, `manifest` records what was done, `pipeline`
joins them.
"""
