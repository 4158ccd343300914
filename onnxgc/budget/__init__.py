"""Search for sequences of least extra time under a memory budget, and lower bounds."""
