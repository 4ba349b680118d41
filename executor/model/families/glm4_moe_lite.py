"""GLM-4.7-Flash: DeepSeek-V3's layers, dense or sparse as a list says.

Source: Transformers, models/glm4_moe_lite/modeling_glm4_moe_lite.py.
"""

from executor.model.decoder.config import read_num_layers, read_sigmoid_router
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.families.deepseek import read_latent_model
from executor.model.spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    num_layers = read_num_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", default=1)
    by_default = ["dense" if i < num_dense else "sparse" for i in range(num_layers)]
    kinds = fields.kinds("mlp_layer_types", ("dense", "sparse"), by_default)
    sparse = [kind == "sparse" for kind in kinds]
    return read_latent_model(fields, read_sigmoid_router(fields), sparse, norm_eps=1e-5)


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()
