"""DeepSeek-V2, V2-Lite, V3, R1, V3.1 and Kimi-K2's text model: latent attention, shared experts.

Source: Transformers, models/deepseek_v2/modeling_deepseek_v2.py, deepseek_v3/modeling_deepseek_v3.py.
"""

from executor.model.decoder.config import (
    read_experts,
    read_layers,
    read_model,
    read_mscale,
    read_num_layers,
    read_num_mtp_layers,
    read_rope,
    read_rope_fields,
    read_sigmoid_router,
    with_shared,
    yarn_mscale,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import (
    GroupScore,
    MlaSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    Yarn,
)


def read(fields: Fields) -> ModelSpec:
    fields.refuse({"moe_layer_freq": (1,), "mlp_bias": (False,)})
    router = (
        _softmax(fields)
        if fields.architecture() == "DeepseekV2ForCausalLM"
        else read_sigmoid_router(fields)
    )
    num_dense = fields.integer("first_k_dense_replace", default=0)
    num_layers = read_num_layers(fields)
    sparse = [layer_id >= num_dense for layer_id in range(num_layers)]
    return read_latent_model(fields, router, sparse)


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()


def read_latent_model(
    fields: Fields, router: RouterSpec, sparse: list[bool], *, norm_eps: float = 1e-6
) -> ModelSpec:
    """Returns a model with latent attention and experts, its draft layers with experts, too.

    Args:
        fields: Of config.json.
        router: Choice of experts.
        sparse: Of each layer, whether it has experts.
        norm_eps: Where the file does not say.

    Raises:
        CheckpointError: A field is missing, or says what is not supported.
    """
    fields.ignore("ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim", "num_key_value_heads")
    fields.ignore("head_dim")  # of the rope, as Transformers writes it
    fields.refuse({"rope_interleave": (True,)})
    rope = read_rope(fields, fields.integer("qk_rope_head_dim", least=2))
    experts = with_shared(fields, read_experts(fields, router))
    sparse = [*sparse, *[True] * read_num_mtp_layers(fields)]
    layers = read_layers(fields, read_latent_attention(fields, rope), experts, sparse)
    num_layers = read_num_layers(fields)
    return read_model(
        fields, layers[:num_layers], (rope,), norm_eps=norm_eps, mtp_layers=layers[num_layers:]
    )


def read_latent_attention(fields: Fields, rope: RopeSpec) -> MlaSpec:
    """Returns attention over one latent. Its norms have an epsilon of their own, 1e-6.

    Source: Transformers, DeepseekV3Attention.__init__ and yarn_apply_mscale.
    """
    nope, rope_dim = fields.integer("qk_nope_head_dim", least=1), rope.rotary_dim
    scale = (nope + rope_dim) ** -0.5
    mscale = read_mscale(read_rope_fields(fields), "mscale_all_dim")
    if isinstance(rope.scaling, Yarn) and mscale:
        scale *= yarn_mscale(rope.scaling.factor, mscale) ** 2
    q_lora_rank = fields.integer("q_lora_rank", default=0)
    return MlaSpec(
        num_heads=fields.integer("num_attention_heads", least=1),
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=fields.integer("kv_lora_rank", least=1),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim", least=1),
        rope=0,
        scale=scale,
        bias=fields.flag("attention_bias"),
    )


def _softmax(fields: Fields) -> RouterSpec:
    """Returns V2's router, which renormalises nothing."""
    kinds = ("greedy", "group_limited_greedy")
    fields.refuse({"scoring_func": ("softmax",), "topk_method": kinds, "norm_topk_prob": (False,)})
    is_grouped = fields.get("topk_method", default="greedy") == "group_limited_greedy"
    absent = None if is_grouped else 1
    groups = fields.integer("n_group", default=absent, least=1)
    kept = fields.integer("topk_group", default=absent, least=1)
    return RouterSpec(
        num_groups=groups if is_grouped else 1,
        num_kept_groups=kept if is_grouped else 1,
        group_score=GroupScore.MAX,
        renormalise=False,
        factor=fields.number("routed_scaling_factor", default=1.0),
        in_float32=True,
    )
