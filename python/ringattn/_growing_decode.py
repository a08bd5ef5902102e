# SPDX-License-Identifier: Apache-2.0
"""Decode steps of the layers of a model, over caches that grow with each call. The host is on the critical path of every layer
and token, so a repeated call does no host work twice: it only compares what can differ, and writes addresses."""

import threading

import torch
from torch import Tensor

from . import _abi, _job, _structs
from ._decode import prepared_decode
from ._errors import refuse
from ._streams import is_captured
from ._tensors import device_of, stream_of
from .worlds import own_calls

_LEAST_KEYS = 1024  # a power of two
_TABLE_LENGTHS = 1024  # lengths of a table, 4 KiB for each sequence
_MAX_TABLES = 16


class _Lengths:
    """Tables of lengths in device memory for this thread's decode steps, so that calls need not write lengths there. A table has
    the lengths from a multiple of _TABLE_LENGTHS on, each repeated for all sequences: int32 [_TABLE_LENGTHS, sequences]. Each
    table belongs to one stream, which orders its reads after its creation, and the reuse of its memory after its reads."""

    def __init__(self):
        self._tables: dict[tuple, tuple[Tensor, int]] = {}  # with addresses

    def address(self, length: int, sequences: int, like: Tensor) -> int:
        """Address of int32 [sequences] in which every element is `length`, for work on the current stream of like's device."""
        block, row = divmod(length, _TABLE_LENGTHS)
        key = (block, sequences, like.device, stream_of(like))
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            first = block * _TABLE_LENGTHS
            table = torch.arange(first, first + _TABLE_LENGTHS, dtype=torch.int32, device=like.device)
            table = table[:, None].expand(-1, sequences).contiguous()
            found = self._tables[key] = table, table.data_ptr()
        return found[1] + 4 * sequences * row


class _GrowingDecode(_job.RepeatedCall):
    """A prepared decode over dense caches whose number of keys and strides may differ from call to call. Everything else is as in
    the first call."""

    def __init__(self, prepared, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None):
        """query, key, value: tensors of the first call. Later calls may have other keys and values."""
        batch, heads, rows, _ = query.shape
        self.prepared = prepared
        self._shape = (batch, rows, heads, value.shape[3])
        self._tensors = _structs.decode_tensors(rows=rows, update_lengths=0)
        self._views: dict = {}
        out = query.new_empty(self._shape)
        arrays = {"q": _flat(query.transpose(1, 2)), "k": key.transpose(1, 2), "v": value.transpose(1, 2),
                  "out": out.flatten(0, 1), "lengths": query.new_empty(batch, dtype=torch.int32), "sinks": sinks}  # fmt: skip
        _job.show(self._tensors, self._views, arrays)
        self._copies_q = arrays["q"].data_ptr() != query.data_ptr()
        self._q, self._k, self._v, self._out, self._lengths = (
            self._views[name].struct for name in ("q", "k", "v", "out", "lengths")
        )
        self._sinks = None if sinks is None else self._views["sinks"].struct
        self._k_axes, self._v_axes = self._views["k"].lengths, self._views["v"].lengths
        self._on_host = device_of(query)[0] == _abi.CPU

    def _call(self, prepared, query, key, value, keys, k_strides, v_strides, lengths: int, sinks):
        """lengths: an address."""
        out = query.new_empty(self._shape)
        rows = _flat(query.transpose(1, 2)) if self._copies_q else query
        # [batch, keys, kv_heads, dim], then its strides
        axes = self._k_axes
        axes[1], axes[4], axes[6], axes[5] = keys, *k_strides
        axes = self._v_axes
        axes[1], axes[4], axes[6], axes[5] = keys, *v_strides
        self._q.data, self._k.data, self._v.data = rows.data_ptr(), key.data_ptr(), value.data_ptr()
        self._out.data, self._lengths.data = out.data_ptr(), lengths
        if sinks is not None:
            self._sinks.data = sinks.data_ptr()
        if self._on_host:
            prepared._run(prepared._handle, self._tensors)
        else:
            prepared.enqueue(self._tensors, out)
        return out


def _flat(q: Tensor) -> Tensor:
    """[batch, rows, heads, head_dim] as [batch * rows, heads, head_dim], copied where that is no view."""
    return (q if q.stride(-1) == 1 else q.contiguous()).flatten(0, 1)


_own = threading.local()


def _own_lengths() -> _Lengths:
    lengths = getattr(_own, "lengths", None)
    if lengths is None:
        lengths = _own.lengths = _Lengths()
    return lengths


def decode_growing(query: Tensor, key: Tensor, value: Tensor, lengths: int | Tensor, *, mask: _job.Mask,
                   softmax_scale: float | None, softcap: float, sinks: Tensor | None) -> Tensor:  # fmt: skip
    """Returns out [batch, rows, heads, head_dim_v] of decode() for tensors without gradients, over caches that grow with each
    call. The prepared object holds the next power of two of keys, so few calls need to prepare a new one.

    query: [batch, heads, rows, head_dim]; key, value: [batch, kv_heads, keys, head_dim or head_dim_v]. lengths: the number of
    leading keys that are seen, including those of the rows; if sequences differ, int32 [batch], contiguous, on query's
    device."""
    q_shape, dtype, device = query.shape, query.dtype, query.device
    batch, kv_heads, keys, head_dim = key.shape
    v_batch, v_heads, v_keys, head_dim_v = value.shape
    k_strides, v_strides = key.stride(), value.stride()
    if k_strides[3] != 1 or v_strides[3] != 1:
        contiguous = (rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in (key, value))
        return decode_growing(query, *contiguous, lengths, mask=mask, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
    whole = type(lengths) is int
    of_sinks = None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device)
    capacity = (keys - 1).bit_length()
    form = ("decode_growing", whole, q_shape, query.stride(), dtype, device, batch, kv_heads, head_dim, v_batch, v_heads,
            head_dim_v, mask, softmax_scale, softcap, of_sinks, capacity)  # fmt: skip
    alike = key.dtype is dtype and value.dtype is dtype and key.device == device and value.device == device and v_keys == keys
    if whole and not 0 <= lengths <= keys:
        refuse(f"{lengths} keys are seen", f"there are {keys}", "Pass at most as many as there are.")
    call = own_calls().get(form) if alike else None
    if call is None:
        call = _prepare(form, query, key, value, lengths, mask, softmax_scale, softcap, sinks)
    if whole and not is_captured(query):
        address = _own_lengths().address(lengths, batch, query)
    else:
        # A graph must keep what its replays read, but tables are released.
        read = torch.full((batch,), lengths, dtype=torch.int32, device=device) if whole else lengths
        address = read.data_ptr()
    out = call(query, key, value, keys, k_strides[:3], v_strides[:3], address, sinks)
    if out is None:  # closed, because others were used since
        call = _prepare(form, query, key, value, lengths, mask, softmax_scale, softcap, sinks)
        out = call(query, key, value, keys, k_strides[:3], v_strides[:3], address, sinks)
    return out


def _prepare(form, query, key, value, lengths, mask, softmax_scale, softcap, sinks) -> _GrowingDecode:
    """Checks a call, and keeps it for later calls of the same form."""
    q, k, v = (rows.transpose(1, 2) for rows in (query, key, value))
    whole = type(lengths) is int
    _job.check_arrays("decode", {"q": q, "k_cache": k, "v_cache": v}, lengths=None if whole else lengths, sinks=sinks)
    _job.check_dtypes(q=q, k_cache=k, v_cache=v)
    capacity = max(_LEAST_KEYS, 1 << (k.shape[1] - 1).bit_length())
    prepared = prepared_decode(_job.world_of(q, None), q, k, v, None, mask, softmax_scale, softcap, sinks, None, capacity, 0,
                               60.0, unchecked=whole)[0]  # fmt: skip
    call = _GrowingDecode(prepared, query, key, value, sinks)
    _job.keep(None, form, call)
    return call
