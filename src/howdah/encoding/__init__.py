"""Converts Python values to JSON, COPY lines and checked arguments. No I/O."""
