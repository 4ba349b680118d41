"""GGUF file of a Qwen3-MoE checkpoint, for llama.cpp: the same bfloat16 weights, without a tokenizer.

    python -m tests.bench.peers.gguf_file CHECKPOINT FILE

Runs in llama.cpp's environment. Norms and routers become float32, as in llama.cpp's own converter.

Source: llama.cpp, convert_hf_to_gguf.py, Qwen2MoeModel and Qwen3MoeModel.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

ARCHITECTURE = "qwen3moe"
PROJECTIONS = ("gate", "up", "down")


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns bfloat16 tensors as uint16."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_size = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + header_size].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", entry
            begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], "<u2").reshape(entry["shape"])
    return tensors


def add_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def convert(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = read_safetensors(checkpoint / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        for projection in PROJECTIONS:
            parts = [
                tensors.pop(f"{prefix}.{expert}.{projection}_proj.weight")
                for expert in range(config["num_local_experts"])
            ]
            tensors[f"{prefix}.{projection}_proj.weight"] = np.stack(parts)

    names = get_tensor_name_map(MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    writer = GGUFWriter(path, ARCHITECTURE)
    add_settings(writer, config)
    for name, tensor in tensors.items():
        new_name = names.get_name(name, try_suffixes=(".weight",))
        assert new_name is not None, name
        if tensor.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(new_name, (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(new_name, raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
