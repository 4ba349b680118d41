"""Grammars of constrained outputs: what one may cost, on either side."""

import threading
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 128 << 10  # as executors get it, which may be longer than what a caller sent
MAX_PROBLEM_BYTES = 200  # of what an executor says of a row that cannot keep to its grammar

# A router refuses a grammar that passes them when it is built; an executor ends the request where a
# step does, after about 7 ms of one core.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
STACK_BYTES = (
    256 << 20
)  # it takes about 32 MiB for the 7,000 rules, each of the next, that 64 KiB have


def new_grammar_thread() -> ThreadPoolExecutor:
    """Returns a thread to build grammars on, with room for how llguidance recurs along their rules.

    Where a stack of the usual size ends, the process does.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int).result()  # which starts it
    finally:
        threading.stack_size(before)
    return pool
