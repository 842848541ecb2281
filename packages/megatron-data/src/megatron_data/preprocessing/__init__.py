"""From text to an indexed dataset, and from datasets to others.

`encoding` turns a chunk of a source into tokens, `parts` keeps finished chunks, `pool` maps chunks
over processes in order, `assembly` copies all parts into a dataset, `pipeline` joins these.
`manifest` records what was done, `origins` where it came from, which `tracing` looks up; `joining`
merges and splits datasets.
"""
