"""The commands. A module is named after its command, or holds a few related ones."""
