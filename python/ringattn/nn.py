# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules over ringattn's ops.

    layer = ringattn.nn.Linear.from_linear(torch_linear)
    report = ringattn.nn.quantize_(model, "int4")
    print(report)"""

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _linear
from ._arguments import as_int, as_threads, is_true
from ._errors import refuse
from ._linear import FORMATS, GATED, GROUP, UNIT
from ._parallelize_model import parallelize_
from ._quantize_model import LayerReport, QuantizationReport, quantize_
from .worlds import World

__all__ = ["LayerReport", "Linear", "QuantizationReport", "parallelize_", "quantize_"]


def _kind(module) -> str:
    """The type's name in messages, which must distinguish ringattn.nn.Linear from torch.nn.Linear."""
    return "a ringattn.nn.Linear" if isinstance(module, Linear) else type(module).__name__


class _Kept:
    """Holds a world in a module, so that copies of the module share it."""

    def __init__(self, world: World | None):
        self.world = world

    def __deepcopy__(self, _):
        return self


class Linear(torch.nn.Module):
    """torch.nn.Linear with a fused activation, quantized weights and tensor parallelism. A row of its output has the same bits in
    any batch, and for any number of ranks that share the layer.

    Args:
        in_features, out_features: of the whole layer. A gated layer's weight has 2 · out_features rows, the gate's first.
        bias: whether there is a bias.
        activation, parallel, output, column_unit, world, threads, timeout: as in ringattn.linear().
        weights: "float", "int8" or "int4". Quantized weights are buffers without gradients.
        device, dtype: as in torch.nn.Linear. With quantized weights, dtype is the dtype of the bias and of x.

    Shapes:
        x: [..., in_features], or this rank's ringattn.linear_features() of a row-parallel layer.
        weight: [rows, features] of this rank. "int4": uint8 [rows, features / 2].
        scales: float32 [rows] ("int8") or [rows, features / 128] ("int4").
        zeros: uint8, or None.
        bias: [rows], or None.

    Returns:
        As ringattn.linear().

    Raises:
        UsageError: a state dict has neither this rank's shard nor the tensors of the whole layer, which the rank cuts as
            ringattn.linear_columns() and ringattn.linear_features() say.

    Formula:
        As in ringattn.linear().

    Example:
        >>> up = ringattn.nn.Linear(64, 128, activation="swiglu")
        >>> up.weight.shape, up(torch.ones(10, 64)).shape
        (torch.Size([256, 64]), torch.Size([10, 128]))
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, activation: str = "none",
                 parallel: str = "none", output: str = "shard", weights: str = "float", column_unit: int = 0,
                 world: World | None = None, threads: int = 0, timeout: float = 60.0, device=None, dtype=None):  # fmt: skip
        super().__init__()
        for name, value, known in (("activation", activation, _linear.ACTIVATIONS), ("parallel", parallel, _linear.PARALLEL),
                                   ("output", output, _linear.OUTPUTS), ("weights", weights, FORMATS)):  # fmt: skip
            _linear.chosen(name, value, known)
        in_features, out_features = as_int(in_features, "in_features"), as_int(out_features, "out_features")
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                refuse(f"{name} is {value}", "a layer has at least one feature", "Check it.")
        if world is not None and not isinstance(world, World):
            refuse(f"world is {type(world).__name__}", "it should be a ringattn.World, a group of ranks",
                   "Make one, or leave it out.")  # fmt: skip
        column_unit = as_int(column_unit, "column_unit")
        if weights == "int4" and in_features % GROUP:
            refuse(f"a layer of {in_features} features can't have INT4 weights", f"they have a scale for each {GROUP}",
                   'Use weights="int8".')  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.activation, self.parallel, self.output, self.weights = activation, parallel, output, weights
        self.column_unit, self.threads, self.timeout = column_unit, as_threads(threads), timeout
        self._world = _Kept(world)
        ranks, rank = (1, 0) if world is None else (world.size, world.rank)
        unit = GROUP if weights == "int4" else UNIT
        bias = is_true("bias", bias)
        self.columns, self.features = (0, out_features), (0, in_features)
        if parallel == "column":
            self.columns = _linear.linear_columns(out_features, ranks, rank, unit=column_unit or unit)
        if parallel == "row":
            self.features = _linear.linear_features(in_features, ranks, rank, unit=unit)
        rows = (self.columns[1] - self.columns[0]) * (2 if activation in GATED else 1)
        features = self.features[1] - self.features[0]
        like = {"device": device, "dtype": dtype}
        if weights == "float":
            self.weight = Parameter(torch.empty(rows, features, **like))
            self.bias = Parameter(torch.empty(rows, **like)) if bias else None
            self.scales = self.zeros = None
            self.reset_parameters()
            return
        width, kind = (features, torch.int8) if weights == "int8" else (features // 2, torch.uint8)
        groups = (rows,) if weights == "int8" else (rows, features // GROUP)
        self.register_buffer("weight", torch.zeros(rows, width, device=device, dtype=kind))
        self.register_buffer("scales", torch.ones(groups, device=device, dtype=torch.float32))
        self.register_buffer("zeros", None)
        self.register_buffer("bias", torch.zeros(rows, **like) if bias else None)

    @property
    def world(self) -> World | None:
        """The ranks that share the layer, or None for only this one."""
        return self._world.world

    def reset_parameters(self) -> None:
        """Initializes the parameters of this rank's shard randomly, as torch.nn.Linear does."""
        if self.weight.numel() == 0:
            return
        bound = self.in_features**-0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, up: torch.nn.Linear | None = None, activation: str = "none",
                    parallel: str = "none", output: str = "shard", weights: str = "float", column_unit: int = 0,
                    world: World | None = None, threads: int = 0, timeout: float = 60.0) -> "Linear":  # fmt: skip
        """Makes a Linear from a torch.nn.Linear of the whole layer. It shares the parameters, unless it keeps only this rank's
        part of them, or quantizes them.

        Args:
            linear: the layer. With a gated activation, the gate, or the gate and up matrices stacked.
            up: the up matrix of a gated layer, if it is a separate layer. Both are then copied.
            weights: "float", "int8" or "int4" (ringattn.quantize_weight()).
            activation, parallel, output, column_unit, world, threads, timeout: as in Linear.

        Returns:
            A Linear, in training mode if linear is.

        Raises:
            UsageError: a parameter is on the meta device, or a weight to quantize has a NaN or an infinite element.

        Example:
            >>> gate, up = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)
            >>> ringattn.nn.Linear.from_linear(gate, up=up, activation="swiglu")
            Linear(in_features=64, out_features=128, bias=True, activation=swiglu)
        """
        for name, layer in (("linear", linear), ("up", up)):
            if layer is not None and not isinstance(layer, torch.nn.Linear) or layer is linear is None:
                refuse(f"{name} is {_kind(layer)}", "it should be a torch.nn.Linear", "Pass one.")
        weight, bias = linear.weight, linear.bias
        if weight.is_meta:
            refuse("the layer's weight is on the meta device", "it has no elements", "Load the model first.")
        gated = activation in GATED
        if up is not None:
            if not gated or up.weight.shape != weight.shape or (up.bias is None) != (bias is None):
                refuse("up is given", "it is the second matrix of a gated layer, like the first one",
                       "Check activation and both layers.")  # fmt: skip
            weight = Parameter(torch.cat([weight.detach(), up.weight.detach()]))
            bias = None if bias is None else Parameter(torch.cat([bias.detach(), up.bias.detach()]))
        rows, features = weight.shape
        if gated and rows % 2:
            refuse(f"the layer has {rows} rows", f"{activation} has a gate matrix and an up matrix of as many rows", "Check it.")
        made = cls(features, rows // 2 if gated else rows, bias is not None, activation=activation, parallel=parallel,
                   output=output, weights=weights, column_unit=column_unit, world=world, threads=threads, timeout=timeout,
                   device="meta", dtype=weight.dtype)  # fmt: skip
        given = {"weight": weight, "bias": bias}
        if weights != "float":
            quantized = _linear.quantize_weight(weight, weights)
            given |= {"weight": quantized.weight, "scales": quantized.scales}
        for name, whole in given.items():
            if whole is None:
                continue
            part = made._cut(name, whole)
            if weights == "float":
                part = whole if part is whole else Parameter(part.detach().clone(), whole.requires_grad)
            else:
                part = part.detach().clone() if name == "bias" or part is not whole else part
            setattr(made, name, part)
        return made.train(linear.training)

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole layer; the tensor itself if the rank has all of it."""
        (begin, end), (first, last) = self.columns, self.features
        gated = self.activation in GATED
        part = whole
        if end - begin < self.out_features:
            halves = whole.chunk(2) if gated else (whole,)
            part = torch.cat([half[begin:end] for half in halves]) if gated else whole[begin:end]
        if last - first < self.in_features and whole.ndim == 2:
            divisor = {"weight": 2 if self.weights == "int4" else 1}.get(name, GROUP)
            part = part[:, first // divisor : last // divisor]
        return part

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        rows = self.out_features * (2 if self.activation in GATED else 1)
        if getattr(self, name).ndim == 1:
            return (rows,)
        divisor = {"weight": 2 if self.weights == "int4" else 1}.get(name, GROUP)
        return rows, self.in_features // divisor

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        own = dict(state_dict)
        asymmetric = own.get(prefix + "zeros") is not None
        if self.weights == "int4" and self.zeros is None and asymmetric:
            self.zeros = torch.full_like(self.scales, 8, dtype=torch.uint8)  # None means that all zero points are 8
        for name in ("weight", "scales", "zeros", "bias"):
            given, held = own.get(prefix + name), getattr(self, name)
            if given is None or held is None:
                continue
            if given.is_floating_point() != held.is_floating_point() or given.dtype.itemsize < 2 and given.dtype != held.dtype:
                error_msgs.append(f"{prefix}{name} is {given.dtype} (the layer's weights are {self.weights}). "
                                  "Quantize the model that it comes from by ringattn.nn.quantize_(), or load it into a layer of "
                                  "float weights.")  # fmt: skip
                return
            if given.shape != held.shape and tuple(given.shape) == self._whole_shape(name):
                own[prefix + name] = self._cut(name, given)
        if not asymmetric and prefix + "weight" in own:  # zeros belong to the replaced weight
            self.zeros = None
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _apply(self, fn, recurse=True):
        scales = self.scales
        super()._apply(fn, recurse)
        if scales is not None and self.scales.dtype != torch.float32:  # as half() would have them
            self.scales = scales.to(self.scales.device) if not scales.is_meta else self.scales.float()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """ringattn.linear() of x."""
        x, weight, bias = _linear.autocast(x, self.weight, self.bias)
        settings = {"activation": self.activation, "parallel": self.parallel, "output": self.output,
                    "in_features": self.in_features, "out_features": self.out_features, "column_unit": self.column_unit,
                    "world": self._world.world, "threads": self.threads, "timeout": self.timeout}  # fmt: skip
        if torch.compiler.is_compiling():
            from . import torch_linear_ops  # noqa: PLC0415, registers the operator

            return torch_linear_ops.called(x, weight, bias, self.scales, self.zeros, settings)
        return _linear.dispatch(x, weight, bias, self.scales, self.zeros, None, settings)

    def extra_repr(self) -> str:
        named = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        for name, usual in (("activation", "none"), ("weights", "float"), ("parallel", "none")):
            value = getattr(self, name)
            named += "" if value == usual else f", {name}={value}"
        return named
