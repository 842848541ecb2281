"""Families of published models: how their weights and configurations map to ours.

Other distributions find them through the entry-point group ``megatron.families``; each entry is a
`Family`. Nothing here imports torch.
"""
