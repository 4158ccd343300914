"""Which operators run when, and which run again: sequences under a memory budget, and bounds on them."""
