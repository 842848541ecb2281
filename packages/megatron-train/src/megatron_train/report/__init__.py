"""``megatron-train report RUN``: one HTML page of what a run has recorded."""
