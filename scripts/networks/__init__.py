"""Definitions of the networks whose light graphs `scripts/build_models.py` writes."""
