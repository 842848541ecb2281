"""Several ranks on this machine from one command, watched until the last one has ended.

`launch` starts the ranks and says in one line what went wrong; nothing here imports torch, and
nothing but `link` runs inside a rank.
"""
