"""Connections: the stores that run statements, the listener, migrations and grants. No other package imports
drivers."""
