"""``megatron-train report RUN``: an HTML page with the records of a run."""
