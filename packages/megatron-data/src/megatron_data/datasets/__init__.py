"""Samples for training.

`gpt` cuts samples out of a token source along an order, `masks` finds document boundaries,
`blended` mixes datasets, `split` and `paths` read Megatron's `--split` and `--data-path`,
`build` puts them together, `mock` makes data up.
"""
