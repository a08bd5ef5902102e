# SPDX-License-Identifier: Apache-2.0
"""Our safetensors reader and writer against the reference library.

Usage: safetensors_reference_test.py PROBE, the path of the safetensors_probe program. Exits 77 where the library is
missing. RINGATTN_TEST_LONG=1 tries 20 times as many mutated headers."""

import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile

try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"skipped: needs Python with numpy and safetensors ({error})")
    sys.exit(77)

# What the reference accepts and we refuse, on purpose: each is something that no writer produces, and that two readers
# may understand differently. Anything else that only one of us accepts is a failure.
STRICTER = {
    r"names tensor `.*` twice": "the reference keeps the last of equal names",
    r"its metadata names `.*` twice": "the reference keeps the last of equal keys",
    r"has the unknown field": "the reference skips fields that the format doesn't have",
    r"tensor `.*` is an array": "the reference takes a list of values for an object",
    r"the dtype of tensor `.*` is an object": "the reference takes {\"F32\": null} for \"F32\"",
    r"its header is an array": "the same for the whole header",
    r"nested deeper than": "only under unknown fields, or for the two forms above",
    r"is larger than 2\^63 bits": "dimensions beside a 0 may overflow in one order and not in the other",
    r"past 2\^63": "sizes are signed here",
    r"more than 64 dimensions": "as in numpy",
    r"control character in its name": "such names break messages and tools",
    r"a name like an absolute path": "such names mislead tools that unpack",
    r"leaves its folder": "such names mislead tools that unpack",
    r"name has \d+ bytes": "names are limited",
}

# What we accept and an older reference refuses: element types that it doesn't know yet.
NEWER = r"unknown variant"


def reference_accepts(blob):
    try:
        safetensors.deserialize(blob)
        return None
    except Exception as error:  # pylint: disable=broad-except
        return str(error)


def file_of(header, data=b""):
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SEEDS = [
    ({"a": entry("F32", [1], 0, 4)}, 4),
    ({"q": entry("BF16", [2, 1, 4], 0, 16), "k": entry("BF16", [2, 1, 4], 16, 32), "v": entry("BF16", [2, 1, 4], 32, 48)}, 48),
    ({"__metadata__": {"format": "pt", "who": "me"}, "a": entry("U8", [0, 3], 0, 0), "b": entry("I64", [], 0, 8)}, 8),
    ({"a": entry("BOOL", [3], 0, 3), "b": entry("F16", [1, 1], 3, 5), "c": entry("F64", [1], 5, 13)}, 13),
    ({"x": entry("F8_E4M3", [4], 0, 4), "y": entry("F4", [4], 4, 6), "z": entry("C64", [1], 6, 14)}, 14),
    ({}, 0),
]

TOKENS = [
    "{", "}", "[", "]", ",", ":", '"', "0", "1", "4", "8", "-1", "-0", "1.0", "1e0", "null", "true", "{}", "[]", '""',
    "18446744073709551615", "18446744073709551616", "9223372036854775808", "4294967296", "9007199254740993", "1e999",
    '"F32"', '"f32"', '"BF16"', '"F4"', '"I16"', '"a"', '"q"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"',
    '"x":1,', '"dtype":"F32",', "\\", "\\u0000", "\\ud800", "\\n", " ", "\n", "\t", "\0", "\ufeff", "/", "../", "é",
]


def mutate_text(rng, text):
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice([0, 1, 1, 2, 5, 20]))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + rng.choice(TOKENS) + text[at:]
        elif kind == 1:
            text = text[:at] + rng.choice(TOKENS) + text[end:]
        elif kind == 2:
            text = text[:at] + text[end:]
        elif kind == 3:  # a copy of a part, elsewhere
            to = rng.randrange(len(text) + 1)
            text = text[:to] + text[at:end] + text[to:]
        else:  # another number or name for one that is there
            places = list(re.finditer(r'\d+|"[^"]*"', text))
            if places:
                place = rng.choice(places)
                text = text[: place.start()] + rng.choice(TOKENS) + text[place.end() :]
    return text


def mutate_tree(rng, tree):
    tree = json.loads(json.dumps(tree))
    names = [name for name in tree if name != "__metadata__"]
    if not names:
        return tree
    name = rng.choice(names)
    tensor = tree[name]
    kind = rng.randrange(5)
    if kind == 0:
        tensor["data_offsets"][rng.randrange(2)] += rng.choice([-4, -1, 1, 4, 1 << 32])
    elif kind == 1:
        tensor["shape"].insert(rng.randrange(len(tensor["shape"]) + 1), rng.choice([0, 1, 2, 1 << 31, 1 << 62, (1 << 64) - 1]))
    elif kind == 2:
        tensor["dtype"] = rng.choice(["F32", "BF16", "U8", "F4", "F6_E2M3", "I64", "F128", "C64", "F8_E5M2FNUZ"])
    elif kind == 3:
        tree[rng.choice(["a", "new", "", "a/b", "/a", "a/../b", "n\n", "n" * 5000])] = tree.pop(name)
    else:
        del tensor[rng.choice(sorted(tensor))]
    return tree


def mutant(rng):
    tree, data_bytes = rng.choice(SEEDS)
    if rng.random() < 0.4:
        tree = mutate_tree(rng, tree)
    text = json.dumps(tree, separators=rng.choice([(",", ":"), (", ", ": ")]))
    if rng.random() < 0.7:
        text = mutate_text(rng, text)
    header = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(header) + 1)
        header = header[:at] + bytes([rng.randrange(256)]) + header[at + rng.randrange(2) :]
    if rng.random() < 0.1:
        data_bytes = max(0, data_bytes + rng.choice([-1, 1, 4]))
    blob = file_of(header, b"x" * data_bytes)
    if rng.random() < 0.05:
        lengths = [0, 1, len(header) + 1, 1 << 40, (1 << 64) - 1, len(header) - 1 if header else 0]
        blob = struct.pack("<Q", rng.choice(lengths)) + blob[8:]
    return blob


def check_mutants(probe, count):
    rng = random.Random(20240607)
    blobs = [mutant(rng) for _ in range(count)]
    stdin = b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)
    output = subprocess.run([probe, "check"], input=stdin, stdout=subprocess.PIPE, check=True).stdout
    verdicts = output.decode().splitlines()
    assert len(verdicts) == count, f"{len(verdicts)} verdicts for {count} files: a message isn't one line"
    accepted = both_refuse = stricter = 0
    used = set()
    for blob, verdict in zip(blobs, verdicts):
        reason = reference_accepts(blob)
        if verdict == "accept":
            accepted += 1
            assert reason is None or NEWER in reason, f"only we accept {blob!r}: {reason}"
        elif reason is None:
            match = [pattern for pattern in STRICTER if re.search(pattern, verdict)]
            assert match, f"only the reference accepts {blob!r}: {verdict}"
            used.update(match)
            stricter += 1
        else:
            both_refuse += 1
        assert "\n" not in verdict and len(verdict) < 1000
    print(f"{count} mutants: {accepted} accepted by both, {both_refuse} refused by both, {stricter} refused by us alone "
          f"for {len(used)} of {len(STRICTER)} reasons")
    assert accepted > count // 20 and both_refuse > count // 4, "the mutations say too little"


def check_what_we_write(probe, folder):
    path = os.path.join(folder, "ours.safetensors")
    subprocess.run([probe, "write", path], check=True)
    with open(path, "rb") as stream:
        tensors = dict(safetensors.deserialize(stream.read()))
    assert len(tensors) == 21, sorted(tensors)
    for name, tensor in tensors.items():
        data = bytes(tensor["data"])
        assert data == bytes(range(len(data))), name
        if name.startswith("t_"):
            assert tensor["dtype"] == name[2:] and tensor["shape"] == [2, 3], tensor
    assert tensors["empty"]["shape"] == [0, 4] and tensors["scalar"]["shape"] == []
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"digest": "beef", "text": 'a "quoted"\nline \u00e4'}, file.metadata()
        values = file.get_tensor("t_I32")
        assert values.dtype == numpy.int32 and values[0, 0] == 0x03020100


def check_what_they_write(probe, folder):
    rng = numpy.random.default_rng(5)
    path = os.path.join(folder, "theirs.safetensors")
    arrays = {
        "q": rng.standard_normal((5, 2, 8)).astype(numpy.float32),
        "k": rng.standard_normal((5, 1, 8)).astype(numpy.float16),
        "cu_seqlens_q": numpy.array([0, 2, 5], numpy.int32),
        "q_offset": numpy.array([3, -1], numpy.int64),
        "scalar": numpy.array(2.5),
        "empty": numpy.zeros((0, 3), numpy.uint8),
        "flags": numpy.array([True, False]),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "float64": "F64", "uint8": "U8", "bool": "BOOL"}
    expected = {name: (names[str(a.dtype)], ",".join(map(str, a.shape)), a.tobytes()) for name, a in arrays.items()}
    compare_dump(probe, path, expected)

    # numpy has no bf16: the upper halves of fp32 numbers, as raw bytes.
    raw = {"v": {"dtype": "bfloat16", "shape": [3, 1, 2], "data": b"\x80\x3f\x00\xc0\xff\x7f\x00\x00\x01\x00\x80\x7f"}}
    try:
        blob = safetensors.serialize(raw)
    except Exception:  # other versions want other forms of the same  # pylint: disable=broad-except
        blob = file_of(json.dumps({"v": entry("BF16", [3, 1, 2], 0, 12)}), raw["v"]["data"])
        assert reference_accepts(blob) is None
    with open(path, "wb") as stream:
        stream.write(blob)
    compare_dump(probe, path, {"v": ("BF16", "3,1,2", raw["v"]["data"])})


def compare_dump(probe, path, expected):
    output = subprocess.run([probe, "dump", path], stdout=subprocess.PIPE, check=True).stdout.decode()
    read = {}
    for line in output.splitlines():
        name, dtype, shape, data = line.split(" ")
        read[name] = (dtype, shape, bytes.fromhex(data))
    assert read == expected, f"{read} instead of {expected}"


def main():
    probe = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        check_what_we_write(probe, folder)
        check_what_they_write(probe, folder)
    check_mutants(probe, 100_000 if os.environ.get("RINGATTN_TEST_LONG") == "1" else 5_000)


main()
