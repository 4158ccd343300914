"""The in-memory model, its weights, and small rewrites that every pass uses."""
