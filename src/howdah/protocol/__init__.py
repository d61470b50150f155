"""Turns calls into SQL statements, and their rows into Python values. No I/O."""
