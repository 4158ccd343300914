"""Typed figures of the commands, as `--json` writes them, and memory over a step."""
