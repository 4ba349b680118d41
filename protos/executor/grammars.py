"""Grammars of constrained outputs: what one may cost, on either side."""

from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 128 << 10  # as executors get it, which may be longer than what a caller sent
MAX_PROBLEM_BYTES = 200  # of what an executor says of a row that cannot keep to its grammar

# A router refuses a grammar that passes them when it is built; an executor ends the request where a
# step does, after about 7 ms of one core.
LIMITS = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
