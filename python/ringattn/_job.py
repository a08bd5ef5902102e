# SPDX-License-Identifier: Apache-2.0
"""Arguments that the ops have in common: masks, worlds and layouts, and the library's structs for them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from . import _abi, _gradients, _structs, worlds
from ._abi import lib
from ._arguments import as_fp32, as_int, as_ints, scale_members, seconds_of
from ._errors import refuse, unsupported
from ._compression import Compressed, refuse_compressed
from ._ranges import ranged
from ._tensors import (
    CompressedView,
    View,
    address_of,
    check_array,
    data_type,
    device_of,
    empty,
    forms_of,
    is_torch,
    kind_of,
    maker,
    on_host,
    stream_of,
    type_name,
)
from .layouts import make_layout
from .worlds import World, own_calls, self_world

Mask = str | tuple[int, int]

# Number of call shapes that a world remembers.
_MAX_CALLS = 256

_MASKS = {"causal": (_abi.CAUSAL, 0, 0), "full": (_abi.FULL, 0, 0)}


def read_mask(mask: Mask) -> tuple[int, int, int]:
    """(kind, left, right) of the library."""
    if isinstance(mask, str):
        if mask in _MASKS:
            return _MASKS[mask]
    elif isinstance(mask, tuple) and len(mask) == 2:
        return _abi.WINDOW, *(as_int(side, "a side of mask") for side in mask)
    if hasattr(mask, "shape"):
        refuse(f"mask is {type(mask).__name__} {list(mask.shape)}", "masks are not arrays: they are said by position",
               'Pass "causal", "full" or (left, right); for padding call ringattn.varlen() with cu_seqlens_q.')  # fmt: skip
    refuse(
        f"mask {repr(mask)[:60]} is not known",
        'there are "causal", "full" and (left, right), where -1 is no limit',
        "Pass a tuple in place of a list." if isinstance(mask, list) else "Choose one.",
    )


def _check_world(world) -> None:
    if not isinstance(world, World):
        refuse(f"world is {world!r}", "it should be a ringattn.World, a group of ranks",
               'Make one, such as ringattn.torch_world(group) of a ProcessGroup or mesh["cp"], or leave it out.')  # fmt: skip


def world_of(array, world: World | None) -> World:
    """The caller's world, or the world of only this rank on the array's device."""
    device = device_of(array)
    if world is None:
        return self_world(device)
    _check_world(world)
    if world.device != device:
        refuse(
            f"q is on device {device}", f"the world's tensors are on {world.device}", "Use a world of that device."
        )
    return world


def check_arrays(op: str, needed: dict, written=(), **optional) -> None:
    """Checks that all arrays of an op are from the same library and on the same device as the first one. Optional arrays may be
    None. written: names of additional arrays that the call writes."""
    first, like = next(iter(needed.items()))
    differentiable = _gradients.INPUTS.get(op, ())
    for name, array in (*needed.items(), *optional.items()):
        if array is None and name in optional:
            continue
        refuse_compressed(op, name, array)
        for part in array.parts if isinstance(array, Compressed) else (array,):
            check_array(name, part, name in written or None, name in differentiable and part is array)
            if type(part) is not type(like) and kind_of(part) is not kind_of(like):
                refuse(f"{name} of {op} is {type(part).__name__}", f"{first} is {type(like).__name__}",
                       "Pass arrays of one kind.")  # fmt: skip
            if part is like:
                device_of(like, first)
            elif is_torch(part) and part.device != like.device:
                refuse(f"{name} is on {part.device}", f"{first} is on {like.device}", "Pass tensors of one device.")


_COMPUTED = ("float32", "float16", "bfloat16")


def check_dtypes(**arrays) -> None:
    """Checks a call's arrays by name, q first; None is skipped. uint8 is an FP8 latent cache, which the library checks."""
    wanted = str(arrays["q"].dtype)
    for name, array in arrays.items():
        if array is None:
            continue
        found = str(array.dtype)
        if "float8" in found:
            refuse(f"{name} is {found}", "ringattn computes with float32, float16 and bfloat16",
                   'Convert it; ringattn.compress(k, v, "fp8") stores keys and values in 8 bits.')  # fmt: skip
        if found.removeprefix("torch.") not in (*_COMPUTED, "uint8"):
            refuse(f"{name} is {found}", "ringattn computes with float32, float16 and bfloat16", "Convert it.")
        if found != wanted and array.dtype != arrays["q"].dtype and "uint8" not in found:
            refuse(f"{name} is {type_name(found)} but q is {type_name(wanted)}", "rows of one call have one type", "Convert one.")


def check_head_dim(q, v=None) -> None:
    """Checks head_dim for attention and decode. Callers pad heads of other dims."""
    for name, array in (("q", q), ("v", v)):
        dim = 8 if array is None else array.shape[-1]
        if dim % 8:
            rows, rest = ("q and k", f", and pass softmax_scale={dim}**-0.5") if name == "q" else ("v", "")
            unsupported(f"{name} has a head_dim of {dim}", "kernels have multiples of 8",
                        f"Pad {rows} to {-(-dim // 8) * 8} with zeros{rest}.")  # fmt: skip


def format_of(rows) -> str | None:
    """Format of compressed keys or values; None: not compressed."""
    return rows.format if isinstance(rows, Compressed) else None


def shown(q, k, v) -> dict:
    """q, k and v by their names in the tensors struct."""
    rows = {"k": k, "v": v}
    named = {f"compressed_{name}" if isinstance(x, Compressed) else name: x for name, x in rows.items()}
    return {"q": q, "k": None, "v": None, "compressed_k": None, "compressed_v": None} | named


def c_spec(like, heads, kv_heads, head_dim, head_dim_v, mask, softmax_scale, softcap, sinks,
           formats=(None, None)) -> _structs.spec:  # fmt: skip
    kind, left, right = mask
    k_format, v_format = (None if format is None else format.encode() for format in formats)
    return _structs.spec(dtype=data_type(like), heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
                     mask=kind, sinks=int(sinks), window_left=left, window_right=right,
                     softcap=as_fp32(softcap, "softcap"), k_format=k_format, v_format=v_format,
                     **scale_members(softmax_scale))  # fmt: skip


class Positions(NamedTuple):
    """Positions of keys after eviction: int32 [keys of all sequences, heads] as bytes, and the original lengths of the
    sequences."""

    rows: bytes
    heads: int
    whole_lengths: tuple[int, ...] | None


def read_positions(k, k_positions, k_lengths, k_rows: int, sequences: int, has_offsets: bool) -> Positions | None:
    """Positions of k_rows keys over all ranks. k_lengths: an int, or one for each sequence."""
    if k_positions is None:
        if k_lengths is not None:
            refuse("k_lengths is given", "it belongs to k_positions", "Pass both, as ringattn.evict() gives them.")
        return None
    check_array("k_positions", k_positions)
    kv_heads, heads = k.shape[-2], k_positions.shape[-1] if k_positions.ndim else 0
    rows = on_host(k_positions)
    if str(rows.dtype) != "int32" or rows.ndim != k.ndim - 1 or rows.size != k_rows * heads or heads not in (1, kv_heads):
        refuse(f"k_positions is {rows.dtype} {list(rows.shape)}",
               f"there are {k_rows} keys over all ranks, so it is int32 [(batch,) keys, {kv_heads} or 1]",
               "Pass those of all ranks' keys.")  # fmt: skip
    if k_lengths is None:
        if not has_offsets:
            refuse("k_lengths is not given", "queries are aligned to the ends of the sequences, which count evicted tokens",
                   "Pass it, or q_offset (varlen: q_offsets).")  # fmt: skip
        return Positions(rows.tobytes(), heads, None)
    if hasattr(k_lengths, "__len__"):
        return Positions(rows.tobytes(), heads, tuple(as_ints(k_lengths, "k_lengths")))
    lengths = (as_int(k_lengths, "k_lengths"),) * sequences
    return Positions(rows.tobytes(), heads, lengths)


def c_batch(q_lengths, k_lengths, q_offsets, positions: Positions | None = None) -> _structs.batch:
    """The batch struct: a number of sequences and arrays of that length. Lists of different lengths are refused here, for
    every op."""
    sequences = len(q_lengths)
    if k_lengths is not None and len(k_lengths) != sequences:
        refuse(f"there are {sequences} sequences of queries and {len(k_lengths)} of keys", "each has both", "Check cu_seqlens.")
    for name, given in (("q_offsets", q_offsets), ("k_lengths", positions and positions.whole_lengths)):
        if given is not None and len(given) != sequences:
            refuse(f"{name} has {len(given)} numbers", f"there are {sequences} sequences", "Pass one for each.")
    batch = _structs.batch(sequences=sequences, q_lengths=longs(q_lengths), k_lengths=longs(k_lengths),
                           q_offsets=longs(q_offsets))  # fmt: skip
    if positions is not None:
        batch.k_positions = ctypes.cast(ctypes.c_char_p(positions.rows), _structs.integers)
        batch.position_heads, batch.whole_lengths = positions.heads, longs(positions.whole_lengths)
    return batch


def run_options(*, timeout_seconds: float, **members) -> _structs.options:
    """Options of an op that has a timeout."""
    return _structs.options(timeout_seconds=seconds_of(timeout_seconds), **members)


def c_options(world: World, q_lengths, k_lengths, layout, key_layout, **members) -> _structs.options:
    """Options of a ring op; with layouts if the world has several ranks."""
    options = run_options(**members)
    if world.size == 1 and layout is None:
        if key_layout is None:
            return options
        layout = "contiguous"  # with one rank all layouts are equal; the keys' name is still checked
    if layout is None:
        refuse(f"the layout of {world.size} ranks is not given", "it says which tokens this rank's rows are",
               'Pass layout="contiguous", "zigzag", "striped" or "packed", or a ringattn.Layout.')  # fmt: skip
    queries = make_layout(layout, q_lengths, world.size)
    keys = make_layout(key_layout if key_layout is not None else layout, k_lengths, world.size)
    options.layout = _abi.RUNS
    options.query_run_count, options.query_runs = queries.c_runs()
    options.key_run_count, options.key_runs = keys.c_runs()
    return options


def longs(values: Sequence[int] | None):
    return None if values is None else (ctypes.c_int64 * len(values))(*values)


def show(tensors, views: dict, arrays: dict) -> None:
    """Sets the members of an op's struct to views of the arrays. `views` keeps them by name; None: absent."""
    for name, array in arrays.items():
        view = views.get(name)
        if array is None:
            if view is not None:
                del views[name]
                setattr(tensors, name, None)
            continue
        if view is None:
            view = views[name] = CompressedView() if name.startswith("compressed_") else View()
            setattr(tensors, name, view.address)
        view.show(array)


class Prepared(worlds.Prepared):
    """A prepared job of the op `op`."""

    op = ""
    create = "create"  # suffix of the library's function that creates the object

    def __init__(self, world: World, *job):
        super().__init__(world, getattr(lib, f"{self.op}_destroy"))
        self._run = ranged(getattr(lib, f"{self.op}_run"), f"{self.op}.run")
        self._enqueue = ranged(getattr(lib, f"{self.op}_enqueue"), f"{self.op}.enqueue")
        # Views of each call's arrays. Every call has the same names.
        self._tensors = getattr(_structs, f"{self.op}_tensors")()
        self._views: dict[str, View | CompressedView] = {}
        handle = _abi.Handle()
        ranged(getattr(lib, f"{self.op}_{self.create}"), f"{self.op}.plan")(world.handle, *job, ctypes.byref(handle))
        self._handle = handle
        self.facts = getattr(_structs, f"{_abi.FACTS[self.op]}_facts")()
        getattr(lib, f"{self.op}_get_facts")(handle, self.facts)

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.facts.kernel.decode()

    def on_stream(self, like, work) -> None:
        """Calls work(stream), which enqueues work on the caller's current stream of like's GPU, after that of earlier calls."""
        stream, order = stream_of(like), self.order
        if stream or order.last:
            order.call(self, like.device, stream, work)
        else:  # all calls were on the default stream
            order.last = stream
            work(stream)

    def enqueue(self, tensors, like, run=None) -> None:
        """Enqueues a run on the caller's current stream of like's GPU. run: called instead of the library's function for this."""

        def work(stream):
            tensors.stream = stream
            (run or self._enqueue)(self.handle, tensors)

        self.on_stream(like, work)

    def _do(self, like, arrays: dict, workspace_bytes: int = 0, synchronous: bool = False, **members) -> None:
        """Runs: on a GPU enqueued on the caller's current stream unless `synchronous`, else synchronously. arrays: by name;
        None: absent."""
        on_host = device_of(like)[0] == _abi.CPU
        if workspace_bytes and not on_host:
            arrays = arrays | {"workspace": empty(like, (workspace_bytes,), "uint8")}

        def call():
            tensors = self._tensors
            show(tensors, self._views, arrays)
            for name, value in members.items():
                setattr(tensors, name, value)
            self.enqueue(tensors, like, self._run if on_host or synchronous else None)

        self.turn.run(call)

    def wait(self) -> None:
        """Waits for all work on streams, and raises its first failure."""
        self.turn.run(self.settle)

    def settle(self) -> None:
        """wait() for a caller that has exclusive use of the world."""
        getattr(lib, f"{self.op}_wait")(self.handle)


class RepeatedCall:
    """A checked and prepared call that is repeated for other arrays. All calls of these shapes share the structs of the library,
    so they are only changed with exclusive use of the world."""

    prepared: Prepared

    def __call__(self, *arguments):
        """The result of _call(), or None if the prepared object is closed."""
        prepared = self.prepared
        turn = prepared.turn
        held = turn.take()
        try:
            if prepared._handle is None:
                return None
            prepared.world().use(prepared)
            return self._call(prepared, *arguments)
        finally:
            turn.thread = 0
            turn.release(held.pop())


class Call(RepeatedCall):
    """A checked and prepared call of an op for arrays of given shapes. It is repeated for other arrays of these shapes
    by changing only their addresses."""

    def __init__(self, prepared: Prepared, arrays: dict, given: dict, out, lse, workspace_bytes: int, members: dict):
        """arrays: those passed to the library; given: the caller's, by the same names. out, lse: results for the
        caller; lse may be None, and out is y for SSM ops."""
        self.prepared = prepared
        self._tensors = getattr(_structs, f"{prepared.op}_tensors")()
        self._views: dict[str, View] = {}
        show(self._tensors, self._views, arrays)
        for name, value in members.items():
            setattr(self._tensors, name, value)
        places = {name: view.struct for name, view in self._views.items()}
        self._indices = [places[name] if array is not None else None for name, array in given.items()]
        self._out, self._lse = places.get("out") or places["y"], places.get("lse")
        self._new_out = maker(out, tuple(out.shape))
        self._new_lse = None if lse is None else maker(out, tuple(lse.shape), "float32")
        self._on_host = device_of(out)[0] == _abi.CPU
        self._new_workspace = None
        if workspace_bytes and not self._on_host:
            self._new_workspace = maker(out, (workspace_bytes,), "uint8")
            view = self._views["workspace"] = View()
            view.show(self._new_workspace())
            self._workspace = view.struct
            self._tensors.workspace = view.address

    def _call(self, prepared, arrays: tuple, out):
        """(out, lse). arrays: the caller's in the order of `given`, then out or None."""
        for place, array in zip(self._indices, arrays):
            if place is not None:
                place.data = address_of(array)
        if out is None:
            out = self._new_out()
        self._out.data = address_of(out)
        lse = None
        if self._new_lse is not None:
            lse = self._new_lse()
            self._lse.data = address_of(lse)
        tensors = self._tensors
        if self._on_host:
            prepared._run(prepared._handle, tensors)
            return out, lse
        if self._new_workspace is not None:
            workspace = self._new_workspace()  # until the call is enqueued; the allocator orders its reuse
            self._workspace.data = workspace.data_ptr()
        prepared.enqueue(tensors, out)
        return out, lse


def known_call(world: World | None, settings: tuple, given: dict, out):
    """Repeats an earlier call with these settings and array shapes, and returns (key, results). given: the op's arrays by name,
    q first. Without such a call, results is None, and key is for keep_call() or None."""
    arrays = (*given.values(), out)
    forms = forms_of(arrays)
    if forms is None:
        return None, None
    key = (settings, forms)
    if world is None:
        calls = own_calls()
    else:
        _check_world(world)
        calls = world.calls
    try:
        call = calls.get(key)
    except TypeError:  # unhashable settings, which are refused later
        return None, None
    if call is None:
        return key, None
    results = call(arrays, out)
    if results is None:  # closed, because others were used since
        calls.pop(key, None)
    return key, results


def keep_call(world: World | None, key, prepared: Prepared, arrays: dict, given: dict, out, lse, workspace_bytes: int = 0,
              **members) -> None:  # fmt: skip
    """Keeps a call for known_call(), unless the library got copies. out, lse: the caller's results."""
    if key is None or any(x is not None and address_of(arrays[name]) != address_of(x) for name, x in given.items()):
        return
    keep(world, key, Call(prepared, arrays, given, out, lse, workspace_bytes, members))


def keep(world: World | None, key, call) -> None:
    """Keeps the call that known_call() repeats for this key."""
    calls = own_calls() if world is None else world.calls
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call
