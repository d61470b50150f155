"""Python values as JSON, COPY lines and checked arguments. No I/O."""
