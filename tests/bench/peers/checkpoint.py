"""Checkpoint that all peers load: the random Qwen3-MoE of bench_cpu_model, with a made-up tokenizer.

    python -m tests.bench.peers.checkpoint FOLDER

Each token is a word of ASCII: servers spell their answers out as they always do.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.bench.executor.bench_cpu_model import make_checkpoint
from tests.bench.peers.workload import VOCAB_SIZE


def save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"w{number:05}" for number in range(len(letters), VOCAB_SIZE))]
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_checkpoint(folder)
    save_tokenizer(folder)
