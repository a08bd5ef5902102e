# SPDX-License-Identifier: Apache-2.0
"""ringattn.quantized.load_(): a whole quantized model from its files."""

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _safetensors
from ._arguments import as_threads, shown
from ._errors import FileError, refuse

_FLOATING = ("F32", "F16", "BF16", "F64")
# Name suffixes of tensors that only quantized layers have.
_MARKS = (".weight_packed", ".qweight", ".weight_scale")
# All that read_layer() reads or checks.
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qweight", "qzeros",
          "scales", "g_idx", "bias")  # fmt: skip


@dataclass
class LoadReport:
    """The result of load_(). str() makes a table of it.

    Attributes:
        layers: the format of each quantized layer, such as "pack-quantized", "gptq" or "awq", by its name in the model.
        tensors: names of the other parameters and buffers that were read.
        missing: the model's parameters and buffers that the files lack. If they are on the meta device, they stay there.
        unexpected: tensors of the files that the model does not have. They were not read."""

    layers: dict[str, str] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        formats = sorted(set(self.layers.values()))
        counts = ", ".join(f"{list(self.layers.values()).count(format)} layers of {format}" for format in formats)
        lines = [f"{counts or 'no quantized layers'}, {len(self.tensors)} other tensors"]
        for title, names in (("missing in the files", self.missing), ("not in the model", self.unexpected)):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        return "\n".join(lines)


def _file_of(path: str) -> str:
    """As weights_file() of the library (src/io/layer_tensors.cpp)."""
    if not os.path.isdir(path):
        return path
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if os.path.exists(os.path.join(path, name)):
            return os.path.join(path, name)
    raise FileError(f"{path} has neither model.safetensors nor its index", "a model's folder has one of them",
                    "Name the file that has the weights.")  # fmt: skip


def _quantized_names(files: _safetensors.Tensors) -> list[str]:
    """Names of layers that are quantized, in any format, including formats that read_layer() refuses."""
    found = set()
    for name in files.names():
        layer, _, part = name.rpartition(".")
        if name.endswith(_MARKS) or part == "weight" and files.kind(name) not in _FLOATING:
            found.add(layer)
    return sorted(found)


def _check_read_formats(files: _safetensors.Tensors, modules: dict, read: dict) -> None:
    """Refuses files in which a layer of the model is stored in an unsupported format, such as HQQ's W_q."""
    parts: dict = {}
    for tensor in files.names():
        layer, _, part = tensor.rpartition(".")
        parts.setdefault(layer, []).append(part)
    for name, module in modules.items():
        found = [part for part in parts.get(name, ()) if part != "bias"]
        found += [f"weight.{part}" for part in parts.get(f"{name}.weight", ())]
        if isinstance(module, torch.nn.Linear) and name not in read and found and "weight" not in found:
            refuse(f"{name} is quantized in a format that is not read", f"the files have its {', '.join(found)}, and no weight",
                   "Quantize the floating-point model with `ringattn quantize`.")  # fmt: skip


def _check_layer(name: str, module, layer, linear, shared_with: str | None) -> None:
    """Refuses a layer that can't replace the model's `module`. shared_with: the other tensor that shares its weight."""
    if type(module) is not torch.nn.Linear and type(module) is not linear:
        kind = "nothing of that name" if module is None else f"a {type(module).__name__} there"
        refuse(f"{name} is quantized in the files", f"the model has {kind}, and only torch.nn.Linear layers are replaced",
               "Build the model that the files are of, with one torch.nn.Linear for each of its layers.")  # fmt: skip
    if type(module) is linear and (module.activation, module.parallel) != ("none", "none"):
        refuse(f"{name} is a ringattn.nn.Linear with {module.activation} and parallel {module.parallel}",
               "files have ordinary layers without an activation", "Build the model with torch.nn.Linear layers.")  # fmt: skip
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        refuse(f"{name} has hooks", "a new layer would lose them", "Load the model first, and then add them.")
    if shared_with is not None:
        refuse(f"{name} is quantized in the files", f"its weight is also the model's {shared_with}",
               "Build the model with tie_word_embeddings=False.")  # fmt: skip
    if (layer.out_features, layer.in_features) != (module.out_features, module.in_features):
        refuse(f"{name} is [{layer.out_features}, {layer.in_features}] in the files",
               f"the model's is [{module.out_features}, {module.in_features}]", "Build the model with the files' config.json.")
    if module.bias is not None and layer.bias is None:
        refuse(f"{name} has no bias in the files", "the model's has one", "Build the model with the files' config.json.")
    if module.bias is None and layer.bias is not None and bool(layer.bias.any()):
        refuse(f"{name} has a bias in the files", "the model's has none", "Build the model with the files' config.json.")


def _made(module, layer, linear, device, threads: int):
    """Makes the module that replaces `module` from a layer of the files."""
    on_meta = module.weight.is_meta
    place = device if on_meta else module.weight.device
    bias = None if module.bias is None else layer.bias  # AutoGPTQ writes zeros for layers without one
    if bias is not None and not on_meta and module.weight.is_floating_point():
        bias = bias.to(module.weight.dtype)
    made = linear(layer.in_features, layer.out_features, bias is not None, weights=layer.weights, device="meta",
                  dtype=None if bias is None else bias.dtype, threads=threads)  # fmt: skip
    for name, tensor in (("weight", layer.weight), ("scales", layer.scales), ("zeros", layer.zeros), ("bias", bias)):
        if tensor is not None:
            setattr(made, name, tensor.to(place))
    return made.train(module.training)


def _slots(model: torch.nn.Module):
    """(name, module, key, tensor, is persistent) of each parameter and buffer."""
    for prefix, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                yield name, module, key, tensor, key not in module._non_persistent_buffers_set


def _put(holders: list, found: Tensor, device) -> None:
    """holders: the slots of one tensor, which several modules may share."""
    held = holders[0][3]
    with torch.no_grad():
        if not held.is_meta:
            held.copy_(found)
            return
        made = found.to(device)
        if isinstance(held, torch.nn.Parameter):
            made = torch.nn.Parameter(made, held.requires_grad)
    for _, module, key, *_ in holders:
        (module._parameters if isinstance(held, torch.nn.Parameter) else module._buffers)[key] = made


def _check_tensor(files: _safetensors.Tensors, name: str, module, held: Tensor, linear) -> None:
    if type(module) is linear and module.weights != "float":
        refuse(f"{name} is {files.kind(name)} in the files", f"the model's layer has {module.weights} weights",
               "Build the model with torch.nn.Linear layers.")  # fmt: skip
    kind = files.kind(name)
    if (files.shape(name) != tuple(held.shape) or kind not in _safetensors.TORCH_DTYPES
            or (kind in _FLOATING) != held.is_floating_point()):  # fmt: skip
        refuse(f"{name} is {kind} {list(files.shape(name))} in the files",
               f"the model's is {str(held.dtype).removeprefix('torch.')} {list(held.shape)}",
               "Build the model with the files' config.json.")  # fmt: skip


def _check_same(files: _safetensors.Tensors, names: list[str]) -> None:
    """names: the files' tensors for one tensor of the model."""
    for name in names[1:]:
        if not torch.equal(files.tensor(names[0]), files.tensor(name)):
            refuse(f"{names[0]} and {name} differ in the files", "they are one tensor of the model",
                   "Build the model with tie_word_embeddings=False.")  # fmt: skip


def _device(device) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:
        refuse(f"device is {shown(device)}", f"PyTorch says: {str(error).splitlines()[0]}", "Pass a device that is there.")
    if found.type == "meta":
        refuse("device is meta", "tensors have no elements there", "Pass the device that the model shall run on.")
    return found


def _compute_buffers(model: torch.nn.Module, device) -> list[str]:
    """Computes buffers on the meta device that no file has, such as RoPE's frequencies, as a Hugging Face model does. Returns
    the names of buffers that it does not compute."""
    left: dict = {}
    for name, module, key, tensor, persistent in _slots(model):
        if not persistent and tensor.is_meta:
            left.setdefault(module, []).append((name, key, tensor))
    names = []
    initialize = getattr(model, "_init_weights", None)
    for module, buffers in left.items():
        for _, key, tensor in buffers:
            module._buffers[key] = torch.full_like(tensor, float("nan"), device=device) if tensor.is_floating_point() else tensor
        if initialize is not None:  # on the meta device it leaves parameters as they are, which have been read
            parameters = dict(module._parameters)
            for key, held in parameters.items():
                if held is not None:
                    module._parameters[key] = torch.nn.Parameter(held.detach().to("meta"), requires_grad=False)
            try:
                with torch.no_grad():
                    initialize(module)
            finally:
                module._parameters.update(parameters)
        for name, key, tensor in buffers:
            found = module._buffers[key]
            if found.is_meta or bool(found.isnan().any()):
                module._buffers[key] = tensor
                names.append(name)
    return names


def load_(model: torch.nn.Module, path, *, quantization_config=None, device=None, threads: int = 0) -> LoadReport:
    """quantized.load_()."""
    from . import quantized  # noqa: PLC0415, which imports this
    from .nn import Linear  # noqa: PLC0415, which imports others

    if not isinstance(model, torch.nn.Module):
        refuse(f"model is {type(model).__name__}", "it should be a torch.nn.Module", "Pass the model, then the folder.")
    threads = as_threads(threads)
    if isinstance(model, torch.nn.Linear):
        refuse("the model itself is a torch.nn.Linear", "layers are replaced in the modules that hold them",
               "Use ringattn.quantized.read_layer().")  # fmt: skip
    path = _file_of(os.fspath(path))
    files = _safetensors.Tensors(path)
    device = _device(device)
    modules = dict(model.named_modules(remove_duplicate=False))
    report, read, used = LoadReport(), {}, set()
    holders: dict = {}
    for slot in _slots(model):
        holders.setdefault(id(slot[3]), []).append(slot)
    for name in _quantized_names(files):
        layer = quantized.read_layer(path, name, quantization_config=quantization_config)
        module = modules.get(name)
        sharing = holders.get(id(getattr(module, "weight", None)), ())
        others = [other for other, its_module, *_ in sharing if its_module is not module]
        _check_layer(name, module, layer, Linear, others[0] if others else None)
        read[name], report.layers[name] = layer, layer.format
        used.update(f"{name}.{part}" for part in _PARTS)
    _check_read_formats(files, modules, read)
    replaced = {modules[name] for name in read}
    slots = [slot for slot in _slots(model) if slot[1] not in replaced]
    for name, module, _, held, persistent in slots:
        if persistent and name in files:
            _check_tensor(files, name, module, held, Linear)
    for sharing in holders.values():
        _check_same(files, [name for name, *_, persistent in sharing if persistent and name in files])
    if not read and not any(name in files for name, *_ in slots):
        refuse(f"{path} has none of the model's tensors", f"it has {', '.join(map(_safetensors.quoted, files.names()[:3]))}",
               "Build the model that the files are of.")  # fmt: skip
    for name, layer in read.items():
        module = modules[name]
        made = _made(module, layer, Linear, device, threads)
        replaced.add(made)
        for holder in model.modules():
            for key, child in tuple(holder._modules.items()):
                if child is module:
                    setattr(holder, key, made)
    placed = set()
    for name, _, _, held, persistent in slots:
        if persistent and name in files:
            if id(held) not in placed:
                _put(holders[id(held)], files.tensor(name), device)
            placed.add(id(held))
            report.tensors.append(name)
            used.add(name)
    left = _compute_buffers(model, device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    filled = {tensor.data_ptr() for name, _, _, tensor, _ in _slots(model) if name in used and not tensor.is_meta}
    report.missing = [name for name, module, _, tensor, persistent in _slots(model)
                      if module not in replaced and name not in used and persistent
                      and (tensor.is_meta or tensor.data_ptr() not in filled)] + left  # fmt: skip
    report.unexpected = [name for name in files.names() if name not in used]
    return report
