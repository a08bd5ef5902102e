# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose rows have the same bits in any batch and for any tensor-parallel width.

    y = ringattn.linear(x, weight, bias, activation="silu")                                # weight [out_features, in_features]
    q = ringattn.quantize_weight(weight, "int4")
    y = ringattn.linear(x, q.weight, bias, scales=q.scales, zeros=q.zeros)

ringattn.nn.Linear is the module. docs/linear.md has the arithmetic."""

import math
import weakref
from typing import NamedTuple

import numpy as np

from . import _abi, _gradients, _job, _structs
from ._abi import lib
from ._arguments import as_int, check_axes, check_settings, refuse_unknown, seconds_of, shown
from ._errors import called_by, refuse, unsupported
from ._loaded_torch import loaded_torch
from ._streams import is_captured, refuse_in_graph
from ._tensors import (
    address_of,
    check_array,
    contiguous_heads,
    data_type,
    device_of,
    empty,
    is_contiguous,
    is_torch,
    maker,
    traced,
    type_name,
)
from .worlds import World

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh")
GATED = ("swiglu", "geglu", "geglu_tanh")
PARALLEL = ("none", "column", "row")
OUTPUTS = ("shard", "tokens", "replicated")
FORMATS = ("float", "int8", "int4")
# Leaves of a shared layer, number of elements that are never divided between ranks, and INT4's group size.
LEAVES, UNIT, GROUP = 8, 16, 128


class Linear(_job.Prepared):
    """A prepared layer of one shape. linear() keeps such objects. Creating one is collective if ranks share the layer."""

    op = "linear"
    _packed: tuple | None = None  # _marks() of the weights that the kernel has packed
    _held: tuple = ()  # arrays that stay as long as these marks

    def __init__(self, world: World, spec: _structs.linear_spec, options: _structs.options):
        super().__init__(world, spec, options)
        self.max_tokens: int = spec.max_tokens

    def multiply(self, x, y, weights: dict, given: tuple) -> None:
        """Computes y: on a GPU enqueued on the caller's current stream, else synchronously. weights: the arrays that the library
        reads. given: the caller's arrays, weight first; `weights` may be copies of them."""
        on_host = device_of(x)[0] == _abi.CPU

        def call():
            tensors = self._tensors
            _job.show(tensors, self._views, {"x": x, "y": y})
            run = self._run if on_host else self._enqueue

            def work(stream):
                self._load(stream, weights, given)
                tensors.stream = stream
                run(self.handle, tensors)

            self.on_stream(x, work)

        self.turn.run(call)

    def _load(self, stream: int | None, weights: dict, given: tuple) -> None:
        """Passes the weights to the library, unless its kernel has already packed them."""
        marks = _marks(given) if packs(self) else None
        if marks is not None and self._packed == marks:
            return
        self._packed, self._held = None, ()
        read, views = _structs.linear_weights(), {}
        _job.show(read, views, {name: array for name, array in weights.items() if array is not None})
        read.stream = stream
        lib.linear_load(self.handle, read)
        if marks is None:
            return
        self._packed = None if is_captured(given[0]) else marks  # in a graph, only replays pack them
        # Later calls read biases and scales, and the marks contain addresses, so these arrays must stay alive. Arrays in the
        # weight's own storage are left out: this object lives as long as that storage, and would keep it alive.
        storage = given[0].untyped_storage()
        read_again = (array for name, array in weights.items() if name != "weight")
        self._held = tuple(array for array in (*given[1:], *read_again)
                           if array is not None and array.untyped_storage() is not storage)  # fmt: skip


def _marks(given: tuple) -> tuple | None:
    """A value that is equal for arrays in the same memory and with the same contents, according to PyTorch's version counter.
    None for arrays without a version counter: NumPy arrays and inference tensors."""
    if not all(array is None or is_torch(array) and not array.is_inference() for array in given):
        return None
    return tuple(
        None if array is None else (array.data_ptr(), array._version, tuple(array.shape), array.stride()) for array in given
    )


def packs(prepared: Linear) -> bool:
    """Whether the kernel has its own layout of the weights, so that they are packed once per weight, not in each call. Ranks
    that share the layer agree on it, including ranks without columns or features, whose packed_bytes are 0."""
    return prepared.kernel.endswith("_int4")


# The objects that have packed a weight, by the weight's storage. They are destroyed with it.
_packed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _prepared(world: World, key: tuple, max_tokens: int, make, weight) -> Linear:
    """The prepared layer for at least max_tokens tokens. All layers of a shape share one, unless the kernel packs the weight.
    Then the weight has its own, which is replaced when a call has more tokens."""
    storage = weight.untyped_storage() if is_torch(weight) else None
    # Keyed by offset, because all empty shards have the same address, and ranks must find or make the same objects.
    index = None if storage is None else (world.key, key, weight.storage_offset())
    found = None if storage is None else _packed.get(storage, {}).get(index)
    if found is not None and found._handle is not None:
        if found.max_tokens >= max_tokens:
            return found
        refuse_in_graph(world)
        if not found.in_graph:
            found.close()
    shared = ("linear", *key, max_tokens)
    made = world.prepared(shared, make)
    if storage is None or not packs(made):
        return made
    _packed.setdefault(storage, {})[index] = world.give_away(shared)
    return made


class LayerShape(NamedTuple):
    """Shape of the whole layer, as a call's arrays determine it."""

    format: str
    in_features: int
    out_features: int
    gated: bool


def _leaf_begin(features: int, unit: int, leaf: int) -> int:
    units = -(-features // unit)
    return min(leaf * units // LEAVES * unit, features)


def _range(features: int, ranks: int, rank: int, unit: int) -> tuple[int, int]:
    features, ranks, rank, unit = (as_int(value, name) for value, name in (
        (features, "features"), (ranks, "ranks"), (rank, "rank"), (unit, "unit")))  # fmt: skip
    if not 1 <= ranks <= LEAVES or not 0 <= rank < ranks or features < 1 or unit < 1:
        refuse(f"rank {rank} of {ranks} has no part of {features} features in units of {unit}",
               f"1 to {LEAVES} ranks share a layer, counted from 0", "Check them.")  # fmt: skip
    return tuple(_leaf_begin(features, unit, LEAVES * r // ranks) for r in (rank, rank + 1))


def linear_columns(out_features: int, ranks: int, rank: int, *, unit: int = UNIT) -> tuple[int, int]:
    """The rows of a column-parallel layer's weight that a rank has. If a row-parallel layer reads this layer's output, they are
    also the rank's features of that layer.

    Args:
        out_features: of the whole layer; for a gated layer, of each of its two matrices.
        ranks, rank: number of ranks, and the rank.
        unit: columns that are never divided: 128 if an INT4 layer reads the output, or if this layer is INT4.

    Returns:
        (begin, end): the rows [begin, end).

    Raises:
        UsageError: more than 8 ranks share the layer, or there is no such rank.

    Formula:
        8 leaves of whole units, distributed in order (docs/linear.md).

    Example:
        >>> [ringattn.linear_columns(14336, 3, rank) for rank in range(3)]
        [(0, 3584), (3584, 8960), (8960, 14336)]
    """
    return _range(out_features, ranks, rank, unit)


def linear_features(in_features: int, ranks: int, rank: int, *, unit: int = UNIT) -> tuple[int, int]:
    """The columns of a row-parallel layer's weight, and of x, that a rank has.

    Args:
        in_features: of the whole layer.
        ranks, rank: number of ranks, and the rank.
        unit: features that are never divided: 128 for INT4 weights.

    Returns:
        (begin, end): the features [begin, end).

    Raises:
        UsageError: more than 8 ranks share the layer, or there is no such rank.

    Formula:
        That of linear_columns().

    Example:
        >>> ringattn.linear_features(14336, 2, 1)
        (7168, 14336)
    """
    return _range(in_features, ranks, rank, unit)


def linear_tokens(tokens: int, ranks: int, rank: int) -> tuple[int, int]:
    """The tokens that a rank gets if the output of a shared layer is divided by tokens.

    Args:
        tokens: number of tokens of the whole output.
        ranks, rank: number of ranks, and the rank.

    Returns:
        (begin, end): the tokens [begin, end).

    Raises:
        UsageError: there is no such rank, or tokens is below 0.

    Formula:
        begin = floor(tokens * rank / ranks), in integers.

    Example:
        >>> [ringattn.linear_tokens(100, 3, rank) for rank in range(3)]
        [(0, 33), (33, 66), (66, 100)]
    """
    tokens, ranks, rank = (as_int(value, name) for value, name in ((tokens, "tokens"), (ranks, "ranks"), (rank, "rank")))
    if tokens < 0:
        refuse(f"tokens is {tokens}", "there can't be fewer than 0", "Check it.")
    if not 0 <= rank < ranks:
        refuse(f"rank {rank} of {ranks} does not exist", "ranks are counted from 0", "Check rank and ranks.")
    return _tokens_of(tokens, ranks, rank)


def _tokens_of(tokens, ranks: int, rank: int) -> tuple:
    """linear_tokens() of checked numbers; tokens may be a symbol of torch.compile."""
    return tuple(tokens // ranks * r + tokens % ranks * r // ranks for r in (rank, rank + 1))


def chosen(name: str, value, known: tuple[str, ...]) -> int:
    if isinstance(value, str) and value in known:
        return known.index(value)
    refuse(f"{name} is {shown(repr(value))}", f"there are {', '.join(known[:-1])} and {known[-1]}", "Choose one.")


def format_of(weight) -> str:
    """The format of weights that an array holds."""
    return {"int8": "int8", "uint8": "int4"}.get(type_name(weight.dtype), "float")


def shape_of(x, weight, scales, zeros, activation: str, parallel: str, in_features: int | None, out_features: int | None,
             column_unit: int, ranks: int, rank: int) -> LayerShape:  # fmt: skip
    """Checks the shapes of a call, and returns those of the whole layer."""
    check_axes("weight", weight, (2,), "[out_features, in_features]")
    if x.ndim < 1:
        refuse("x has no axes", "it is [..., in_features]", "Reshape it.")
    format, gated = format_of(weight), activation in GATED
    if (format == "float") != (scales is None):
        refuse(f"scales {'are given' if scales is not None else 'are missing'}",
               f"weight is {type_name(weight.dtype)}, which is {'not quantized' if format == 'float' else format.upper()}",
               "Pass weight and scales of one ringattn.quantize_weight().")  # fmt: skip
    if zeros is not None and format != "int4":
        refuse("zeros are given", "only INT4 weights, of dtype uint8, have zeros", "Leave them out.")
    rows, features = weight.shape[0], weight.shape[1] * (2 if format == "int4" else 1)
    if rows % (2 if gated else 1):
        refuse(f"weight has {rows} rows", f"{activation} has a gate matrix and an up matrix of as many rows, stacked",
               "Pass torch.cat([gate, up]).")  # fmt: skip
    columns = rows // 2 if gated else rows
    shares_columns, shares_features = (parallel == kind and ranks > 1 for kind in ("column", "row"))
    whole = []
    for name, given, own, shared in (("in_features", in_features, features, shares_features),
                                     ("out_features", out_features, columns, shares_columns)):  # fmt: skip
        if given is None and shared:
            refuse(f"{name} is not given", f"this rank's weight is a shard of the {parallel}-parallel layer",
                   "Pass that of the layer.")  # fmt: skip
        total = own if given is None else as_int(given, name)
        unit = GROUP if format == "int4" else UNIT
        if name == "out_features" and column_unit:
            unit = column_unit
        part = _range(total, ranks, rank, unit) if shared else (0, total)
        if own != part[1] - part[0]:
            function = "linear_columns" if name == "out_features" else "linear_features"
            refuse(f"weight is {list(weight.shape)}, {own} of {name}",
                   f"rank {rank} of {ranks} has {part[0]} to {part[1]} of {total}, in units of {unit}",
                   f"Cut it by ringattn.{function}(…, unit={unit}).")  # fmt: skip
        whole.append(total)
    if x.shape[-1] != features:
        refuse(f"x is {type_name(x.dtype)} {list(x.shape)}", f"weight is [{rows}, {features}], so x is [..., {features}]",
               "Check which of them is transposed.")  # fmt: skip
    return LayerShape(format, whole[0], whole[1], gated)


def output_shape(leading: tuple, tokens, out_features: int, columns: int, parallel: str, output: str, ranks: int,
                 rank: int) -> tuple:  # fmt: skip
    """The shape of y. leading: x's axes without the last one; tokens: their product. Divided tokens have one axis in y."""
    divided = ranks > 1 and (output == "tokens" and parallel != "none" or output == "shard" and parallel == "row")
    width = columns if parallel == "column" and output == "shard" else out_features
    if not divided:
        return (*leading, width)
    begin, end = _tokens_of(tokens, ranks, rank)
    return (end - begin, width)


# Biases of quantized layers, cast to another dtype, by the bias: (its version counter, the copy).
_casts = None


def _kept_cast(bias, dtype):
    """The bias in another dtype. The copy stays the same until the bias changes, so that a kernel packs the weight only once."""
    global _casts
    torch = loaded_torch()
    if torch.compiler.is_compiling() or bias.dtype == dtype or not bias.is_floating_point() or bias.is_inference() or (
        bias.requires_grad and torch.is_grad_enabled()
    ):
        return bias
    if is_captured(bias):  # replays read the bias, and make the copy
        return bias.detach().to(dtype)
    if _casts is None:
        _casts = torch.utils.weak.WeakIdKeyDictionary()
    kept = _casts.get(bias)
    mark = (bias._version, bias.data_ptr(), dtype)
    if kept is None or kept[0] != mark:
        kept = _casts[bias] = (mark, bias.detach().to(dtype))
    return kept[1]


def autocast(x, weight, bias):
    """x, and weight and bias that are not quantized, in the dtype of torch.autocast, as torch.nn.functional.linear casts them."""
    torch = loaded_torch()
    if torch is None or not is_torch(x) or x.device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias  # other devices are refused later
    dtype = torch.get_autocast_dtype(x.device.type)
    if is_torch(bias) and is_torch(weight) and not weight.is_floating_point():
        bias = _kept_cast(bias, dtype)
    return tuple(array.to(dtype) if is_torch(array) and array.is_floating_point() else array for array in (x, weight, bias))


def _check(x, weight, bias, scales, zeros, shape: LayerShape, columns: int) -> None:
    """Checks types, and the shapes of bias, scales and zeros."""
    rows = columns * (2 if shape.gated else 1)
    features = weight.shape[1] * (2 if shape.format == "int4" else 1)
    if type_name(x.dtype) not in ("float32", "float16", "bfloat16"):
        refuse(f"x is {type_name(x.dtype)}", "ringattn computes with float32, float16 and bfloat16", "Convert it.")
    groups = (rows,) if shape.format == "int8" else (rows, features // GROUP)
    for name, array, dtype, form in (
        ("weight", weight if shape.format == "float" else None, type_name(x.dtype), tuple(weight.shape)),
        ("bias", bias, type_name(x.dtype), (rows,)),
        ("scales", scales, "float32", groups),
        ("zeros", zeros, "uint8", groups),
    ):
        if array is None:
            continue
        if type_name(array.dtype) != dtype:
            refuse(f"{name} is {type_name(array.dtype)}", f"x is {type_name(x.dtype)}, so it should be {dtype}",
                   "Convert one of them, or compute under torch.autocast.")  # fmt: skip
        if tuple(array.shape) != form:
            refuse(f"{name} is {list(array.shape)}", f"weight has {rows} rows, so it should be {list(form)}", "Check it.")
    if shape.format == "int4" and shape.in_features % GROUP:
        unsupported(f"INT4 weights with {shape.in_features} features", f"groups have {GROUP}", "Use INT8, or pad x and weight.")


def as_rows(x):
    """x as [tokens, 1, features]."""
    return contiguous_heads(x).reshape(math.prod(x.shape[:-1]), 1, x.shape[-1])


def _dense(array):
    if array is None or is_contiguous(array):
        return array
    return array.contiguous() if is_torch(array) else np.ascontiguousarray(array)


def spec_of(x, shape: LayerShape, activation: str, parallel: str, output: str, bias: bool, column_unit: int):
    """The tokens that a prepared layer is made for, and a function that makes the library's spec."""
    tokens = math.prod(x.shape[:-1])
    max_tokens = max(16, 1 << max(tokens - 1, 0).bit_length())

    def make() -> _structs.linear_spec:
        return _structs.linear_spec(
            dtype=data_type(x), weights=FORMATS.index(shape.format), in_features=shape.in_features,
            out_features=shape.out_features, activation=activation.encode(), bias=int(bias), parallel=PARALLEL.index(parallel),
            output=OUTPUTS.index(output), max_tokens=max_tokens, column_unit=column_unit,
        )  # fmt: skip

    return max_tokens, make


def options_of(threads: int, timeout: float) -> _structs.options:
    return _structs.options(threads=threads, timeout_seconds=seconds_of(timeout))


def world_for(x, world: World | None, parallel: str, output: str) -> World:
    """The ranks that share the layer. If ranks do not share it, each computes its own tokens alone."""
    own = called_by({"q": "x"}, _job.world_of, x, world)
    if parallel != "none":
        if own.size > LEAVES:
            refuse(f"a {parallel}-parallel layer over {own.size} ranks", f"its weight is dealt in {LEAVES} parts",
                   f"Use at most {LEAVES} ranks for a layer.")  # fmt: skip
        return own
    if own.size > 1 and output == "replicated":
        refuse('output is "replicated"', "ranks don't share this layer, and each computes its own tokens",
               'Pass parallel="column" or "row", or leave output out.')  # fmt: skip
    return own if own.size == 1 else _job.world_of(x, None)


def compute(x, weight, bias, scales, zeros, *, activation, parallel, output, in_features, out_features, column_unit, world, out,
            threads, timeout, key=None):  # fmt: skip
    """linear() below autograd. key: the key of known_call(), under which the call is kept."""
    for name, value, known in (("activation", activation, ACTIVATIONS), ("parallel", parallel, PARALLEL),
                               ("output", output, OUTPUTS)):  # fmt: skip
        chosen(name, value, known)
    _job.check_arrays("linear", {"x": x, "weight": weight}, bias=bias, scales=scales, zeros=zeros, out=out)
    own = world_for(x, world, parallel, output)
    column_unit = as_int(column_unit, "column_unit")
    check_settings((threads, timeout))
    shape = shape_of(x, weight, scales, zeros, activation, parallel, in_features, out_features, column_unit, own.size, own.rank)
    columns = weight.shape[0] // (2 if shape.gated else 1)
    _check(x, weight, bias, scales, zeros, shape, columns)
    leading = tuple(x.shape[:-1])
    tokens = math.prod(leading)
    form = output_shape(leading, tokens, shape.out_features, columns, parallel, output, own.size, own.rank)
    if out is not None and (tuple(out.shape) != form or out.dtype != x.dtype):
        refuse(f"out is {type_name(out.dtype)} {list(out.shape)}", f"y is {type_name(x.dtype)} {list(form)}",
               "Pass one like it, or none.")  # fmt: skip
    max_tokens, spec = spec_of(x, shape, activation, parallel, output, bias is not None, column_unit)
    job = (str(x.dtype), shape, activation, bias is not None, parallel, output, column_unit, threads, timeout)
    prepared = _prepared(own, job, max_tokens, lambda: Linear(own, spec(), options_of(threads, timeout)), weight)
    y = empty(x, form) if out is None else out
    flat = y.reshape(-1, 1, y.shape[-1]) if 0 not in y.shape else y.reshape(math.prod(form[:-1]), 1, form[-1])
    if out is not None and 0 not in form and address_of(flat) != address_of(out):
        refuse(f"out of shape {list(out.shape)} can't be rows of one axis", "its strides don't follow from each other",
               "Pass a contiguous one.")  # fmt: skip
    weights = {"weight": contiguous_heads(weight), "bias": _dense(bias), "scales": _dense(scales), "zeros": _dense(zeros)}
    rows = as_rows(x)
    given = (x, weight, bias, scales, zeros)
    prepared.multiply(rows, flat, weights, given[1:])
    if key is not None and not packs(prepared) and all(
        array is None or address_of(array) == address_of(read) for array, read in zip(given, (rows, *weights.values()))
    ):
        _job.keep(world, key, _LinearCall(prepared, rows, flat, form, weights))
    return y


class _LinearCall(_job.RepeatedCall):
    """A checked and prepared call for arrays of given shapes, like _job.Call: it is repeated for other arrays by changing their
    addresses."""

    def __init__(self, prepared: Linear, x, y, form: tuple, weights: dict):
        self.prepared = prepared
        self._tensors, self._weights = _structs.linear_tensors(), _structs.linear_weights()
        rows: dict = {}
        held: dict = {}
        _job.show(self._tensors, rows, {"x": x, "y": y})
        _job.show(self._weights, held, {name: array for name, array in weights.items() if array is not None})
        self._views = rows, held
        self._x, self._y = rows["x"].struct, rows["y"].struct
        self._held = [held[name].struct if name in held else None for name in weights]
        self._new_y = maker(y, form)
        self._on_host = device_of(y)[0] == _abi.CPU

    def _call(self, prepared, arrays: tuple, out):
        """(out, None). arrays: x, weight, bias, scales, zeros, then out or None."""
        if out is None:
            out = self._new_y()
        self._x.data, self._y.data = address_of(arrays[0]), address_of(out)
        for struct, array in zip(self._held, arrays[1:]):
            if struct is not None:
                struct.data = address_of(array)
        prepared.on_stream(out, self._work)
        return out, None

    def _work(self, stream: int | None) -> None:
        prepared = self.prepared
        self._tensors.stream = self._weights.stream = stream
        lib.linear_load(prepared._handle, self._weights)
        (prepared._run if self._on_host else prepared._enqueue)(prepared._handle, self._tensors)


@traced
def linear(x, weight, bias=None, *, scales=None, zeros=None, activation: str = "none", parallel: str = "none",
           output: str = "shard", in_features: int | None = None, out_features: int | None = None, column_unit: int = 0,
           world: World | None = None, out=None, threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """activation(x · weightᵀ + bias), as torch.nn.functional.linear() with the activation fused. A row of the result has the same
    bits for any number of rows, and for any number of ranks that share the layer.

    Under torch.autocast, x, bias and floating-point weights are cast to its dtype, as in torch.nn.functional.linear().
    Floating-point layers have gradients of x, weight and bias (docs/linear.md).

    Args:
        x: float32, float16 or bfloat16. Any strides.
        weight: of x's dtype, as PyTorch stores it; or quantized, as quantize_weight() makes it: int8 (W8A8), or uint8 with two
            INT4 values per byte (W4A16), the even one in the low half. Gated layers have the rows of the gate first, then those
            of the up matrix.
        bias: of x's dtype, or None.
        scales, zeros: scales and zero points of a quantized weight. zeros may be None: all are 8.
        activation: "none", "gelu" (erf), "gelu_tanh", "silu", or gated: "swiglu", "geglu", "geglu_tanh".
        parallel: "none", "column" or "row": how the model's tensor-parallel plan splits the layer. "row" gives other bits than
            the others, even on one rank.
        output: the part of a shared layer's output that a rank gets: its "shard" (column: its columns; row: its tokens), its
            "tokens", or all of it ("replicated").
        in_features, out_features: of the whole layer, if ranks share it: a row-parallel layer needs in_features, and a
            column-parallel one out_features.
        column_unit: 128 for a column-parallel layer whose output an INT4 layer reads.
        world: the ranks that share the layer. None: only this one. The call is then collective, and all ranks pass the same
            number of tokens.
        out: array for the result. None: a new one.
        threads: CPU threads. 0: this rank's share of the processors.
        timeout: seconds to wait for a peer without heartbeats.

    Shapes:
        x: [..., in_features], or this rank's linear_features() of them.
        weight: [out_features, in_features], gated [2 · out_features, in_features], or this rank's linear_columns() of
            out_features and linear_features() of in_features. uint8: in_features / 2 bytes.
        bias: [out_features], as many as weight has rows.
        scales: float32 [rows] (int8) or [rows, in_features / 128] (uint8).
        zeros: uint8, as scales.

    Returns:
        [..., out_features] of x's dtype. If the tokens are divided between ranks: [tokens of linear_tokens(), out_features].

    Raises:
        CallError: a keyword is unknown.
        UsageError: the arguments contradict each other.
        UnsupportedError: there is no such kernel or gradient.
        PeerError: another rank failed, or sent no heartbeat for `timeout` seconds.

    Formula:
        Sums over K are computed in splits, and in 8 leaves for a row-parallel layer (docs/linear.md). A gated layer
        (arXiv:2002.05202) is::

            activation(x @ gate.T + bias_gate) * (x @ up.T + bias_up)

    Example:
        >>> x, gate_up = np.ones((10, 64), "float32"), np.ones((256, 64), "float32")
        >>> ringattn.linear(x, gate_up, activation="swiglu").shape
        (10, 128)
    """
    if unknown:
        refuse_unknown("linear", unknown)
    x, weight, bias = autocast(x, weight, bias)
    settings = {"activation": activation, "parallel": parallel, "output": output, "in_features": in_features,
                "out_features": out_features, "column_unit": column_unit, "world": world, "threads": threads, "timeout": timeout}
    return dispatch(x, weight, bias, scales, zeros, out, settings)


def dispatch(x, weight, bias, scales, zeros, out, settings: dict):
    """compute(), by the operator where autograd records."""
    given = {"x": x, "weight": weight, "bias": bias, "scales": scales, "zeros": zeros}
    key, results = _job.known_call(settings["world"], tuple(settings.values()), given, out)
    if results is not None:
        return results[0]
    wanting = _gradients.requiring({"x": x, "weight": weight, "bias": bias})
    if wanting is None:
        return compute(x, weight, bias, scales, zeros, out=out, key=key, **settings)
    _gradients.check_linear(wanting, is_quantized(weight), out)
    from . import torch_linear_ops  # noqa: PLC0415, needs torch

    return torch_linear_ops.called(x, weight, bias, scales, zeros, settings)


def is_quantized(weight) -> bool:
    return format_of(weight) != "float"


class QuantizedWeight(NamedTuple):
    """A quantized weight, as linear() takes it.

    Attributes:
        weight: int8 [N, K], or uint8 [N, K / 2].
        scales: float32 [N], or [N, K / 128].
        zeros: uint8 as scales, or None: all are 8."""

    weight: object  # int8 [N, K], or uint8 [N, K / 2]
    scales: object  # float32 [N], or [N, K / 128]
    zeros: object  # None: all are 8


def quantize_weight(weight, format: str) -> QuantizedWeight:
    """Quantizes a weight symmetrically, rounding to nearest: "int8" has a scale for each row, "int4" one for each 128 elements
    of a row. Values and scales are the same as in `ringattn quantize` and in compressed-tensors' min-max observer.

    Args:
        weight: [out_features, in_features], float32, float16 or bfloat16.
        format: "int8" or "int4".

    Returns:
        QuantizedWeight(weight, scales, zeros): int8 [out_features, in_features] and float32 [out_features], or uint8
        [out_features, in_features / 2] and float32 [out_features, in_features / 128]. zeros are None.

    Raises:
        UsageError: weight has a NaN or an infinite element, or in_features is not a multiple of 128 for "int4".

    Formula:
        scale = max |weight| / 127.5 ("int8") or / 7.5 ("int4"), rounded to weight's dtype; value = round(weight / scale)
        (docs/linear.md).

    Example:
        >>> q = ringattn.quantize_weight(np.eye(4, 128, dtype="float32"), "int8")
        >>> q.weight.dtype, q.weight.shape, q.scales.shape
        (dtype('int8'), (4, 128), (4,))
    """
    chosen("format", format, FORMATS[1:])
    check_array("weight", weight, differentiable=True)
    device_of(weight)  # refuses other devices
    check_axes("weight", weight, (2,), "[out_features, in_features]")
    if type_name(weight.dtype) not in ("float32", "float16", "bfloat16"):
        refuse(f"weight is {type_name(weight.dtype)}", "float32, float16 and bfloat16 are quantized", "Convert it.")
    rows, features = weight.shape
    if format == "int4" and features % GROUP:
        refuse(f"weight has {features} features", f"INT4 has a scale for each {GROUP}", 'Use "int8".')
    if is_torch(weight):
        return _quantized_tensor(weight.detach(), format)
    made = _quantized_tensor(_torch().from_numpy(np.ascontiguousarray(weight).astype("float32")), format)
    return QuantizedWeight(made.weight.numpy(), made.scales.numpy(), None)


def _torch():
    import torch  # noqa: PLC0415, quantizing NumPy's arrays needs it

    return torch


def _quantized_tensor(weight, format: str) -> QuantizedWeight:
    torch = loaded_torch()
    wide = weight.float()
    if not bool(wide.isfinite().all()):
        row, column = (int(i) for i in (~wide.isfinite()).nonzero()[0])
        refuse(f"weight[{row}, {column}] is {float(wide[row, column])}", "a scale can't hold it",
               "Check where the weights come from.")  # fmt: skip
    if format == "int8":
        scales = _scales(wide.abs().amax(1), 127.5, weight.dtype)
        return QuantizedWeight((wide / scales[:, None]).round().clamp(-128, 127).to(torch.int8), scales, None)
    groups = wide.unflatten(1, (-1, GROUP))
    scales = _scales(groups.abs().amax(2), 7.5, weight.dtype)
    values = ((groups / scales[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
    return QuantizedWeight(values[:, 0::2] | values[:, 1::2] << 4, scales, None)


def _scales(absmax, half_range: float, dtype):
    """absmax / half_range, rounded to the weight's dtype as in files. If that is 0, the smallest number of the dtype, or 1 if all
    elements are 0."""
    torch = loaded_torch()
    scales = (absmax / half_range).to(dtype).float()
    smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}[dtype]
    scales = scales.clamp(min=smallest)
    return torch.where(absmax == 0, torch.ones_like(scales), scales)


def _check_quantized(weight, scales, zeros) -> None:
    for name, array in (("weight", weight), ("scales", scales), ("zeros", zeros)):
        if name == "zeros" and array is None:
            continue
        check_array(name, array, differentiable=True)
        if is_torch(array) != is_torch(weight):
            refuse(f"{name} is {type(array).__name__}", f"weight is {type(weight).__name__}", "Pass arrays of one kind.")
        if device_of(array) != device_of(weight):
            refuse(f"{name} is on {array.device}", f"weight is on {weight.device}", "Pass tensors of one device.")
    check_axes("weight", weight, (2,), "[out_features, in_features], or [out_features, in_features / 2]")
    format = format_of(weight)
    if format == "float":
        refuse(f"weight is {type_name(weight.dtype)}", "quantized ones are int8 or uint8", "Pass what quantize_weight() made.")
    if format == "int8" and zeros is not None:
        refuse("zeros are given", "only INT4 weights, of dtype uint8, have zeros", "Leave them out.")
    form = (weight.shape[0],) if format == "int8" else (weight.shape[0], 2 * weight.shape[1] // GROUP)
    if format == "int4" and 2 * weight.shape[1] % GROUP:
        refuse(f"weight is {list(weight.shape)}", f"INT4 has a scale for each {GROUP} features", "Pass the whole weight.")
    for name, array, dtype in (("scales", scales, "float32"), ("zeros", zeros, "uint8")):
        if array is not None and (tuple(array.shape) != form or type_name(array.dtype) != dtype):
            refuse(f"{name} is {type_name(array.dtype)} {list(array.shape)}", f"weight has {dtype} {list(form)}",
                   "Pass those of one quantize_weight().")  # fmt: skip


def dequantize_weight(weight, scales, zeros=None):
    """Dequantizes a weight, with PyTorch.

    Args:
        weight: int8 [out_features, in_features], or uint8 [out_features, in_features / 2].
        scales: float32 [out_features], or [out_features, in_features / 128].
        zeros: uint8, as scales, for uint8 weights. None: all are 8.

    Returns:
        float32 [out_features, in_features].

    Raises:
        UsageError: weight is neither int8 nor uint8, or the shapes or dtypes do not match.
        ImportError: PyTorch is missing.

    Formula:
        scale * (value - zero) (docs/linear.md).

    Example:
        >>> weight = np.eye(4, 128, dtype="float32")
        >>> error = ringattn.dequantize_weight(*ringattn.quantize_weight(weight, "int4")) - weight
        >>> float(abs(error).max()) < 0.1
        True
    """
    _check_quantized(weight, scales, zeros)
    if not is_torch(weight):
        torch = _torch()
        given = (None if array is None else torch.from_numpy(np.ascontiguousarray(array)) for array in (weight, scales, zeros))
        return dequantize_weight(*given).numpy()
    torch = loaded_torch()
    if weight.dtype == torch.int8:
        return weight.float() * scales[:, None]
    values = torch.stack((weight & 15, weight >> 4), 2).flatten(1).float().unflatten(1, (-1, GROUP))
    middle = 8.0 if zeros is None else zeros.float()[..., None]
    return ((values - middle) * scales[..., None]).flatten(1)
