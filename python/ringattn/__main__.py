# SPDX-License-Identifier: Apache-2.0
"""python -m ringattn verify --input qkv.safetensors --peer theirs.safetensors
python -m ringattn collect-env

`verify` compares another system's result for a file's attention with fp64, as the program's `ringattn verify --peer` does.
`collect-env` prints what a bug report needs, as the program's does. For installations of only the Python package."""

import difflib
import errno
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import _abi, _python_facts, testing
from ._errors import Error, FileError, UsageError, WrongResult, refuse, unsupported
from ._safetensors import Tensors, quoted
from ._tensor_names import known_names

_NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "q_offset", "sinks")
# Roles of tensors in jobs that only the program computes: caches, latents and SSMs.
_STORED = ("k_pages", "v_pages", "block_table", "lengths_k", "latent", "k_rope", "latent_fp8", "latent_pages", "w_uk",
           "w_uv", "kv_b_proj")
_SSM = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "u", "delta", "delta_bias", "initial_states", "cu_seqlens", "state",
          "conv1d_weight", "conv1d_bias", "conv_state")  # fmt: skip
# Tensors that may replace k and v.
_CACHES = ("k_pages", "latent", "latent_fp8", "latent_pages")
_AXES = {"thd": (0, 1, 2), "htd": (1, 0, 2), "bthd": (0, 1, 2, 3), "bhtd": (0, 2, 1, 3)}
_ROWS, _WHOLE, _LSE = ("BF16", "F16", "F32"), ("I32", "I64"), ("F32",)
_FARTHEST = 2**60  # of tokens
_MAX_ROWS = _MAX_SEQUENCES = 2**20
_HELP = "See `python -m ringattn verify --help`."


class _BadValue(Exception):
    """An invalid flag value; says what the flag takes."""


def _choice(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise _BadValue(f"{', '.join(names[:-1])} or {names[-1]}")
        return text

    return convert


def _integer(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        # Python refuses to convert longer digit strings.
        if not re.fullmatch(r"-?[0-9]{1,40}", text) or not least <= int(text) <= most:
            raise _BadValue(f"a whole number from {least} to {most}")
        return int(text)

    return convert


def _real(least: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        number = re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text, re.IGNORECASE)
        value = float(text) if number else math.nan
        if not least <= value <= 1e30:
            raise _BadValue(f"a finite number, at least {least:g}, at most 1e+30")
        if abs(value) < 1e-30 and re.search("[1-9]", number[1]):  # fp32 would make it 0
            raise _BadValue("0, or a number of at least 1e-30")
        return value

    return convert


def _side(text: str) -> int:
    size = re.fullmatch(r"([0-9]{1,40})([kmg]?)", text, re.IGNORECASE)
    value = int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2].lower()] if size else -1
    if text != "-1" and not 0 <= value <= _FARTHEST:
        raise _BadValue(f"numbers of tokens (-1 for unlimited) such as 4096, 8k or 2m, at most {_FARTHEST}")
    return value


def _window(text: str) -> tuple[int, int]:
    left, comma, right = text.partition(",")
    if not comma:
        raise _BadValue("two numbers of tokens L,R, each -1 for unlimited")
    return _side(left), _side(right)


def _tensors(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in (*_NAMES, *_STORED, *_SSM) or not value:
            raise _BadValue(f"pairs of {', '.join(_NAMES)} with a name, such as q=layers.3.q,k=layers.3.k")
        if name in given:
            raise _BadValue(f"each tensor once; {name} is given twice")
        given[name] = value
    return given


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise _BadValue("the name of a file")
    return text


class _Flag(NamedTuple):
    name: str
    takes: str
    convert: Callable[[str], Any]
    fallback: Any
    example: str
    about: str


_FLAGS = (
    _Flag("input", "FILE", _path, None, "qkv.safetensors", "q, k and v, as docs/files.md says"),
    _Flag("peer", "FILE", _path, None, "theirs.safetensors", "another system's out, and lse if there is one"),
    _Flag("tensors", "q=NAME,k=NAME,v=NAME", _tensors, {}, "q=layers.3.q,k=layers.3.k",
          "other names of the input's tensors"),
    _Flag("order", "thd|htd|bthd|bhtd", _choice(*_AXES), None, "thd",
          "axis order of q, k, v and out [thd, bthd of four axes]"),
    _Flag("mask", "full|causal", _choice("full", "causal"), "causal", "causal", "attention mask [causal]"),
    _Flag("window", "L,R", _window, (-1, -1), "4095,0",
          "the row at p sees keys p-L ... p+R, -1 is no limit; causal sets R = 0 [-1,-1]"),
    _Flag("query-offset", "N", _integer(-_FARTHEST, _FARTHEST), None, "0",
          "position of the first query among the keys; overrides q_offset"),
    _Flag("softmax-scale", "X", _real(-1e30), None, "0.125",
          "scale of the scores; 0 gives all keys the same weight [1/sqrt(head_dim)]"),
    _Flag("softcap", "X", _real(0.0), 0.0, "30", "score becomes X * tanh(score / X); 0 is off [0]"),
    _Flag("rows", "N", _integer(1, _MAX_ROWS), None, "64",
          "rows to compare (one token and one head each), with the first and the last [all, or about a second's worth]"),
)  # fmt: skip


def _help() -> str:
    lines = ["usage: python -m ringattn verify --input FILE --peer FILE [flags]", "",
             "Compares another system's out, and lse if it has one, with fp64. The flags mean the same as in",
             "`ringattn verify --peer`. That program has more flags, also checks its own result, and samples",
             "different rows of large jobs. Environment variables and config files are not read here.", "",
             "`python -m ringattn collect-env` prints what a bug report needs.", ""]  # fmt: skip
    for flag in _FLAGS:
        lines += [f"  --{flag.name} {flag.takes}", f"      {flag.about}"]
    lines += ["", "exit codes: 0 all compared rows are right, 1 one is wrong, 2 flags, 3 files, 4 not checked here"]
    return "\n".join(lines)


def _unknown(word: str) -> NoReturn:
    name = word.partition("=")[0]
    if not word.startswith("-") or word == "-":
        refuse(f'"{word}" belongs to no flag', "all values follow a flag", _HELP)
    near = difflib.get_close_matches(name.lstrip("-"), [flag.name for flag in _FLAGS], 1, 0.75)
    refuse(f"unknown flag {name}", "this check has no flag of that name, though the program `ringattn verify` may",
           f"Did you mean --{near[0]}?" if near else _HELP)  # fmt: skip


def _given(words: list[str]) -> dict[str, Any] | None:
    """The flags' values; None if help is requested."""
    flags = {f"--{flag.name}": flag for flag in _FLAGS}
    texts: dict[str, list[str]] = {}
    left = list(words)
    asked = False
    while left:
        name, equals, text = left.pop(0).partition("=")
        if name in ("-h", "--help") and not equals:
            asked = True
            continue
        if name not in flags:
            _unknown(name + equals + text)
        if not equals and left and left[0].partition("=")[0] not in flags and left[0] not in ("-h", "--help"):
            text = left.pop(0)
        elif not text:
            refuse(f"{name} has no value", "it takes one", _HELP)
        texts.setdefault(name, []).append(text)
    if asked:
        return None
    given = {}
    for name, flag in flags.items():
        values = texts.get(name, [])
        if len(values) > 1:
            refuse(f"{name} is given {len(values)} times", "one value would be ignored", "Give it once.")
        try:
            given[flag.name] = flag.convert(values[0]) if values else flag.fallback
        except _BadValue as bad:
            refuse(f'{name} is "{values[0]}"', f"it takes {bad}", f"Try {name} {flag.example}, for example.")
    for name in ("input", "peer"):
        if given[name] is None:
            refuse(f"--{name} is missing", "a file's attention is compared with another file's", _HELP)
    if given["mask"] == "causal" and given["window"][1] > 0:
        refuse("--window contradicts the causal mask", f"R is {given['window'][1]}, and causal sets R = 0",
               "Use --mask full, or R = 0.")  # fmt: skip
    return given


def _read(tensors: Tensors, given: dict[str, str], order: str | None) -> tuple[dict, list[int], list[int]]:
    """The inputs of check_attention(), with packed rows [tokens, heads, dim], and the shapes that out and lse have in a
    file."""
    path = tensors.path
    _check_kind(tensors, given)
    names = _resolved(tensors, given)
    stored = {name: tensors.read(names.get(name, name), _ROWS) for name in ("q", "k", "v")}
    if "k_positions" in tensors:  # which decide what keys are seen
        unsupported(f"{path} has k_positions", "this check covers only whole sequences under a mask",
                    "Use the program, `ringattn verify`.")  # fmt: skip
    if "k_lengths" in tensors:
        raise FileError(f"{path} has k_lengths", "it belongs to k_positions, which the file lacks", "Leave it out.")
    q, v = stored["q"], stored["v"]
    for name, array in stored.items():
        _check_rows(path, name, array, q, order)
    axes = _AXES[order or ("bthd" if q.ndim == 4 else "thd")]
    rows = {name: array.transpose(axes) for name, array in stored.items()}  # tokens before heads
    found: dict[str, Any] = {name: array.reshape(-1, *array.shape[-2:]) for name, array in rows.items()}
    batched = q.ndim == 4
    for name in _NAMES[3:]:
        if name not in names and name not in tensors:
            continue
        array = tensors.read(names.get(name, name), {"sinks": _ROWS, "q_offset": ("I64",)}.get(name, _WHOLE))
        if array.ndim != 1:
            raise FileError(f"{name} of {path} is {list(array.shape)}", "it has one axis", "Check how it was written.")
        if name.startswith("cu_seqlens"):
            if batched:
                raise FileError(f"{path} has {name}", "the order has an axis for the batch already",
                                "Leave it out, or pack all sequences.")  # fmt: skip
            _check_cumulative(path, name, array, found[name[-1]].shape[0])
        if name == "q_offset" and array.size and not -_FARTHEST <= int(array.min()) <= int(array.max()) <= _FARTHEST:
            raise FileError(f"q_offset of {path} lies beyond 2^60 tokens", "it holds positions",
                            "Check how it was written.")
        found["q_offsets" if name == "q_offset" else name] = array.astype("float32") if name == "sinks" else array
    shared = "cu_seqlens_q" in found and found["q"].shape[0] == found["k"].shape[0]
    if ("cu_seqlens_q" in found) != ("cu_seqlens_k" in found) and not shared:
        raise FileError(f"{path} has one of cu_seqlens_q and cu_seqlens_k", "lengths are given for queries and keys",
                        "Add the other one.")  # fmt: skip
    for name in ("q", "k") if batched else ():
        found[f"cu_seqlens_{name}"] = np.arange(q.shape[0] + 1) * rows[name].shape[1]
    *batch, tokens, heads, _ = rows["q"].shape
    return found, [*q.shape[:-1], v.shape[-1]], [*batch, heads, tokens]


def _check_kind(tensors: Tensors, given: dict[str, str]) -> None:
    """Refuses a file of another op, and one whose op is ambiguous."""
    path, rows = tensors.path, given.keys() & {"q", "k", "v"}
    stored = given.keys() & {*_STORED}
    if stored:
        unsupported(f"--tensors names {min(stored)}", "this check takes keys and values in rows",
                    "Use the program, `ringattn verify`.")  # fmt: skip
    if not rows and given.keys() & {*_SSM}:
        if not any(name in given or name in tensors for name in ("dt", "delta", "conv1d_weight")):
            raise FileError(f"{path} has no tensor `dt`", "--tensors names tensors of an SSM", "Name q, k and v.")
        refuse("--peer is not for an SSM", "--tensors names tensors of one", "Name q, k and v.")
    for pair in (("x", "dt"), ("u", "delta")):
        if not rows and "q" in tensors and all(name in tensors for name in pair):
            raise FileError(f"{path} holds an SSM and attention", "a job is one of them",
                            "Name q, k and v by --tensors.")  # fmt: skip
    for name in () if rows & {"k", "v"} else _CACHES:
        if name not in tensors:
            continue
        if "k" in tensors:
            raise FileError(f"{path} holds k and {name}", "the keys of a job are one of them",
                            "Name k and v by --tensors.")
        unsupported(f"{path} has {name}", "this check takes keys and values in rows",
                    "Use the program, `ringattn verify`.")
    for name in ("k_format", "v_format"):
        if name in tensors.metadata:
            unsupported(f"{path} has {name} in its metadata", "this check takes keys and values that are not compressed",
                        "Use the program, `ringattn verify`.")


def _resolved(tensors: Tensors, given: dict[str, str]) -> dict[str, str]:
    """The given names, and other libraries' aliases for roles without a given name: the program's resolve_names()."""
    names = dict(given)
    for name, known in known_names("attention").items():
        if name not in tensors or name in given.values():
            continue
        if known.refused and not given and known.unless not in tensors:
            raise FileError(f"{tensors.path} has {quoted(name)}, which isn't read", known.refused,
                            f"{known.suggestion.rstrip('.')}, or name the tensors that are meant by --tensors.")
        if known.refused or known.role in given:
            continue
        other = names.get(known.role, known.role if known.role in tensors else None)
        if other is not None:
            raise FileError(f"{tensors.path} has {quoted(name)} and {quoted(other)}", f"both names mean {known.role}",
                            "Leave one of them out, or name the one that is meant by --tensors.")
        names[known.role] = name
    return names if "sinks" in given else _with_layer_sinks(tensors, names, bool(given))


def _with_layer_sinks(tensors: Tensors, names: dict[str, str], named: bool) -> dict[str, str]:
    """The sinks of a checkpoint's only layer are an alias, too."""
    layers = [name for name in tensors.names() if name.endswith(".self_attn.sinks")]
    if len(layers) > 1 and not named:
        raise FileError(f"{tensors.path} has {quoted(layers[0])} and {quoted(layers[1])}, the sinks of several layers",
                        "a job is one layer's", f"Name one by --tensors sinks={layers[0]}.")  # fmt: skip
    if len(layers) != 1:
        return names
    other = names.get("sinks", "sinks" if "sinks" in tensors else None)
    if other is not None:
        raise FileError(f"{tensors.path} has {quoted(layers[0])} and {quoted(other)}", "both names mean sinks",
                        "Leave one of them out, or name the one that is meant by --tensors.")  # fmt: skip
    return {**names, "sinks": layers[0]}


def _say_unread(tensors: Tensors, given: dict[str, str]) -> None:
    names = _resolved(tensors, given)
    read = {names.get(name, name) for name in _NAMES}
    unread = [name for name in tensors.names() if name not in read]
    if not unread:
        return
    if given:  # of a model's file, perhaps
        print(f"# not read: {len(unread)} tensor{'s' if len(unread) > 1 else ''}")
        return
    more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
    print(f"# not read: {', '.join(map(quoted, unread[:8]))}{more}")


def _check_rows(path, name: str, array: np.ndarray, q: np.ndarray, order: str | None) -> None:
    what = f"{name} of {path} is {array.dtype} {list(array.shape)}"
    if array.ndim not in ((len(_AXES[order]),) if order else (3, 4)):
        wanted = f"its order has {len(_AXES[order])} axes" if order else "it has 3 axes, or 4 with a batch"
        raise FileError(what, wanted, "Name the file's order by --order.")
    heads = array.shape[-3 if order in ("htd", "bhtd") else -2]
    if array.dtype != q.dtype or array.ndim != q.ndim or (q.ndim == 4 and array.shape[0] != q.shape[0]):
        raise FileError(what, f"q is {q.dtype} {list(q.shape)}",
                        "q, k and v have one type, and the same batch of sequences.")
    if heads == 0 or array.shape[-1] == 0:
        raise FileError(what, "it needs at least one head and one dim", "Check it; --order says which axis is which.")


def _check_cumulative(path, name: str, array: np.ndarray, tokens: int) -> None:
    if (not 2 <= array.size <= _MAX_SEQUENCES + 1 or array[0] != 0 or array[-1] != tokens
            or np.any(array[1:] < array[:-1])):  # fmt: skip
        raise FileError(f"{name} of {path} begins as {array[:8].tolist()}",
                        f"it ascends from 0 to the {tokens} tokens of {name[-1]}, by at most 2^20 sequences",
                        "Write 0, then the end of each sequence in packed tokens.")  # fmt: skip


def _read_peer(given: dict[str, Any], dtype, out_shape: list[int], lse_shape: list[int]):
    """(out, lse) as check_attention() takes them; lse is None if the file has none."""
    peer = Tensors(given["peer"])
    out = peer.read("out", _ROWS)
    lse = peer.read("lse", _LSE) if "lse" in peer else None
    for name, array, kind, shape in (("out", out, dtype, out_shape), ("lse", lse, np.dtype("float32"), lse_shape)):
        if array is not None and (list(array.shape) != shape or array.dtype != kind):
            raise FileError(f"{peer.path} can't be compared",
                            f"{quoted(name)} is {array.dtype} {list(array.shape)}, the job gives {kind} {shape}",
                            "Give the job that the file was made with.")  # fmt: skip
    out = out.transpose(_AXES[given["order"] or ("bthd" if out.ndim == 4 else "thd")])
    if lse is not None:
        lse = np.swapaxes(lse, -1, -2).reshape(-1, lse.shape[-2])
    return out.reshape(-1, *out.shape[-2:]), lse


def verify(given: dict[str, Any]) -> bool:
    """given: the flags' values by their names."""
    tensors = Tensors(given["input"])
    job, out_shape, lse_shape = _read(tensors, given["tensors"], given["order"])
    shape = job["q"].shape
    out, lse = _read_peer(given, job["q"].dtype, out_shape, lse_shape)
    if given["query-offset"] is not None:
        sequences = len(job["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in job else 1
        job["q_offsets"] = [given["query-offset"]] * sequences
    left, right = given["window"]
    mask = given["mask"] if (left, right) == (-1, -1) else (left, 0 if given["mask"] == "causal" else right)
    arrays = [job.pop(name) for name in ("q", "k", "v")]
    try:
        seen = testing.check_attention(*arrays, out, lse, mask=mask, softmax_scale=given["softmax-scale"],
                                       softcap=given["softcap"], rows=given["rows"] or "few", **job)  # fmt: skip
    except WrongResult as error:
        _say_unread(tensors, given["tensors"])
        print(f"  {error}\nFAIL")
        return False
    except UsageError as error:  # the flags have been parsed, so the error is about the file's tensors
        raise FileError(f"{tensors.path}: {error.problem}", error.why, error.suggestion) from error
    _say_unread(tensors, given["tensors"])
    print(f"{seen.rows:,} of {shape[0] * shape[1]:,} rows of {given['peer']} against fp64")
    print(f"  out: error {seen.out_error:.3g}, {seen.out_part:.3g} of what is allowed")
    if lse is None:
        print("  theirs has no lse: only out is compared")
    else:
        print(f"  lse: error {seen.lse_error:.3g}, {seen.lse_part:.3g} of what is allowed")
    all_rows = shape[0] * shape[1]
    print("PASS" if seen.rows == all_rows else f"PASS ({seen.rows:,} of {all_rows:,} rows sampled)")
    return True


def _collect_env(words: list[str]) -> None:
    if words:
        refuse(f'"{words[0]}" belongs to no flag', "collect-env takes none", "Leave it out.")
    facts = _abi.lib.environment()
    print(facts.decode() if facts else "ringattn\n  unknown (memory has run out)\n", end="")
    print("Python", *(f"  {line}" for line in _python_facts.lines()), sep="\n")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code that the program would return."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["collect-env"] and words[1:] not in (["-h"], ["--help"]):
            _collect_env(words[1:])
            return 0
        if words[:1] not in (["verify"], ["collect-env"]) and words[:1] not in (["-h"], ["--help"]):
            refuse(f'"{words[0]}" is not a command' if words else "there is no command",
                   "there are verify and collect-env", _HELP)
        given = _given(words[1:]) if words[0] == "verify" else None
        if given is None:
            print(_help())
            return 0
        return 0 if verify(given) else WrongResult.status
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status


def _program() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may close it
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # names of files are any bytes
    try:
        code = main()
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.flush()
        return code
    except OSError as error:
        if sys.stderr is not None:
            print(f"error: the result can't be written to stdout ({error.strerror}). "
                  "Redirect stdout to a file that can be written.", file=sys.stderr, flush=True)  # fmt: skip
        os._exit(FileError.status)  # otherwise Python would try to write the rest again at exit


if __name__ == "__main__":
    sys.exit(_program())
