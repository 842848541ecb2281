"""The proof that a run's layout computes what one rank computes, on a shrunk copy of its model."""
