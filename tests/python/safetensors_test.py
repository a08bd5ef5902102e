# SPDX-License-Identifier: Apache-2.0
"""The package's reader of safetensors files: what the reference library and the program refuse is refused, by the
package's own error, and what is taken has its numbers."""

import json
import pathlib
import re
import tempfile
import unittest
from random import Random

import numpy as np
import ringattn
from ringattn._safetensors import Tensors
from ringattn._tensor_names import known_names

FUZZED = 800


def file_of(header, data=b""):
    """A safetensors file of a header, as text or as what JSON says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def of_one(text=None, data=8, **changes):
    """A file of one tensor, some of whose fields are others, or a text."""
    return file_of({"q": WHOLE | changes} if text is None else text, b"x" * data)


def of_two(first, second, data=16):
    return file_of({"a": WHOLE | {"data_offsets": first}, "b": WHOLE | {"data_offsets": second}}, b"x" * data)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "file.safetensors")

    def refused(self, words, path):
        with self.assertRaises(ringattn.FileError) as caught:
            Tensors(str(path))
        self.assertIn(words, str(caught.exception))
        self.assertLess(len(str(caught.exception)), 1000)


class KnownNames(unittest.TestCase):
    def test_each_op_has_its_own(self):
        for op in ("attention", "decode", "mla", "mla_decode"):
            for name in ("s_aux", "sink", "attn_sink", "attention_sinks", "learnable_sink", "self_attn.sinks"):
                self.assertEqual(known_names(op)[name].role, "sinks")
            self.assertEqual(known_names(op)["cu_seqlens"].role, "cu_seqlens_q")
            self.assertEqual(known_names(op)["alibi_slopes"][:3], ("", "no bias is added to scores", "Leave it out."))
        self.assertEqual(known_names("decode")["seqused_k"].role, "lengths_k")
        self.assertIn("no pages", known_names("attention")["seqused_k"].refused)
        for op in ("ssd", "selective_scan", "causal_conv1d"):
            self.assertEqual(known_names(op)["cu_seqlens_q"].role, "cu_seqlens")
            self.assertNotIn("s_aux", known_names(op))
        self.assertEqual(known_names("ssd")["delta_bias"].unless, "delta")
        self.assertEqual(known_names("ring"), {})

    def test_each_is_in_the_docs(self):
        docs = pathlib.Path(__file__).parents[2] / "docs"
        pages = "".join((docs / page).read_text() for page in ("files.md", "ssm.md", "mla.md"))
        for op in ("attention", "decode", "mla", "mla_decode", "ssd", "selective_scan", "causal_conv1d"):
            for name in known_names(op):
                self.assertIn(f"`{name}`", pages)


class Reader(Case):
    def test_broken_files(self):
        one = json.dumps(WHOLE).encode()
        for words, raw in (
            ("(it is empty)", b""),
            ("(it has 5 bytes, fewer than its length field)", b"12345"),
            ("(it claims a header of 1099511627776 bytes, more than 100000000)", (2**40).to_bytes(8, "little")),
            ("(it claims a header of 100 bytes, and has 8 in all)", (100).to_bytes(8, "little")),
            ("isn't JSON in UTF-8", bytes(8)),
            ("isn't JSON in UTF-8", of_one(b"{")),
            ("isn't JSON in UTF-8", of_one(b'{"\xff":1}')),
            ("isn't JSON in UTF-8", of_one(b'{"q\\ud800":' + one + b"}")),
            ("isn't JSON in UTF-8", of_one(b"\xef\xbb\xbf" + b'{"q":' + one + b"}")),
            ("isn't JSON in UTF-8", of_one(shape=[float("nan")])),
            ("isn't JSON in UTF-8", of_one(b'{"q":' + one + b"}{}")),
            ("members, lists and strings", of_one(b'"' * 2_000_000)),
            ("its JSON is not an object", of_one(b"[]")),
            ("nested deeper than 4 levels", of_one(b"[" * 200_000)),
            ("nested deeper than 4 levels", of_one(b'{"a":' * 200_000)),
            ("members, lists and strings", of_one(b'{"q":[' + b"[],0," * 800_000 + b"0]}")),
            ("it names `q` twice", of_one(b'{"q":' + one + b',"q":' + one + b"}")),
            ("it names `dtype` twice", of_one(b'{"q":{"dtype":"F32",' + one[1:] + b"}")),
            ("tensor `q` is not an object of exactly dtype, shape and data_offsets", of_one({"q": {"dtype": "F32"}})),
            ("tensor `q` is not an object of exactly dtype, shape and data_offsets", of_one(more=1)),
            ("tensor `q` is not an object", of_one({"q": 3})),
            ("the unknown dtype `F33`", of_one(dtype="F33")),
            ("the unknown dtype `3`", of_one(dtype=3)),
            *(("the shape of tensor `q` is not a list of whole numbers", of_one(shape=shape))
              for shape in ([2.0], ["2"], [True, 2], [None], [-2], 2, {"a": 2}, [2**70], [2**63], [[2]])),
            ("the shape of tensor `q`", of_one(b'{"q":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', 0)),
            ("the shape of tensor `q`",
             of_one(b'{"q":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % (b"9" * 5000), 0)),
            ("is larger than 2^63 bits", of_one(shape=[2**40, 2**40])),
            ("is larger than 2^63 bits", of_one(shape=[0, 2**40, 2**40])),
            ("has more than 64 dimensions", of_one(shape=[1] * 65)),
            ("doesn't fill whole bytes", of_one(dtype="F4", shape=[3])),
            *(("the data_offsets of tensor `q` is not a list", of_one(data_offsets=at)) for at in ([0, 8.0], ["0", "8"],
                                                                                                None)),
            ("has 1 data_offsets instead of 2", of_one(data_offsets=[8])),
            ("ends at byte 0, before it begins at 8", of_one(data_offsets=[8, 0])),
            ("ends at byte 8 of 4 bytes of data", of_one(data=4)),
            ("needs 12 bytes and has 8", of_one(shape=[3])),
            ("needs 4 bytes and has 8", of_one(dtype="F16")),
            ("its tensors end at byte 8 of 9 bytes of data", of_one(data=9)),
            ("its tensors end at byte 0 of 3 bytes of data", file_of({}, b"abc")),
            ("after a gap that starts at 8", of_two([0, 8], [12, 20], 20)),
            ("after a gap that starts at 0", of_one(data_offsets=[4, 12], data=12)),
            ("inside another tensor that ends at 8", of_two([0, 8], [0, 8], 8)),
            ("inside another tensor that ends at 8", of_two([0, 8], [4, 12], 12)),
            ("a control character", of_one({"a\nb": WHOLE})),
            ("like a path that leaves", of_one({"../q": WHOLE})),
            ("like a path that leaves", of_one({"/q": WHOLE})),
            ("a tensor's name has more than 4096 bytes", of_one({"ä" * 2049: WHOLE})),
            *(("its __metadata__ is not an object of strings", of_one({"__metadata__": said, "q": WHOLE}))
              for said in ([], "a", {"a": 1}, {"a": None}, {"a": {}})),
        ):  # fmt: skip
            with self.subTest(words):
                self.path.write_bytes(raw)
                self.refused(words, self.path)

    def test_files_that_are_unusual_and_whole(self):
        for header, data in (
            ({}, b""),
            ({"__metadata__": {}, "b": WHOLE}, b"x" * 8),
            ({"__metadata__": None, "b": WHOLE}, b"x" * 8),  # as the reference library
            (b'  {"b":' + json.dumps(WHOLE).encode() + b"}   ", b"x" * 8),
            ({"b": WHOLE | {"data_offsets": [8, 16]}, "a": WHOLE,
              "c": {"dtype": "I64", "shape": [0, 3], "data_offsets": [8, 8]}},
             b"x" * 16),
            ({"b": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"xx"),
        ):  # fmt: skip
            self.path.write_bytes(file_of(header, data))
            tensors = Tensors(str(self.path))
            self.assertFalse("__metadata__" in tensors)
            self.assertNotIn("q", tensors)
        for spaces in range(4):  # where numbers don't lie at multiples of their size
            self.path.write_bytes(file_of(b" " * spaces + json.dumps({"q": WHOLE}).encode(),
                                          np.float32([3, -4]).tobytes()))
            np.testing.assert_array_equal(Tensors(str(self.path)).read("q", ("F32",)), [3, -4])
        with self.assertRaises(ringattn.FileError) as caught:
            Tensors(str(self.path)).read("q", ("I32", "I64"))
        self.assertIn("has dtype F32 (it must be I32 or I64)", str(caught.exception))

    def test_indexes(self):
        self.path.write_bytes(file_of({"q": WHOLE, "k": WHOLE | {"data_offsets": [8, 16]}},
                                      np.arange(4, dtype="f4").tobytes()))
        index = self.path.with_name("model.safetensors.index.json")
        name = self.path.name
        whole = {"weight_map": {"q": name}, "metadata": {"total_size": 1.5, "of": [None]}}
        for words, text in (
            ("it has no weight_map", "{}"),
            ("it has no weight_map", json.dumps({"weight_map": [name]})),
            ("its JSON is not an object", "[]"),
            ("isn't JSON in UTF-8", ""),
            ("isn't JSON in UTF-8", "{"),
            ("nested deeper than 16 levels", "[" * 100_000),
            ("it names `q` twice", '{"weight_map":{"q":"%s","q":"%s"}}' % (name, name)),
            ("the file of tensor `q` is not a name", json.dumps({"weight_map": {"q": 3}})),
            *(("is not a file inside the index's folder", json.dumps({"weight_map": {"q": file}}))
              for file in ("/dev/zero", "../a", "", "a/../b", "./a", "a\0")),
        ):  # fmt: skip
            index.write_text(text)
            with self.subTest(words):
                self.refused(words, index)
        index.write_text(json.dumps(whole))
        self.assertFalse("k" in Tensors(str(index)))
        np.testing.assert_array_equal(Tensors(str(index)).read("q", ("F32",)), [0, 1])
        # A job needs the files of its own tensors.
        index.with_name("folder").mkdir()
        index.write_text(json.dumps({"weight_map": {"q": name, "k": "none", "v": "folder"}}))
        tensors = Tensors(str(index))
        np.testing.assert_array_equal(tensors.read("q", ("F32",)), [0, 1])
        for tensor, words in (("k", "can't open"), ("v", "it is a directory")):
            with self.assertRaisesRegex(ringattn.FileError, words):
                tensors.read(tensor, ("F32",))
        index.write_text(json.dumps({"weight_map": {"v": name}}))
        with self.assertRaises(ringattn.FileError) as caught:
            Tensors(str(index)).read("v", ("F32",))
        self.assertIn("says it does", str(caught.exception))


class Fuzz(Case):
    """What the reference library refuses is refused, by the package's own error, and what is taken has its numbers."""

    words = (b"-0", b"0", b"1e0", b"2.0", b'"2"', b"true", b"null", b"NaN", b"9223372036854775808",
             b"18446744073709551616", b"[",
             b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\xff", b"\0", b" ", b"\t", b'"q":1,', b'"__metadata__":',
             b"[0,0]",
             b'"F16"', b'"BF16"', b'"F4"', b'"U8"', b"\\ud800", b"-", b"00", b"\xef\xbb\xbf")  # fmt: skip

    def changed(self, random, header, data):
        """A file that differs in a few places from a whole one."""
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            at = random.randrange(len(header) + 1)
            numbers = [found.span() for found in re.finditer(rb"\d+", header)]
            kind = random.randrange(8)
            if kind == 0:
                header = header[:at] + bytes([random.randrange(256)]) + header[at + 1 :]
            elif kind == 1:
                header = header[:at] + header[at + random.randrange(1, 9) :]
            elif kind == 2:
                header = header[:at] + random.choice(self.words) + header[at:]
            elif kind == 3:
                end = at + random.randrange(1, 60)
                header = header[:end] + header[at:end] + header[end:]
            elif kind in (4, 5) and numbers:
                begin, end = random.choice(numbers)
                other = random.choice((random.choice(self.words), str(random.randrange(65)).encode()))
                header = header[:begin] + other + header[end:]
            elif kind == 6:
                data = random.choice((data[:-1], data + b"x", b""))
            else:
                header = header.replace(random.choice((b"F32", b"I64", b"[0, 24]", b'"a"')), random.choice(self.words),
                                        1)
        length = len(header) if random.random() < 0.9 else random.randrange(2 * len(header))
        return length.to_bytes(8, "little") + header + data

    def test_against_the_reference(self):
        try:
            import safetensors
        except ImportError:
            self.skipTest("needs safetensors")
        header = {"__metadata__": {"made": "here", "a": "b"},
                  "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                  "none": {"dtype": "I32", "shape": [0, 7], "data_offsets": [24, 24]},
                  "b": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]}}  # fmt: skip
        text, data = json.dumps(header).encode(), bytes(range(40))
        random = Random(7)
        taken = refused = 0
        for number in range(FUZZED):
            raw = self.changed(random, text, data)
            self.path.write_bytes(raw)
            try:
                theirs = dict(safetensors.deserialize(raw))
            except safetensors.SafetensorError:
                theirs = None
            with self.subTest(number, raw=raw):
                try:
                    ours = Tensors(str(self.path))
                except ringattn.FileError as error:
                    self.assertLess(len(str(error)), 1000)
                    refused += 1
                    continue
                self.assertIsNotNone(theirs, "the reference refuses it")
                taken += 1
                for name, tensor in theirs.items():
                    if tensor["dtype"] in ("F32", "I32", "I64"):
                        found = ours.read(name, (tensor["dtype"],))
                        self.assertEqual((list(found.shape), found.tobytes()), (tensor["shape"], bytes(tensor["data"])))
        self.assertGreater(min(taken, refused), FUZZED // 50)


if __name__ == "__main__":
    unittest.main()
