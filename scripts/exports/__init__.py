"""Exporters of models that people train, into a folder outside of the repository."""
