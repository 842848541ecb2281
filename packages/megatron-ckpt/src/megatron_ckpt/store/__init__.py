"""The checkpoint store: saving, finding and loading checkpoints on disk."""
