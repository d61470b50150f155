"""For processes under libfaketime, whose version 0.9.10 breaks `time.sleep`: with a monotonic clock that is
left alone it still takes the clock's error off the moment to sleep until, and gets an invalid one."""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]
