"""Tasks: what a run trains, its samples, losses and denominators, behind one interface."""
