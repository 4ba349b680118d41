"""What tells two checkpoints apart without reading their weights."""

import hashlib
import json
from pathlib import Path


def fingerprint(model: Path) -> str:
    """Returns SHA-256 (hex) over the configuration and every tensor's name, shape and data type.

    How tensors are spread over files does not matter. Values are not read, so a fine-tuned copy
    has its original's fingerprint.

    Args:
        model: Folder of a Hugging Face checkpoint that loads.
    """
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([config, tensors], sort_keys=True).encode()).hexdigest()
