"""The configuration of a run, and the flags, YAML files and reference page made from it."""
