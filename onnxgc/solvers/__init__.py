"""Solvers: searches for plans, with one signature and one explicit registry."""
