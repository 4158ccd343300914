"""Lower bounds on extra time and on the peak."""
