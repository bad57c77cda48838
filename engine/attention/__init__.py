"""Paged attention over a ragged batch: one signature, several backends."""
