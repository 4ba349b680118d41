"""Text of requests and outputs: tokenizer, detokenizer, stop strings."""
