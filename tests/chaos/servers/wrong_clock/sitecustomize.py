"""For processes under libfaketime: version 0.9.10 breaks `time.sleep`. Although it does not fake the monotonic clock,
it subtracts the clock's error from the time to sleep until, and the result is invalid."""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]
