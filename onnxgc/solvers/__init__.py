"""Solvers: one search algorithm a file, one signature, one explicit registry."""
