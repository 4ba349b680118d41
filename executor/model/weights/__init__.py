"""Weights: safetensors files streamed into a model's parameters.

checkpoint   tensors of a folder, by their names
formats      numbers of fewer bits, dequantised as they are read
kept         the same, kept as they are
targets      what fills which parameter
uploads      the way to a GPU
load         checks all of it, then copies
"""

from executor.model.weights.formats import Format
from executor.model.weights.kept import KeptAs, KeptWeight
from executor.model.weights.load import Loader, OnProgress, load_weights, tensor_names
from executor.model.weights.targets import Cut, Part, Source, Target, Weight, WeightGroup

__all__ = [
    "Cut",
    "Format",
    "KeptAs",
    "KeptWeight",
    "Loader",
    "OnProgress",
    "Part",
    "Source",
    "Target",
    "Weight",
    "WeightGroup",
    "load_weights",
    "tensor_names",
]
