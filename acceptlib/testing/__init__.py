"""Checks for those who call acceptlib and those who extend it."""
