"""Dry runs of jobs on an imagined GPU, against a committed table (`nox -s device`)."""
