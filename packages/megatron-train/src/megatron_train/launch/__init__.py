"""Starts several ranks on this machine from one command and supervises them until all have ended.

`launch` starts the ranks and reports a failure in one line. Nothing here imports torch. Only
`link`, `output` and `error_file` run inside a rank.
"""
