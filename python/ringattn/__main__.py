# SPDX-License-Identifier: Apache-2.0
"""python -m ringattn verify --input qkv.safetensors --peer theirs.safetensors

Another system's result of a file's attention, against fp64: the check of the program's command of that name, with its flags,
where the package alone is installed."""

import argparse
import sys

import numpy as np

from . import testing
from ._errors import Error, FileError, WrongResult, refuse, unsupported
from ._safetensors import Tensors

_NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "q_offset", "sinks")
# What else decides which keys are seen: the program knows it.
_OTHERS = ("k_positions", "block_mask", "block_indptr")
_AXES = {"thd": (0, 1, 2), "htd": (1, 0, 2), "bthd": (0, 1, 2, 3), "bhtd": (0, 2, 1, 3)}


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ringattn", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="compare another system's out, and lse if it has one, with fp64")
    command.add_argument("--input", metavar="FILE", required=True, help="q, k and v, as docs/files.md says")
    command.add_argument("--peer", metavar="FILE", required=True, help="out, and lse if there is one")
    command.add_argument("--tensors", metavar="q=NAME,k=NAME,…", default="", help="names of tensors that have others")
    command.add_argument("--order", choices=_AXES, help="of the axes [thd, or bthd of four]")
    command.add_argument("--mask", choices=("causal", "full"), default="causal", help="what queries see [causal]")
    command.add_argument("--window", metavar="L,R", default="-1,-1",
                         help="keys that the row at p sees, p-L ... p+R, -1 is no limit; causal sets R = 0 [-1,-1]")  # fmt: skip
    command.add_argument("--query-offset", metavar="N", type=int, help="of the first query among the keys, in place of q_offset")
    command.add_argument("--softmax-scale", metavar="X", type=float, help="of the scores [1 / sqrt(head_dim)]")
    command.add_argument("--softcap", metavar="X", type=float, default=0.0, help="0 is off [0]")
    command.add_argument("--rows", metavar="N", type=int, help="rows to compare [as many as take about a second]")
    return parser


def _names(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for name, equals, value in pairs:
        if name not in _NAMES or not value:
            refuse(f"--tensors has {name}{equals}{value}", f"it has pairs of {', '.join(_NAMES)} with a name",
                   "Write q=layers.3.q, for instance.")  # fmt: skip
    return {name: value for name, _, value in pairs}


def _mask(mask: str, window: str):
    try:
        left, right = map(int, window.split(","))
    except ValueError:
        refuse(f"--window is {window}", "it is two numbers of tokens L,R, each -1 for unlimited", "Write 4095,0, for instance.")
    if (left, right) == (-1, -1):
        return mask
    return left, 0 if mask == "causal" else right


def _read(tensors: Tensors, given: dict[str, str], order: str | None) -> dict:
    """What check_attention() takes of the input: rows packed, as [tokens, heads, dim]."""
    for name in _OTHERS:
        if name in tensors:
            unsupported(f"{tensors.path} has {name}", "this check has whole sequences under a mask alone",
                        "Use the program, `ringattn verify`.")  # fmt: skip
    found = {name: tensors[given.get(name, name)] for name in ("q", "k", "v")}
    batch = None
    for name, array in list(found.items()):
        rows = _packed(str(tensors.path), name, array, order)
        if rows.ndim == 4:
            batch = rows.shape[0]
            found[f"cu_seqlens_{name}"] = np.arange(batch + 1) * rows.shape[1]
            rows = rows.reshape(-1, *rows.shape[2:])
        found[name] = rows
    found.pop("cu_seqlens_v", None)
    for name in _NAMES[3:]:
        stored = given.get(name, name)
        if stored not in tensors:
            if name in given:
                found[name] = tensors[stored]  # which says that it isn't there
            continue
        if name.startswith("cu_seqlens") and batch is not None:
            refuse(f"{stored} is there", "the order has an axis for the batch already", "Leave it out, or pack all sequences.")
        found["q_offsets" if name == "q_offset" else name] = tensors[stored]
    if "sinks" in found:
        found["sinks"] = found["sinks"].astype("float32")
    return found


def _packed(path: str, name: str, array, order: str | None):
    """Tokens in front of heads."""
    axes = _AXES[order or ("bthd" if array.ndim == 4 else "thd")]
    if array.ndim != len(axes):
        raise FileError(f"{name} of {path} is {list(array.shape)}", f"its order has {len(axes)} axes",
                        "Name the file's order by --order.")  # fmt: skip
    return array.transpose(axes)


def verify(given: argparse.Namespace) -> bool:
    job = _read(Tensors(given.input), _names(given.tensors), given.order)
    peer = Tensors(given.peer)
    shape = job["q"].shape
    out = _packed(given.peer, "out", peer["out"], given.order)
    lse = None
    if "lse" in peer:  # heads before tokens, whatever the order
        lse = np.moveaxis(peer["lse"], -1, -2)
        lse = lse.reshape(-1, lse.shape[-1])
    if given.query_offset is not None:
        sequences = len(job["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in job else 1
        job["q_offsets"] = [given.query_offset] * sequences
    if out.ndim == 4:
        out = out.reshape(-1, *out.shape[2:])
    if out.dtype != job["q"].dtype:
        refuse(f"out of {given.peer} is {out.dtype}", f"q is {job['q'].dtype}", "Compare results of q's type.")
    mask = _mask(given.mask, given.window)
    arrays = [job.pop(name) for name in ("q", "k", "v")]
    try:
        seen = testing.check_attention(*arrays, out, lse, mask=mask, softmax_scale=given.softmax_scale, softcap=given.softcap,
                                       rows="few" if given.rows is None else given.rows, **job)  # fmt: skip
    except WrongResult as error:
        print(f"  {error}\nFAIL")
        return False
    print(f"{seen.rows} of {shape[0] * shape[1]} rows of {given.peer} against fp64")
    print(f"  out: error {seen.out_error:.3g}, {seen.out_part:.3g} of what is allowed")
    if lse is None:
        print("  theirs has no lse: out alone is compared")
    else:
        print(f"  lse: error {seen.lse_error:.3g}, {seen.lse_part:.3g} of what is allowed")
    print("PASS")
    return True


def main(arguments: list[str] | None = None) -> int:
    """The exit code: that of the program."""
    words = sys.argv[1:] if arguments is None else arguments
    # argparse would take a window that begins with a minus for a flag.
    if "--window" in words[:-1]:
        at = words.index("--window")
        words = [*words[:at], "=".join(words[at : at + 2]), *words[at + 2 :]]
    given = _flags().parse_args(words)
    try:
        return 0 if verify(given) else WrongResult.status
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
