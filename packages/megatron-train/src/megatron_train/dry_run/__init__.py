"""One step of a run on some of its ranks, without devices, other ranks or values."""
