# SPDX-License-Identifier: Apache-2.0
"""ringattn.h's structs in ctypes: the header's names, without their prefix, and its members."""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
)

from ._errors import refuse

Tensor = c_void_p  # the address of a DLTensor, which the caller of a function keeps
longs = POINTER(c_int64)
integers = POINTER(c_int32)


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
        ("bits", c_uint8), ("lanes", c_uint16), ("shape", c_void_p), ("strides", c_void_p), ("byte_offset", c_uint64),
    ]  # fmt: skip


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Run(Structure):
    __slots__ = ()
    _fields_ = [("rank", c_int32), ("sequence", c_int32), ("begin", c_int64), ("end", c_int64)]


class Sized(Structure):
    """A struct that begins with its size. It has no other attributes than its members."""

    __slots__ = ()

    def __init__(self, **members):
        super().__init__(ctypes.sizeof(self))
        for name, value in members.items():
            try:
                setattr(self, name, value)
            except TypeError:
                refuse(f"{name} is {value!r}", "it is a number, or text", "Convert it.")
            kept = getattr(self, name)
            if isinstance(kept, int) and isinstance(value, int) and kept != value:  # ctypes cuts it off
                refuse(f"{name} is {value}", "the library has no such number", "Choose one that is nearer to 0.")


def _sized(name: str, *members: tuple[type, str]) -> type[Sized]:
    """Makes a struct from groups of members, each a type and the members' names in one string."""
    fields = [("size", c_uint64)] + [(member, kind) for kind, names in members for member in names.split()]
    return type(name, (Sized,), {"_fields_": fields, "__slots__": ()})


world_options = _sized("world_options", (c_int64, "abi"), (c_int32, "device_type device_id"))
# all_gather's arguments: context, data, bytes, seconds, gathered.
Gather = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_double, c_void_p)
callbacks = _sized("callbacks", (c_void_p, "context"), (Gather, "all_gather"))
spec = _sized(
    "spec", (DLDataType, "dtype"), (c_int32, "heads kv_heads head_dim head_dim_v mask sinks"),
    (c_int64, "window_left window_right"), (c_float, "softmax_scale softcap"), (c_char_p, "k_format v_format"),
    (c_int64, "scale_given"),
)  # fmt: skip
compressed = _sized("compressed", (Tensor * 4, "streams"), (Tensor * 2, "tables"))
batch = _sized(
    "batch", (c_int64, "sequences"), (longs, "q_lengths k_lengths q_offsets"), (integers, "k_positions"),
    (c_int64, "position_heads"), (longs, "whole_lengths"),
)  # fmt: skip
options = _sized(
    "options", (c_char_p, "kernel"), (c_int32, "threads layout"), (c_int64, "stripe query_run_count"),
    (POINTER(Run), "query_runs"), (c_int64, "key_run_count"), (POINTER(Run), "key_runs"), (c_int64, "block_tokens"),
    (c_uint64, "memory_budget"), (c_double, "timeout_seconds"), (c_int32, "checksum unchecked_tables"),
)  # fmt: skip

attention_facts = _sized(
    "attention_facts", (c_int64, "q_rows k_rows"), (c_uint64, "workspace_bytes"), (c_char_p, "kernel"),
    (c_double, "estimated_seconds"), (c_char_p, "machine"),
)  # fmt: skip
attention_tensors = _sized(
    "attention_tensors", (Tensor, "q k v sinks out lse workspace"), (c_void_p, "stream"), (Tensor, "compressed_k compressed_v")
)  # fmt: skip
attention_backward_tensors = _sized(
    "attention_backward_tensors", (Tensor, "q k v sinks out lse dout dlse dq dk dv dsinks workspace"), (c_void_p, "stream")
)  # fmt: skip

decode_limits = _sized("decode_limits", (c_int64, "sequences rows keys page_size pages"))
decode_facts = _sized(
    "decode_facts", (c_int64, "kv_split_keys partition_first partition_stride"), (c_uint64, "memory_bytes"), (c_char_p, "kernel")
)
decode_tensors = _sized(
    "decode_tensors", (Tensor, "q k v block_table lengths sinks k_new v_new out lse host_lengths host_table"),
    (c_void_p, "stream"), (c_int32, "rows update_lengths"), (Tensor, "compressed_k compressed_v lengths_before"),
)  # fmt: skip

mla_spec = _sized(
    "mla_spec", (DLDataType, "dtype"), (c_int32, "heads head_dim rope_dim head_dim_v latent_dim mask sinks"),
    (c_int64, "window_left window_right"), (c_float, "softmax_scale softcap"), (c_char_p, "format"),
    (c_int64, "scale_given"),
)  # fmt: skip
mla_facts = _sized(
    "mla_facts", (c_int64, "q_rows k_rows"), (c_uint64, "workspace_bytes"), (c_char_p, "kernel"), (c_int64, "form")
)
mla_tensors = _sized(
    "mla_tensors", (Tensor, "q latent k_rope w_uk w_uv sinks out lse workspace"), (c_void_p, "stream")
)
mla_backward_tensors = _sized(
    "mla_backward_tensors",
    (Tensor, "q latent k_rope w_uk w_uv sinks out lse dout dlse dq dlatent dk_rope dw_uk dw_uv dsinks workspace"),
    (c_void_p, "stream"),
)  # fmt: skip
mla_decode_tensors = _sized(
    "mla_decode_tensors",
    (Tensor, "q cache block_table lengths sinks latent k_rope w_uk w_uv out lse host_lengths host_table"),
    (c_void_p, "stream"), (c_int32, "rows update_lengths"), (Tensor, "lengths_before"),
)  # fmt: skip

batched_gemm_spec = _sized("batched_gemm_spec", (DLDataType, "dtype"), (c_int32, "heads dim_k dim_n"))
batched_gemm_facts = _sized("batched_gemm_facts", (c_uint64, "memory_bytes"), (c_char_p, "kernel"))
batched_gemm_tensors = _sized("batched_gemm_tensors", (Tensor, "rows weights out"), (c_void_p, "stream"))

linear_spec = _sized(
    "linear_spec", (DLDataType, "dtype"), (c_int32, "weights"), (c_int64, "in_features out_features"), (c_char_p, "activation"),
    (c_int32, "bias parallel"), (c_int64, "max_tokens output column_unit"),
)  # fmt: skip
linear_facts = _sized(
    "linear_facts", (c_int64, "features_begin features_end columns_begin columns_end"), (c_uint64, "packed_bytes memory_bytes"),
    (c_char_p, "kernel"),
)  # fmt: skip
linear_weights = _sized(
    "linear_weights", (Tensor, "weight scales zeros bias up_weight up_scales up_zeros up_bias"), (c_void_p, "stream")
)
linear_tensors = _sized("linear_tensors", (Tensor, "x y"), (c_void_p, "stream"))
linear_backward_tensors = _sized(
    "linear_backward_tensors", (Tensor, "x dy weight bias transposed dx dweight dbias"), (c_void_p, "stream")
)
gradient_reduction_facts = _sized(
    "gradient_reduction_facts", (c_int64, "leaves_begin leaves_end"), (c_uint64, "memory_bytes"), (c_char_p, "kernel")
)
gradient_reduction_tensors = _sized("gradient_reduction_tensors", (Tensor, "sum"), (c_void_p, "stream"))

ssm_spec = _sized(
    "ssm_spec", (DLDataType, "dtype"), (c_int32, "heads head_dim state_dim"), (c_int64, "groups"),
    (c_int32, "state_decays skip gate dt_bias dt_softplus dt_limits"), (c_float, "dt_min dt_max"),
)  # fmt: skip
ssm_batch = _sized(
    "ssm_batch", (c_int64, "sequences"), (longs, "lengths"), (c_int32, "initial_states final_states"), (c_int64, "update")
)
ssm_facts = _sized("ssm_facts", (c_int64, "rows beginning ending"), (c_uint64, "memory_bytes"), (c_char_p, "kernel"))
ssm_tensors = _sized(
    "ssm_tensors", (Tensor, "x dt b c z a d dt_bias initial_states y final_states"), (c_void_p, "stream"), (Tensor, "slots")
)
gated_delta_spec = _sized(
    "gated_delta_spec", (DLDataType, "dtype"), (c_int32, "key_heads value_heads key_dim value_dim key_decays qk_l2norm"),
    (c_float, "scale"),
)  # fmt: skip
gated_delta_tensors = _sized(
    "gated_delta_tensors", (Tensor, "q k v log_decay beta initial_states out final_states slots"), (c_void_p, "stream")
)
reshard_spec = _sized(
    "reshard_spec", (c_int64, "token_bytes sequences"), (longs, "lengths"), (c_int64, "from_run_count"),
    (POINTER(Run), "from_runs"), (c_int64, "to_run_count"), (POINTER(Run), "to_runs"),
)  # fmt: skip
reshard_facts = _sized(
    "reshard_facts", (c_int64, "from_rows to_rows bytes_received"), (c_uint64, "memory_bytes"), (c_char_p, "kernel")
)
reshard_tensors = _sized("reshard_tensors", (Tensor, "x y"), (c_void_p, "stream"))
ssd_backward_tensors = _sized(
    "ssd_backward_tensors",
    (Tensor, "x dt b c z a d dt_bias initial_states dy dfinal_states dx ddt db dc dz dinitial_states da dd ddt_bias"),
    (c_void_p, "stream"),
)  # fmt: skip
rope_spec = _sized(
    "rope_spec", (DLDataType, "dtype"), (c_int32, "head_dim"), (c_char_p, "type parameters"), (c_double, "theta rotary_factor"),
    (c_int32, "interleaved exact"), (POINTER(c_double), "frequencies"), (c_int64, "frequency_count"),
    (c_double, "attention_factor")
)  # fmt: skip
rope_facts = _sized("rope_facts", (c_int64, "rotary_dim axes"), (c_char_p, "kernel"))
rope_tensors = _sized(
    "rope_tensors", (Tensor, "q k q_out k_out positions"), (c_int64, "first_position inverse"), (c_void_p, "stream")
)
linear_attention_spec = _sized(
    "linear_attention_spec", (DLDataType, "dtype"), (c_int32, "heads dim dim_v decay has_scale"), (c_float, "scale"),
    (POINTER(rope_spec), "rope")
)  # fmt: skip
linear_attention_tensors = _sized(
    "linear_attention_tensors", (Tensor, "q k v log_decay initial_state positions slots out final_states"), (c_void_p, "stream")
)

causal_conv1d_spec = _sized(
    "causal_conv1d_spec", (DLDataType, "dtype"), (c_int32, "width"), (c_int64, "channels"), (c_int32, "bias silu")
)
causal_conv1d_tensors = _sized(
    "causal_conv1d_tensors", (Tensor, "x weight bias initial_halos y final_halos slots"), (c_void_p, "stream")
)

causal_conv1d_backward_tensors = _sized(
    "causal_conv1d_backward_tensors",
    (Tensor, "x weight bias initial_halos dy dfinal_halos dx dweight dbias dinitial_halos"), (c_void_p, "stream"),
)  # fmt: skip

layer_facts = _sized(
    "layer_facts", (c_int64, "out_features in_features"), (c_char_p, "format name"), (DLDataType, "dtype"),
    (c_int32, "weights zeros"), (DLDataType, "bias"),
)  # fmt: skip
compression_spec = _sized(
    "compression_spec", (c_char_p, "format"), (c_int64, "sequences seed"), (DLDataType, "dtype"), (c_int32, "heads"),
    (c_int64, "dim"),
)  # fmt: skip
compression_facts = _sized("compression_facts", (c_int64, "streams tables token_bytes table_bytes"))
part = _sized("part", (c_char_p, "name"), (DLDataType, "dtype"), (c_int32, "axes"), (c_int64 * 4, "shape"))
compression_tensors = _sized(
    "compression_tensors", (c_char_p, "name"), (longs, "lengths"), (Tensor, "plain compressed"), (c_void_p, "stream")
)
eviction = _sized("eviction", (c_char_p, "method"), (c_double, "ratio"), (c_int64, "threads"))
eviction_tensors = _sized("eviction_tensors", (Tensor, "q k v positions k_kept v_kept"))
formats = _sized("formats", (c_char * 64, "k v"), (c_double, "removed"))
