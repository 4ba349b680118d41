"""Tokenizer of a checkpoint as grammars need it, and its digest."""

import hashlib
from pathlib import Path

import llguidance
import structlog
from llguidance import LLTokenizer

from executor.model.spec import ModelSpec

log = structlog.stdlib.get_logger(__name__)

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(folder: Path, spec: ModelSpec) -> LLTokenizer | None:
    """Returns the model's tokenizer; None, and a line in the log, where outputs cannot keep to grammars.

    Args:
        folder: Of the checkpoint.
        spec: The model.
    """
    try:
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        if not spec.eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, which ends such outputs")
        return LLTokenizer(text, n_vocab=spec.vocab_size, eos_token=list(spec.eos_token_ids))
    except (OSError, ValueError) as error:
        log.info("no_constraints", problem=str(error))
        return None


def grammar_digest(folder: Path) -> str:
    """Returns what executors must have alike to keep to a grammar alike."""
    file = folder / TOKENIZER_FILE
    digest = (
        hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no tokenizer.json"
    )
    return f"{llguidance.get_version()} {digest}"
