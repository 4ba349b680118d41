"""Grammars of constrained outputs: what one may cost, on either side."""

import threading
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 128 << 10  # as executors get it, which may be longer than what a caller sent
MAX_PROBLEM_BYTES = 200  # of what an executor says of a row that cannot keep to its grammar

# An executor ends the request that passes one of these in a step, or when its grammar is built.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
MAX_ACCEPT_S = 0.01  # of one core, to read the tokens of a step
MAX_READ_S = (
    0.5  # likewise, all that a row has where it begins anew: 100,000 tokens of JSON take 0.06
)
MAX_WAIT_S = 1.0  # that an executor's step waits for a grammar, on a machine that is slower or busy

# Of one core, from a grammar's text to its first masks. A router refuses what takes longer, and before
# that what llguidance has no limit for: the time for `multipleOf` grows with the square of the number.
MAX_BUILD_S = 0.05
MAX_MULTIPLES = 10_000  # the sum of all, without their decimal points

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
