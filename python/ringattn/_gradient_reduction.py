# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over ranks with different tokens, with the same bits for any number of ranks.

    leaves = ringattn.gradient_leaves(world.size, world.rank)
    gradients = (torch.autograd.grad(loss_of(leaf), parameters) for leaf in leaves)
    total = ringattn.reduce_gradients(parameters, gradients, world=world)

docs/linear.md has the arithmetic and a training loop."""

import ctypes
import math
from collections.abc import Iterable

import numpy as np

from . import _gradients, _job, _structs
from ._abi import lib
from ._arguments import as_int
from ._errors import refuse, unsupported
from ._linear import LEAVES, options_of
from ._loaded_torch import loaded_torch
from ._tensors import View, device_of, empty, is_torch, kind_of, type_name
from .worlds import World


class GradientReduction(_job.Prepared):
    """A prepared sum of gradients with a given number of elements. Creating one is collective."""

    op = "gradient_reduction"

    def __init__(self, world: World, elements: int, parameters: bytes, options: _structs.options):
        super().__init__(world, elements, parameters, options)
        self._gradient = View()

    def reset(self) -> None:
        """Forgets the leaves of a call that failed."""
        self.turn.run(lambda: lib.gradient_reduction_reset(self.handle))

    def add(self, gradient, like) -> None:
        """Adds the gradient of the rank's next leaf, fp32 [elements]; None if the leaf has no tokens. like: any array on the
        device."""

        def call():
            if gradient is not None:
                self._gradient.show(gradient)
            view = None if gradient is None else ctypes.c_void_p(self._gradient.address)
            self.on_stream(like, lambda stream: lib.gradient_reduction_add(self.handle, view, stream))

        self.turn.run(call)


def gradient_leaves(ranks: int, rank: int) -> range:
    """The token leaves of a rank. reduce_gradients() divides the tokens of a training step into 8 leaves. With more than 8
    ranks, some ranks have none.

    Args:
        ranks, rank: number of ranks of the world, and the rank.

    Returns:
        A range of leaves, 0 to 7.

    Raises:
        UsageError: there is no such rank.

    Formula:
        range(8 * rank // ranks, 8 * (rank + 1) // ranks) (docs/linear.md).

    Example:
        >>> [list(ringattn.gradient_leaves(3, rank)) for rank in range(3)]
        [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    ranks, rank = as_int(ranks, "ranks"), as_int(rank, "rank")
    if not 0 <= rank < ranks:
        refuse(f"rank {rank} of {ranks} has no leaves", "ranks are counted from 0", "Check them.")
    return range(LEAVES * rank // ranks, LEAVES * (rank + 1) // ranks)


_FLOATING = ("float32", "float16", "bfloat16")


def _listed(values, name: str, suggestion: str):
    try:
        return iter(values)
    except TypeError:
        refuse(f"{name} is {type(values).__name__}", "it is a list, or a generator", suggestion)


def _flat(leaf: int, gradients, parameters: list):
    """A leaf's gradients as one fp32 array, in the order of the parameters. Gradients that the leaf does not have are zeros."""
    gradients = list(_listed(gradients, f"leaf {leaf}", "Give a gradient for each parameter, or None for the whole leaf."))
    if len(gradients) != len(parameters):
        refuse(f"leaf {leaf} has {len(gradients)} gradients", f"there are {len(parameters)} parameters",
               "Give one for each, and None for one without a gradient.")  # fmt: skip
    _gradients.refuse_transforms(gradients)
    torch, flat = loaded_torch(), []
    for place, (gradient, parameter) in enumerate(zip(gradients, parameters)):
        if gradient is None:
            flat.append(_zeros(parameter))
            continue
        fits = isinstance(gradient, kind_of(parameter)) and tuple(gradient.shape) == tuple(parameter.shape)
        if not fits:
            refuse(f"gradient {place} of leaf {leaf} is {type(gradient).__name__} {list(getattr(gradient, 'shape', []))}",
                   f"parameter {place} is {type(parameter).__name__} {list(parameter.shape)}", "Check their order.")  # fmt: skip
        if type_name(gradient.dtype) not in _FLOATING:
            refuse(f"gradient {place} of leaf {leaf} is {type_name(gradient.dtype)}",
                   "float32, float16 and bfloat16 are added", "Convert it.")  # fmt: skip
        if is_torch(gradient) and gradient.device != parameter.device:
            refuse(f"gradient {place} of leaf {leaf} is on {gradient.device}", f"parameter {place} is on {parameter.device}",
                   "Move it to the parameter's device.")  # fmt: skip
        if is_torch(gradient):
            if gradient.layout is not torch.strided:
                unsupported(f"gradient {place} of leaf {leaf} is of layout {gradient.layout}", "it is not strided",
                            "Make it dense, as torch.nn.Embedding(sparse=False) does.")  # fmt: skip
            flat.append(gradient.detach().reshape(-1).float())
        else:
            flat.append(np.asarray(gradient).reshape(-1).astype("float32"))
    return torch.cat(flat) if is_torch(flat[0]) else np.concatenate(flat)


def _result_dtype(parameter):
    return _gradients.dtype_of(parameter) if is_torch(parameter) else parameter.dtype


def _zeros(parameter):
    count = math.prod(parameter.shape)
    return loaded_torch().zeros(count, device=parameter.device) if is_torch(parameter) else np.zeros(count, "float32")


def reduce_gradients(parameters: Iterable, gradients: Iterable, *, world: World | None = None, threads: int = 0,
                     timeout: float = 60.0) -> list:  # fmt: skip
    """Sums gradients over all tokens of a training step, which the ranks have divided into 8 contiguous leaves. The sums have
    the same bits on every rank and for any number of ranks, if the gradients of each leaf do. Collective.

    Args:
        parameters: give the shapes, dtypes and the device of the results, in the same order on all ranks.
        gradients: an iterable with one item for each of this rank's gradient_leaves(), in order: the leaf's gradients, one for
            each parameter, or None for a leaf without tokens, which is left out. A generator is asked for a leaf after the leaf
            before it has been added. A gradient that is None is zero. float32, float16 or bfloat16.
        world: the ranks with different tokens. None: only this one, which has all leaves.
        threads, timeout: as in linear().

    Returns:
        A list of the sums, like parameters: of the parameter's shape and dtype, or of its grad_dtype if that is float32.

    Raises:
        UsageError: gradients do not match this rank's leaves or the parameters.
        UnsupportedError: the parameters of ranks differ in shape, dtype or order.
        PeerError: another rank failed, or sent no heartbeat for `timeout` seconds.

    Formula:
        Leaves are added in fp32 by the tree ((0+1)+(2+3))+((4+5)+(6+7)), and rounded once (docs/linear.md).

    Example:
        >>> parameters, gradients = [np.zeros(3, "float16")], ([np.full(3, leaf, "float32")] for leaf in range(8))
        >>> ringattn.reduce_gradients(parameters, gradients)[0].tolist()
        [28.0, 28.0, 28.0]
    """
    parameters = list(_listed(parameters, "parameters", "Pass list(model.parameters())."))
    gradients = _listed(gradients, "gradients", "Pass those of each of this rank's leaves.")
    if not parameters:
        refuse("there are no parameters", "gradients have their shapes", "Pass list(model.parameters()).")
    for place, parameter in enumerate(parameters):
        if not (is_torch(parameter) or isinstance(parameter, np.ndarray)):
            refuse(f"parameter {place} is {type(parameter).__name__}", "it should be a NumPy array or a PyTorch tensor",
                   "Pass list(model.parameters()).")  # fmt: skip
        if kind_of(parameter) is not kind_of(parameters[0]) or device_of(parameter) != device_of(parameters[0]):
            refuse(f"parameter {place} is on another device than the first one", "one call adds gradients of one device",
                   "Call it for each device.")  # fmt: skip
        if type_name(parameter.dtype) not in _FLOATING:
            refuse(f"parameter {place} is {type_name(parameter.dtype)}", "sums are fp32, rounded to float32, float16 or bfloat16",
                   "Leave it out, or convert it.")  # fmt: skip
    like = parameters[0]
    own = _job.world_of(like, world)
    elements = sum(math.prod(parameter.shape) for parameter in parameters)
    text = ", ".join(f"{type_name(_result_dtype(parameter))} {list(parameter.shape)}" for parameter in parameters)
    prepared = own.prepared(("gradient_reduction", text, threads, timeout),
                            lambda: GradientReduction(own, elements, text.encode(), options_of(threads, timeout)))  # fmt: skip
    if prepared.in_use:
        refuse("reduce_gradients() is called by its own gradients", "the leaves of both sums would be mixed",
               "Call it after the first sum is complete.")  # fmt: skip
    first = gradient_leaves(own.size, own.rank).start
    total = empty(like, (elements,), "float32")
    prepared.in_use += 1  # the generator may prepare any number of other ops before the next leaf
    try:
        prepared.reset()
        for place, of_leaf in enumerate(gradients):
            prepared.add(None if of_leaf is None else _flat(first + place, of_leaf, parameters), like)
        prepared._do(total, {"sum": total})
    finally:
        prepared.in_use -= 1
    sums, begin = [], 0
    for parameter in parameters:
        end = begin + math.prod(parameter.shape)
        part = total[begin:end].reshape(parameter.shape)
        dtype = _result_dtype(parameter)
        sums.append(part.to(dtype) if is_torch(part) else part.astype(dtype, copy=False))
        begin = end
    return sums
