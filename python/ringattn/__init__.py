# SPDX-License-Identifier: Apache-2.0
"""Exact attention with bitwise equal results on one rank and on many.

import numpy, ringattn

q = numpy.random.default_rng(1).standard_normal((4096, 8, 128), dtype="float32")
out, lse = ringattn.attention(q, q, q)
"""

import importlib

from ._abi import lib as _lib
from ._errors import CallError, Error, FileError, OutOfMemory, PeerError, UnsupportedError, UsageError, WrongResult
from ._attention import Attention, attention, varlen
from ._compression import Compressed, compress, decompress
from ._conv1d import CausalConv1d, causal_conv1d, causal_conv1d_update
from ._decode import Decode, DecodePartition, MlaDecode, decode, decode_partition
from ._eviction import Kept, evict
from ._batched_gemm import BatchedGemm, batched_gemm
from ._delta_gates import gated_delta_gates
from ._gated_delta import GatedDelta, gated_delta, gated_delta_update
from ._gradient_reduction import gradient_leaves, reduce_gradients
from ._linear import (
    Linear, QuantizedWeight, dequantize_weight, linear, linear_columns, linear_features, linear_tokens, quantize_weight,
)  # fmt: skip
from ._linear_attention import LinearAttention, linear_attention, linear_attention_update
from ._mla import Mla, mla, mla_decode, mla_decode_partition
from .layouts import Layout, contiguous, packed, positions, segments, shard, striped, super_segments, unshard, zigzag
from ._reshard import Reshard, reshard
from ._rope import Rope, RopeSettings, rope, rope_frequencies
from ._sdpa import scaled_dot_product_attention
from ._simd_target import set_simd_target, simd_target
from ._ssm import Ssm, selective_scan, selective_update, ssd, ssd_update
from . import goldens, quantized, testing  # isort: skip
from .torch_worlds import torch_world
from .worlds import World, callbacks_world, mpi_world, run_ranks, self_world, store_world, threads_worlds



def __getattr__(name: str):
    """ringattn.nn imports PyTorch, so it is imported where it is first used."""
    if name != "nn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".nn", __name__)


__version__: str = _lib.version().decode()
__all__ = [
    "Attention", "attention", "batched_gemm", "BatchedGemm", "callbacks_world", "CallError", "causal_conv1d",
    "causal_conv1d_update", "CausalConv1d", "compress", "Compressed", "contiguous", "Decode", "decode", "decode_partition",
    "DecodePartition", "decompress", "dequantize_weight", "Error", "evict", "FileError", "gated_delta",
    "gated_delta_gates", "gated_delta_update",
    "GatedDelta", "goldens", "gradient_leaves", "Kept", "Layout", "Linear", "linear", "linear_attention",
    "linear_attention_update", "linear_columns", "linear_features", "linear_tokens", "LinearAttention", "Mla", "mla",
    "mla_decode", "mla_decode_partition", "MlaDecode", "mpi_world", "OutOfMemory", "packed", "PeerError", "positions",
    "quantize_weight", "quantized", "QuantizedWeight", "reduce_gradients", "Reshard", "reshard", "Rope", "rope",
    "rope_frequencies", "RopeSettings", "run_ranks", "scaled_dot_product_attention", "segments", "selective_scan",
    "selective_update", "self_world", "set_simd_target", "shard", "simd_target", "ssd", "ssd_update", "Ssm", "store_world",
    "striped", "super_segments", "testing", "threads_worlds", "torch_world", "unshard", "UnsupportedError",
    "UsageError", "varlen", "World", "WrongResult", "zigzag",
]  # fmt: skip
