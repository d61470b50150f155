"""Connections: the stores that run statements, the listener, migrations and grants. Only here are drivers imported."""
