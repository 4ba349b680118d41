"""Training of the demo models: a small Qwen3-MoE and a DeepSeek-V3 that add, reverse and sort.

    python -m deploy.demo_model.training.train_demo_model --out deploy/demo_model
    python -m deploy.demo_model.training.train_demo_model --family deepseek_v3 --bfloat16 \\
        --steps 2000 --out deploy/demo_model_mla

Forty minutes on one core, or twenty. The model reads bytes (id = byte + 3), so it needs no
vocabulary, and its answers can be checked, so that a fault in what serves it shows as a wrong sum.
"""

import argparse
import copy
import json
import logging
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from deploy.local.demo_tasks import (
    FIRST_BYTE_ID,
    STOP_ID,
    TRAINING_MIX,
    Kind,
    draw_problem,
    problems,
    solved_lines,
    text_of,
    token_ids,
)

logger = logging.getLogger("train_demo_model")

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 264  # 3 + 256, rounded up to a multiple of 8
TOKENS_PER_STEP = 3072
PEAK_LR = 3e-3
BALANCE_WEIGHT = 0.01  # of the loss that evens out a Qwen3-MoE's experts
BALANCE_STEP = 1e-3  # by which a DeepSeek-V3's correction biases move
LONG_CONTEXT = 300
CHECK_SEED = 1_000_003  # no step trains with it


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the training with rows of its own."""

    name: str
    until: float
    """Where it ends, as a fraction of all steps."""

    row_lens: tuple[int, ...]
    """Tokens in a row. A step draws one of them, and has as many rows as fit its tokens."""

    even_lengths: bool = False


# Short rows are the fastest way to learn the tasks; without the long ones, the answers go wrong
# after some hundred tokens. Even operand lengths mend sums such as 503+7.
PHASES = (
    Phase("short rows", 0.40, (96,)),
    Phase("rows of 384", 0.60, (96, 384)),
    Phase("rows of 512", 0.70, (96, 512)),
    Phase("even operand lengths", 1.00, (96, 96, 512), even_lengths=True),
)


DemoModel: TypeAlias = Qwen3MoeForCausalLM | DeepseekV3ForCausalLM

SHARED_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def build_qwen3_moe() -> Qwen3MoeForCausalLM:
    """Builds the untrained Qwen3-MoE in float32."""
    shape = {
        **SHARED_SHAPE,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "head_dim": 128,  # read by the model, not declared by its config
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))


def build_deepseek_v3() -> DeepseekV3ForCausalLM:
    """Builds the untrained DeepSeek-V3 in float32."""
    shape = {
        **SHARED_SHAPE,
        "intermediate_size": 384,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape))


FAMILIES = {"qwen3_moe": build_qwen3_moe, "deepseek_v3": build_deepseek_v3}


def move_biases(
    router: DeepseekV3TopkRouter, _: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Moves the biases of experts with less than the mean load up, and of those with more down.

    A forward hook of a router: its third output are the chosen experts.

    Source: DeepSeek-V3's technical report, section 2.1.2.
    """
    if not torch.is_grad_enabled():
        return  # a check
    load = torch.bincount(output[2].flatten(), minlength=router.num_experts).float()
    router.e_score_correction_bias += BALANCE_STEP * torch.sign(load.mean() - load)


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal.

    A 3-D parameter is a stack of matrices, as the experts of a layer are; torch.optim.Muon takes
    no such stacks.

    Source: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks"; the scale by
    the larger dimension is from Liu et al., "Muon is scalable for LLM training", section 2.2.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                state["average"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(state["average"], group["momentum"])
                scale = 0.2 * max(param.shape[-2:]) ** 0.5
                param.add_(orthogonal(update), alpha=-group["lr"] * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Returns the nearest orthogonal matrices, roughly: singular values end between 0.7 and 1.2.

    Source: the quintic Newton-Schulz iteration of Muon, with its coefficients.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def make_optimizers(model: nn.Module, lr: float = PEAK_LR) -> list[torch.optim.Optimizer]:
    """Gives the matrices to Muon, and embeddings, head, routers and norms to AdamW."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, param in model.named_parameters():
        is_matrix = param.dim() >= 2 and not any(
            part in name for part in ("embed_tokens", "lm_head", "mlp.gate.")
        )
        (matrices if is_matrix else others).append(param)
    return [
        Muon(matrices, lr=lr),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Moves the parameters by their gradients, of norm 1 at most, and clears these."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def learning_rate(progress: float) -> float:
    """Rises over 2 % of the steps, stays to 55 %, and falls in a line to 2 % of its peak."""
    fall = 1 - 0.98 * max(0.0, progress - 0.55) / 0.45
    return PEAK_LR * min(1.0, (progress + 1e-3) / 0.02, fall)


def draw_row(rng: random.Random, row_len: int, even_lengths: bool) -> tuple[list[int], list[bool]]:
    """Packs solved problems into a row.

    Returns:
        row_len + 1 ids, and for each whether it belongs to an answer or ends one.
    """
    ids: list[int] = []
    is_answer: list[bool] = []
    # Most rows begin as prompts do; some as a client's do that leaves the newline out or has
    # a begin-of-text id.
    (opening,) = rng.choices(("newline", "bare", "bos", "bos newline"), (14, 2, 1, 1))
    while len(ids) <= row_len:
        problem = draw_problem(rng, TRAINING_MIX, held_out=False, even_lengths=even_lengths)
        # Each prompt begins with the newline that ends the answer before it.
        prompt, answer = token_ids(problem.prompt), token_ids(problem.answer)
        is_answer += [bool(ids)] + [False] * (len(prompt) - 1) + [True] * len(answer)
        ids += prompt + answer
    if opening == "bare":
        del ids[0], is_answer[0]
    elif opening == "bos":
        ids[0] = BOS_ID
    elif opening == "bos newline":
        ids.insert(0, BOS_ID)
        is_answer.insert(0, False)
    ids, is_answer = ids[: row_len + 1], is_answer[: row_len + 1]
    padding = row_len + 1 - len(ids)
    return ids + [PAD_ID] * padding, is_answer + [False] * padding


def train_step(
    model: DemoModel, rng: random.Random, phase: Phase, use_bfloat16: bool
) -> torch.Tensor:
    """Runs a batch forward and backward.

    Returns:
        The mean loss of the answer bytes, without gradient.
    """
    row_len = rng.choice(phase.row_lens)
    num_rows = TOKENS_PER_STEP // row_len
    rows = [draw_row(rng, row_len, phase.even_lengths) for _ in range(num_rows)]
    ids = torch.tensor([row for row, _ in rows])
    is_answer = torch.tensor([flags for _, flags in rows])[:, 1:]
    has_balance_loss = isinstance(model, Qwen3MoeForCausalLM)  # the other has biases instead
    with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16):
        output = model.model(ids[:, :-1], use_cache=False, output_router_logits=has_balance_loss)
        logits = model.lm_head(output.last_hidden_state[is_answer])
    loss = F.cross_entropy(logits.float(), ids[:, 1:][is_answer])
    balance = 0.0
    if has_balance_loss:
        balance = load_balancing_loss_func(
            output.router_logits, model.config.num_experts, model.config.num_experts_per_tok
        )
    torch.autograd.backward(loss + BALANCE_WEIGHT * balance)
    return loss.detach()


def train(model: DemoModel, num_steps: int, seed: int, out: Path, use_bfloat16: bool) -> None:
    """Trains the model through all phases, and writes it to `out` at every check."""
    optimizers = make_optimizers(model)
    start, loss_sum, check_every = time.process_time(), 0.0, 250
    for module in model.modules():
        if isinstance(module, DeepseekV3TopkRouter):
            module.register_forward_hook(move_biases)
    for step in range(num_steps):
        progress = step / num_steps
        phase = next(phase for phase in PHASES if progress < phase.until)
        rng = random.Random(f"{seed} {step}")
        loss_sum += float(train_step(model, rng, phase, use_bfloat16))
        update(model, optimizers, learning_rate(progress))
        if (step + 1) % 50 == 0:
            spent, loss, loss_sum = time.process_time() - start, loss_sum / 50, 0.0
            logger.info("step %d, %.0f CPU s, loss %.4f, %s", step + 1, spent, loss, phase.name)
        if (step + 1) % check_every == 0 and step + 1 < num_steps:
            save(model, out)
            log_scores(model, count=200)


@torch.inference_mode()
def answer(model: DemoModel, prompts: Sequence[str]) -> list[str]:
    """Completes the prompts greedily, in batches with padding at the left."""
    completions: list[str] = []
    for start in range(0, len(prompts), 50):
        rows = [token_ids(prompt) for prompt in prompts[start : start + 50]]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows])
        output = model.generate(
            ids,
            attention_mask=(ids != PAD_ID).long(),
            generation_config=generation_config(max_new_tokens=14),
        )
        for row in cast(torch.Tensor, output)[:, width:].tolist():
            completions.append(text_of(row))
    return completions


def log_scores(model: DemoModel, count: int) -> None:
    """Counts right answers of the model as it is written, to problems that it has not seen.

    A quarter of them is asked again after `LONG_CONTEXT` tokens of other problems.
    """
    served = as_bfloat16(model)
    for kind in Kind:
        mix = (float(kind is Kind.ADD), float(kind is Kind.REV), float(kind is Kind.SORT))
        for context_tokens, num_asked in ((0, count), (LONG_CONTEXT, count // 4)):
            asked = list(problems(CHECK_SEED, num_asked, mix))
            prompts = [
                solved_lines(CHECK_SEED + i, context_tokens) + problem.prompt
                for i, problem in enumerate(asked)
            ]
            wrong = [
                problem.prompt[1:] + completion.rstrip("\n\0")
                for problem, completion in zip(asked, answer(served, prompts), strict=True)
                if not problem.is_answered_by(completion)
            ]
            score = f"{num_asked - len(wrong)} of {num_asked}"
            logger.info("%s after %d: %s, wrong: %s", kind.value, context_tokens, score, wrong[:6])


def as_bfloat16(model: DemoModel) -> DemoModel:
    """Returns a copy as it is written and served."""
    copied = copy.deepcopy(model)
    copied.bfloat16()
    for served, trained in zip(copied.buffers(), model.buffers(), strict=True):
        served.data = trained.data.clone()  # correction biases and frequencies stay in float32
    return copied


def generation_config(max_new_tokens: int | None = None) -> GenerationConfig:
    """Greedy, to the newline that ends an answer or the end-of-text id."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=[STOP_ID, EOS_ID],
    )


def save(model: DemoModel, out: Path) -> None:
    """Writes weights, configuration and tokenizer in Hugging Face's format."""
    out.mkdir(parents=True, exist_ok=True)
    as_bfloat16(model).save_pretrained(out)
    generation_config().save_pretrained(out)
    save_tokenizer(out)


def save_tokenizer(out: Path) -> None:
    """Writes a tokenizer whose ids are the UTF-8 bytes + 3."""
    vocab = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    symbols = bytes_to_unicode()
    vocab |= {symbols[byte]: byte + FIRST_BYTE_ID for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        # A text that spells out a special token is text: every byte is its own id.
        "split_special_tokens": True,
        "model_max_length": 1024,
        # A problem per message; the newline before it ends the answer to the one before.
        "chat_template": (
            "{% for message in messages %}{% if message['role'] == 'user' %}{{ '\\n' }}"
            "{% endif %}{{ message['content'] }}{% endfor %}"
        ),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Trains, writes and measures the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=3200, help="training steps in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="problems of each kind at the end")
    parser.add_argument(
        "--bfloat16", action="store_true", help="multiply in bfloat16: faster on some CPUs"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = FAMILIES[args.family]()
    logger.info("%d parameters", sum(param.numel() for param in model.parameters()))
    train(model, args.steps, args.seed, args.out, args.bfloat16)
    save(model, args.out)
    log_scores(model, args.count)


if __name__ == "__main__":
    main()
