"""What a training step communicates, counted and by formula, on every rank.

    python -m layouts.traffic [--write docs/parallelism.md]

Counted by `Mesh.counting` around whole steps of megatron-train. The formulas know nothing of how
the code goes about it: they are arithmetic on the sizes of the model, the batch and the layout.
Their derivation is the section "Communication" of `docs/parallelism.md`.
"""
