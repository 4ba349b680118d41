"""What is known of the model served. Data only; the executors tell it, the router passes it on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as every executor described it.

    Attributes:
        name: What a request's `model` may say.
        architecture: First entry of `architectures` in the checkpoint's config.json.
        fingerprint: Of configuration and tensors; equal on equal checkpoints.
        vocab_size: Token ids are 0 to vocab_size - 1.
        max_model_len: Prompt and output tokens of one sequence together.
        eos_token_ids: Tokens that end an output unless a request ignores them.
    """

    name: str
    architecture: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an output token."""
        return self.max_model_len - 1
