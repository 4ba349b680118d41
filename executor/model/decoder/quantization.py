"""Quantisation of a checkpoint: the quantization_config of its config.json, all unknown refused.

quant_method         tensors                               dequantised at load as
fp8                  weight, weight_scale_inv              FP8 E4M3, a scale per block of a matrix
mxfp4                ..._blocks, ..._scales                MXFP4 of gpt-oss
compressed-tensors   weight_packed, weight_scale, _shape   INT4, a scale per group of a row
compressed-tensors   weight, weight_scale                  FP8 E4M3, a scale per row
compressed-tensors   weight_packed, weight_scale, _global  NVFP4, a scale per 16 of a row and one of all
modelopt             weight, weight_scale, _scale_2        NVFP4, likewise

Which modules are quantised is read off their tensors, not off the lists of modules in it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from executor.errors import CheckpointError
from executor.model.weights import Format
from executor.model.weights.formats import (
    Fp8Format,
    Fp8RowFormat,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    Nvfp4PackedFormat,
)

_Error = Callable[[str], CheckpointError]
_Known = Mapping[str, tuple[Any, ...] | None]  # by field, values that fit; None: all do

_LISTS: _Known = dict.fromkeys(
    ("quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")
)
_FP8: _Known = {
    **_LISTS,
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "expert_dtype": ("fp8",),
    "scale_fmt": ("float", "ue8m0"),
    "weight_block_size": None,
}
_COMPRESSED: _Known = {
    **dict.fromkeys(
        ("quant_method", "version", "ignore", "global_compression_ratio", "dequantize")
    ),
    "format": ("pack-quantized", "float-quantized", "nvfp4-pack-quantized"),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (),
    "sparsity_config": ({},),
    "transform_config": ({},),
    "config_groups": None,
}
_GROUP: _Known = {
    "targets": (["Linear"],),
    "format": ("pack-quantized",),
    "input_activations": (),
    "output_activations": (),
    "weights": None,
}
_FP8_GROUP: _Known = {**_GROUP, "format": ("float-quantized",), "input_activations": None}
_NUMBERS: _Known = {
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
    "symmetric": (True,),
    "actorder": (False, "weight", "static"),  # an order of quantising, which groups do not follow
    "block_structure": (),
}
_INT4: _Known = {
    **_NUMBERS,
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": None,
    "dynamic": (False,),
}
_FP8_ROWS: _Known = {
    **_NUMBERS,
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("channel",),
    "group_size": (),
    "dynamic": (False,),
}
_FP4: _Known = {
    **_NUMBERS,
    "num_bits": (4,),
    "type": ("float",),
    "strategy": ("tensor_group",),
    "group_size": (16,),
    "dynamic": (False, "local"),
}
_FP4_GROUP: _Known = {**_GROUP, "format": ("nvfp4-pack-quantized",), "input_activations": None}
_MODELOPT: _Known = {
    **dict.fromkeys(("quant_method", "producer", "ignore", "exclude_modules")),
    **dict.fromkeys(("kv_cache_scheme", "kv_cache_quant_algo")),  # KV stays as it is computed
    "quant_algo": ("NVFP4",),
    "group_size": (16,),
    "config_groups": None,
}
# Of activations, which kernels may quantise as they run, and nothing here does.
_FP8_TOKENS: _Known = {**_FP8_ROWS, "strategy": ("token",), "dynamic": (True,)}


def read_quantization(config: Any, error: _Error) -> Format | None:
    """Returns the format of a checkpoint's quantised weights; None if it has none.

    Args:
        config: The quantization_config of its config.json, None without.
        error: Makes an error that names the file.

    Raises:
        CheckpointError: It is a format that cannot be dequantised, or has an unknown field.
    """
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or method not in [*_READERS]:
        raise error(
            f"quantization_config: quant_method={method!r} is not supported; "
            f"{', '.join(_READERS)} are"
        )
    return _READERS[method](config, error)


def _fp8(config: dict[str, Any], error: _Error) -> Format:
    _check(config, _FP8, error)
    size = config.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
        raise error(
            f"quantization_config: weight_block_size={size!r} is not supported; square blocks, as "
            f"[128, 128], are"
        )
    return Fp8Format(_positive("weight_block_size", size[0], 1, error))


def _mxfp4(config: dict[str, Any], error: _Error) -> Format:
    _check(config, _LISTS, error)
    return Mxfp4Format()


def _compressed(config: dict[str, Any], error: _Error) -> Format:
    _check(config, _COMPRESSED, error)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise error(f"quantization_config: config_groups={groups!r} is not supported; one group is")
    [group] = groups.values()
    of_group, of_weights, of_activations = {
        "float-quantized": (_FP8_GROUP, _FP8_ROWS, _FP8_TOKENS),
        "nvfp4-pack-quantized": (_FP4_GROUP, _FP4, _FP4),
    }.get(config.get("format", ""), (_GROUP, _INT4, _INT4))
    _check(group, of_group, error)
    if group.get("input_activations") is not None:
        _check(group["input_activations"], of_activations, error)
    weights = group.get("weights")
    _check(weights, of_weights, error)
    for name in ("num_bits", "strategy"):
        if weights.get(name) is None:
            raise error(f"quantization_config: {name} is missing in weights={weights!r}")
    if of_weights is _FP8_ROWS:
        return Fp8RowFormat()
    if of_weights is _FP4:
        return Nvfp4PackedFormat()
    return Int4Format(_positive("group_size", weights.get("group_size"), 8, error))


def _modelopt(config: dict[str, Any], error: _Error) -> Format:
    _check(config, _MODELOPT, error)
    if config.get("quant_algo") is None:
        raise error("quantization_config: quant_algo is missing; NVFP4 is supported")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise error(f"quantization_config: config_groups={groups!r} is no object")
    for group in groups.values():
        _check(group, {**_FP4_GROUP, "format": ()}, error)
        for name in ("weights", "input_activations"):
            _check(group.get(name) or {}, _FP4, error)
    return Nvfp4Format()


_READERS: Mapping[str, Callable[[dict[str, Any], _Error], Format]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}


def _check(section: Any, known: _Known, error: _Error) -> None:
    if not isinstance(section, dict):
        raise error(f"quantization_config: {section!r} is no object")
    for name, value in section.items():
        if name not in known:
            raise error(
                f"quantization_config: {name}={value!r} is not known here; it may change the numbers"
            )
        values = known[name]
        if values is not None and value is not None and value not in values:
            fits = " or ".join(map(repr, values)) or "leaving it out"
            raise error(f"quantization_config: {name}={value!r} is not supported; {fits} is")


def _positive(name: str, value: Any, unit: int, error: _Error) -> int:
    if not isinstance(value, int) or value < 1 or value % unit:
        raise error(f"quantization_config: {name}={value!r} is no multiple of {unit}")
    return value
