"""The stepahead engine: one GPU, two halves and one loop.

The host half decides what runs next and never imports torch; the device half runs it. They meet
in `engine.plan`, and only `engine.engine` sees both.
"""
