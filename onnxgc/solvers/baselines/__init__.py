"""Published and reference methods to compare with."""
