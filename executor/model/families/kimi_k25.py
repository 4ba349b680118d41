"""Kimi-K2.5 and later: a DeepSeek-V3 for text; what reads images and videos stays unread.

Source: vLLM, transformers_utils/configs/kimi_k25.py; Transformers, models/kimi_k25, conversion_mapping.py.
"""

from dataclasses import replace

from executor.model.decoder.decoder import Tensors
from executor.model.decoder.fields import Fields
from executor.model.families import deepseek
from executor.model.spec import ModelSpec

UNREAD = ("vision_tower.", "mm_projector.")

_OF_IMAGES = (
    "vision_config",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
)
# Written into text_config by releases before Transformers 5, at their defaults: of sampling, of
# encoders, of classification heads and of classes' bookkeeping.
_OF_BASE_CLASS = (
    *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty"),
    *("do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "forced_bos_token_id"),
    *("exponential_decay_length_penalty", "forced_eos_token_id", "length_penalty", "max_length"),
    *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "suppress_tokens"),
    *("num_return_sequences", "remove_invalid_values", "repetition_penalty", "temperature"),
    *("return_dict_in_generate", "top_k", "top_p", "typical_p", "output_scores"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16"),
    *("finetuning_task", "id2label", "label2id", "prefix", "problem_type", "sep_token_id"),
    *("task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "chunk_size_feed_forward"),
)


def read(fields: Fields) -> ModelSpec:
    fields.ignore("ignore_index", *_OF_IMAGES)
    shared = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    text = fields.nested("text_config", beside=shared)
    text.ignore(*_OF_BASE_CLASS)
    text.refuse(
        {
            "architectures": (["DeepseekV3ForCausalLM"],),
            "num_nextn_predict_layers": (0,),
            "tie_word_embeddings": (False,),
            "add_cross_attention": (False,),
            "cross_attention_hidden_size": (),
            "is_decoder": (False,),
            "pruned_heads": ({},),
        }
    )
    return replace(deepseek.read(text), architecture=fields.architecture())


def tensors(spec: ModelSpec) -> Tensors:
    return "language_model.{}".format
