"""Literal shapes rewritten for another batch size or other input sizes."""
