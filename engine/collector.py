"""Python's garbage collector in processes that answer."""

import gc


def spare_collector() -> None:
    """Leave what has been made so far out of every collection from now on.

    After the start of a process this is a million objects of libraries, which stay. A full collection goes
    through all of them and stops every thread for it: more than half a second in which no step begins
    and no token leaves.
    """
    gc.collect()
    gc.freeze()
