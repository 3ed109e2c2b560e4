"""Whether llguidance compiles a grammar: a script, run by its path, since not every grammar ends well.

Some hundred bytes of intersected patterns take it hours, some ten thousand of chained terminals overflow its
stack. So this is a process, which the kernel ends when it has had its time, and whose end harms nobody.
The grammar comes by stdin; what is wrong with it leaves by stdout, nothing if it is right.
"""

from __future__ import annotations

import resource
import sys
import threading

from llguidance import LLMatcher, LLTokenizer

CPU_SECONDS = 2
"""What is as long as it may be takes 0.1 to 0.45 s, 0.06 s of them Python's start: see `constraint.py`."""
MEMORY = 4 << 30
"""Bytes of address space, most of it never touched."""
STACK = 1 << 20
"""Bytes, below what any thread of an engine has: what fits here overflows no stack there."""


STEPS = 64
"""Bytes of the texts that are tried: the first and the last that a grammar allows in each place."""


def problem(grammar: str) -> str:
    """What llguidance says against it. A tokenizer of bytes stands for the model's: a matcher is more than
    a grammar that was read, and some are found too large only when it is made, or when a text begins."""
    bytes_ = LLTokenizer("byte")
    made = LLMatcher(bytes_, grammar, log_level=0)
    for last in (False, True):
        matcher = made.deep_copy()
        for _ in range(STEPS):
            if matcher.is_error():
                return matcher.get_error()
            allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << bytes_.eos_token)
            if not allowed:
                break
            matcher.consume_token((allowed if last else allowed & -allowed).bit_length() - 1)
    return matcher.get_error()


def main() -> None:
    # Before the hard limit, which kills: so who sees a SIGKILL knows that it came from elsewhere.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.buffer.read().decode()
    threading.stack_size(STACK)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(problem(grammar)))
    thread.start()
    thread.join()
    sys.stdout.buffer.write(said[0].encode())  # after an exception there is none: that is no approval


if __name__ == "__main__":
    main()
