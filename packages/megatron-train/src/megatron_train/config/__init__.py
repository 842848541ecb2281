"""The configuration of a run, and the flags, YAML files and reference made from it."""
