"""The proof that every parallel layout trains the same model: `nox -s layouts`.

A small model that is symmetric in nothing is trained for 20 AdamW steps on one rank and in every
layout, by megatron-train's own engine, optimizer and trainer, in float64: rounding stays below
1e-12, so a difference of 1e-9 is a defect. `defects` is the list of those planted on purpose, to
show that the proof goes red. `traffic` counts what each layout communicates, beside formulas.
"""
