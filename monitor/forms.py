"""Placeholder while the real one is being written."""
