"""The upper bound of `bare.py` with two connections: the next claim is in flight while a batch is completed."""

from __future__ import annotations

from bench.adapters import driver
from bench.adapters.bare import Bare


class Pipelined(Bare):
    """Claims on one connection, completes on the other."""

    pipelined = True


if __name__ == "__main__":
    driver.main(Pipelined)
