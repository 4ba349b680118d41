"""Hands the log probabilities of a step's answer to the sequences that asked for them."""

from router.requests.request import TokenLogprob
from router.scheduling.step import RankBatch, RankResult


def hand_out_logprobs(batch: RankBatch, result: RankResult) -> None:
    """Appends to `prompt_logprobs` and `logprobs` of the sequences in ``batch.scorings``.

    A sequence that ended meanwhile drops them, as it drops the step's token.
    """
    position, top_position, first_tokens = 0, 0, None
    if result.num_next_tokens is not None:  # who is scored gains one token, others may gain more
        first_tokens = result.num_next_tokens.cumsum() - result.num_next_tokens
    for scoring in batch.scorings:
        num_top = scoring.sequence.request.output.top_logprobs
        token_ids = scoring.scored_ids.tolist()
        if scoring.sample_index is not None:
            place = scoring.sample_index
            place = place if first_tokens is None else int(first_tokens[place])
            token_ids.append(int(result.next_token_ids[place]))
        entries = []
        for token_id in token_ids:
            top = slice(top_position, top_position + num_top)
            logprob = float(result.logprobs[position])
            entries.append(
                TokenLogprob(token_id, logprob, result.top_ids[top], result.top_logprobs[top])
            )
            position, top_position = position + 1, top.stop
        if not scoring.sequence.is_ended:
            num_scored = len(scoring.scored_ids)
            scoring.sequence.prompt_logprobs += entries[:num_scored]
            scoring.sequence.logprobs += entries[num_scored:]
