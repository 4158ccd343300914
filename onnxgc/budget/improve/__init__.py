"""Searches for shorter sequences within a memory budget."""
