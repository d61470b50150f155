"""One adapter for each peer. Each runs in its own process and its own environment."""
