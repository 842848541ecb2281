"""Families of published models: mappings of their weights and configurations to ours.

Other distributions find them through the entry-point group ``megatron.families``; each entry is a
`Family`. Importing this package does not import torch.
"""
