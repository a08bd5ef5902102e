# SPDX-License-Identifier: Apache-2.0
"""ringattn.nn.quantize_(): quantizes a model's linear layers in place, and reports on each."""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _linear
from ._arguments import as_threads
from ._errors import refuse

# Rows of a layer's input from which the error of its output is computed.
_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class LayerReport:
    """What quantize_() did with one torch.nn.Linear.

    Attributes:
        name: name in model.named_modules().
        weights: "int8" or "int4"; "kept" if the layer was not quantized.
        reason: why it was kept; "" otherwise.
        bytes_before, bytes_after: bytes of its parameters and buffers.
        weight_error: |dequantized - weight| / |weight|, Frobenius norms; None if it was kept.
        output_error: the same for the layer's output with the sample input; None without a sample."""

    name: str
    weights: str
    reason: str
    bytes_before: int
    bytes_after: int
    weight_error: float | None = None
    output_error: float | None = None


@dataclass
class QuantizationReport:
    """The report of quantize_(), an iterable of LayerReports in the order of the model's modules. report[name] finds a layer by
    name, and str() makes a table.

    Attributes:
        rows: a LayerReport for each torch.nn.Linear."""

    rows: list[LayerReport] = field(default_factory=list)

    def __getitem__(self, name: str) -> LayerReport:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes_before(self) -> int:
        """Bytes of all layers before."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all layers after."""
        return sum(row.bytes_after for row in self.rows)

    def __str__(self) -> str:
        def shown(error: float | None) -> str:
            return "" if error is None else f"{error:.2%}"

        lines = [("layer", "weights", "bytes before", "bytes after", "weight error", "output error", "")]
        lines += [(row.name, row.weights, f"{row.bytes_before:,}", f"{row.bytes_after:,}", shown(row.weight_error),
                   shown(row.output_error), row.reason) for row in self.rows]  # fmt: skip
        lines.append(("total", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(cell.ljust(width) if place in (0, 1, 6) else cell.rjust(width)
                      for place, (cell, width) in enumerate(zip(line, widths))).rstrip()
            for line in lines
        )  # fmt: skip


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def _matches(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches the module's name: the whole name, its end from a dot on, or "re:" and a regular expression
    that matches its beginning, as in compressed-tensors."""
    for pattern in patterns:
        if re.match(pattern[3:], name) if pattern.startswith("re:") else name == pattern or name.endswith("." + pattern):
            return pattern
    return None


def _holders(model: torch.nn.Module) -> dict:
    """The names of the modules that hold a parameter, by its memory."""
    held: dict = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                held.setdefault(_memory(parameter), []).append(name)
    return held


def _memory(parameter: Tensor):
    return id(parameter) if parameter.is_meta else parameter.untyped_storage()


def _why_kept(model, name: str, module, weights: str, filter_fn, ignore, heads: set, holders: dict) -> str:
    """Why a layer is not quantized; "" if it is."""
    pattern = _matches(name, ignore)
    others = [other or "the model" for other in holders.get(_memory(module.weight), ()) if other != name]
    if pattern is not None:
        return f'ignore has "{pattern}"'
    if name.rpartition(".")[2] == "lm_head" or module in heads:
        return "the output head"
    if type(module) is not torch.nn.Linear:
        return f"a subclass of torch.nn.Linear, {type(module).__name__}"
    if filter_fn is not None and not filter_fn(module, name):
        return "filter_fn said no"
    if others:
        return f"its weight is shared with {others[0]}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks, which a new layer would lose"
    if module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}"
    if weights == "int4" and module.in_features % _linear.GROUP:
        return f"its {module.in_features} features are not a multiple of {_linear.GROUP}"
    return ""


def _patterns(ignore) -> tuple[str, ...]:
    try:
        patterns = tuple(ignore)
    except TypeError:
        refuse(f"ignore is {type(ignore).__name__}", "it is a list of names", 'Pass ignore=["lm_head"], or leave it out.')
    for pattern in patterns:
        if not isinstance(pattern, str):
            refuse(f"ignore has {pattern!r}", "names are strings", "Pass names of layers.")
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except re.error as error:
            refuse(f'ignore has "{pattern}"', f"it is not a regular expression: {error}", "Check it.")
    return patterns


def _check_ignore(patterns: tuple[str, ...], found: dict) -> None:
    """Refuses a pattern that matches no layer, as `ringattn quantize` does, because it may be misspelt."""
    for pattern in patterns:
        if pattern == "lm_head" or any(_matches(name, (pattern,)) for name in found):  # tied models have no lm_head
            continue
        ends = {name.rpartition(".")[2] for name in found}
        near = difflib.get_close_matches(pattern, [*found, *sorted(ends)], 1)
        refuse(f'ignore names "{pattern}"', "no torch.nn.Linear of the model is called so",
               f'Did you mean "{near[0]}"?' if near else "Give whole names, or their ends from a dot on.")  # fmt: skip


def _refuse_all(model: torch.nn.Module, reasons: dict[str, str], linear) -> None:
    """Refuses a model without a layer to quantize, with the reason."""
    problem = "no layer of the model is quantized"
    for name, module in model.named_modules():
        if type(module) is linear and module.weights != "float":
            refuse(problem, f"it is quantized already: {name} has {module.weights} weights", "Use it as it is.")
        if type(module).__name__ == "Conv1D" and not isinstance(module, torch.nn.Conv1d):
            refuse(problem, f"{name} is a Conv1D of transformers, as GPT-2 has them, whose weight is transposed",
                   "Replace such layers by torch.nn.Linear ones of weight.t() first.")  # fmt: skip
    why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3]) or "it has no torch.nn.Linear"
    refuse(problem, why, "Check filter_fn, ignore and the model.")


def _check(name: str, module: torch.nn.Linear) -> None:
    if module.weight.is_meta:
        refuse(f"{name}.weight is on the meta device", "it has no elements to quantize",
               "Load the model first, without disk offload.")  # fmt: skip
    if not bool(module.weight.detach().isfinite().all()):
        row, column = (int(i) for i in (~module.weight.detach().isfinite()).nonzero()[0])
        refuse(f"{name}.weight[{row}, {column}] is {float(module.weight.detach()[row, column])}", "a scale can't hold it",
               "Check the checkpoint, or name the layer in ignore.")  # fmt: skip


def _relative(error: Tensor, of: Tensor) -> float:
    """|error| / |of|; 0 if both are 0."""
    norm = float(of.double().norm())
    return float(error.double().norm()) / norm if norm else 0.0


def _inputs(model, layers: dict, sample) -> dict:
    """Rows of the input and the output of each layer, from a run of the model."""
    seen: dict = {}

    def keep(name):
        def hook(_, given, output):
            if name not in seen:
                rows, results = given[0].detach(), output.detach()
                seen[name] = tuple(x.reshape(-1, x.shape[-1])[:_SAMPLE_ROWS].clone() for x in (rows, results))

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
    try:
        with torch.no_grad():
            if isinstance(sample, Tensor):
                model(sample)
            elif hasattr(sample, "keys"):
                model(**sample)
            else:
                model(*sample)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def quantize_(model: torch.nn.Module, weights: str, *, filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
              ignore: Iterable[str] = (), sample=None, threads: int = 0) -> QuantizationReport:  # fmt: skip
    """Replaces the torch.nn.Linear layers of a model by ringattn.nn.Linear ones with quantized weights, in place. Weights are
    rounded to the nearest value (ringattn.quantize_weight()). All layers are checked before the first is replaced.

    Args:
        model: any module; in evaluation mode if a sample is given.
        weights: "int8" (W8A8: inputs are quantized for each row) or "int4" (W4A16, groups of 128).
        filter_fn: filter_fn(module, name) says whether a layer is quantized. None: all are.
        ignore: names of layers that are kept, or "re:" and a regular expression that the beginning of a name matches. "gate"
            names each layer of that name. lm_head and the model's get_output_embeddings() are always kept.
        sample: an input of the model, for the error of each layer's output: a tensor, a tuple of arguments, or a dict of
            keywords. The error is that of one layer alone, over the first 256 rows that it is given.
        threads: of a layer's calls on a CPU. 0: all processors.

    Returns:
        A QuantizationReport with a row for each torch.nn.Linear: its bytes before and after, its errors, or why it was kept.
        Layers that share their weight with another module, subclasses of torch.nn.Linear and layers with hooks are also kept.
        So are, with "int4", layers whose in_features is not a multiple of 128.

    Raises:
        UsageError: no layer can be quantized, the model itself is a layer, ignore names no layer, or a weight is on the meta
            device or has a NaN or an infinite element.

    Formula:
        As in ringattn.quantize_weight().

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 8))
        >>> [(row.name, row.weights) for row in ringattn.nn.quantize_(model, "int4")]
        [('0', 'int4'), ('1', 'kept')]
    """
    from .nn import Linear  # noqa: PLC0415, which imports this

    _linear.chosen("weights", weights, _linear.FORMATS[1:])
    if not isinstance(model, torch.nn.Module):
        refuse(f"model is {type(model).__name__}", "it should be a torch.nn.Module", "Pass the model, then the format.")
    if filter_fn is not None and not callable(filter_fn):
        refuse(f"filter_fn is {type(filter_fn).__name__}", "it is called as filter_fn(module, name)",
               "Pass a function, or leave it out.")  # fmt: skip
    if isinstance(model, torch.nn.Linear):
        refuse("the model itself is a torch.nn.Linear", "layers are replaced in the modules that hold them",
               f'Use ringattn.nn.Linear.from_linear(model, weights="{weights}").')  # fmt: skip
    if sample is not None and not (isinstance(sample, Tensor) or hasattr(sample, "keys") or hasattr(sample, "__iter__")):
        refuse(f"sample is {type(sample).__name__}", "it is a tensor, a tuple of arguments, or a dict of keywords",
               "Pass an input of the model, or leave it out.")  # fmt: skip
    threads = as_threads(threads)
    if isinstance(ignore, str):
        refuse(f"ignore is {ignore!r}", "it is a list of names", f'Pass ignore=["{ignore}"].')
    ignore = _patterns(ignore)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads, holders = {output}, _holders(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    _check_ignore(ignore, found)
    reasons = {name: _why_kept(model, name, module, weights, filter_fn, ignore, heads, holders)
               for name, module in found.items()}  # fmt: skip
    chosen = {name: module for name, module in found.items() if not reasons[name]}
    if not chosen:
        _refuse_all(model, reasons, Linear)
    for name, module in chosen.items():
        _check(name, module)
    seen = {} if sample is None else _inputs(model, chosen, sample)
    report = QuantizationReport()
    for name, module in found.items():
        before = _bytes_of(module)
        if name not in chosen:
            report.rows.append(LayerReport(name, "kept", reasons[name], before, before))
            continue
        made = Linear.from_linear(module, weights=weights, threads=threads)
        weight = module.weight.detach().float()
        error = _relative(_linear.dequantize_weight(made.weight, made.scales) - weight, weight)
        of_output = None
        if name in seen:
            rows, results = seen.pop(name)
            with torch.no_grad():
                of_output = _relative(made(rows).float() - results.float(), results.float())
        _replace(model, module, made)
        report.rows.append(LayerReport(name, weights, "", before, _bytes_of(made), error, of_output))
    return report


def _replace(model: torch.nn.Module, module: torch.nn.Module, made: torch.nn.Module) -> None:
    """Replaces every occurrence of `module` in the model by `made`."""
    for holder in model.modules():
        for name, child in tuple(holder._modules.items()):
            if child is module:
                setattr(holder, name, made)
