"""The checks of a chaos run, one module per group of promises."""
