"""Functions identified by their float64 values."""
