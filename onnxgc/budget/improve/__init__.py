"""Moves that shorten a sequence within its memory budget."""
