"""Proves that every parallel layout trains the same model: `nox -s layouts`.

Trains a small model without symmetries for 20 AdamW steps on one rank and in every layout, with
megatron-train's own engine, optimizer and trainer, in float64. Rounding stays below 1e-12, so a
difference of 1e-9 is a defect. `defects` plants defects to show that the proof can fail. `traffic`
counts what each layout communicates and compares it with formulas.
"""
