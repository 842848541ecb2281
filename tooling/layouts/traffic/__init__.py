"""Counts what a training step communicates on every rank, and compares it with formulas.

    python -m layouts.traffic [--write docs/parallelism.md]

`Mesh.counting` counts whole steps of megatron-train. The formulas do not depend on the
implementation: they are arithmetic on the sizes of the model, the batch and the layout. The section
"Communication" of `docs/parallelism.md` derives them.
"""
