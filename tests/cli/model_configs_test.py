# SPDX-License-Identifier: Apache-2.0
"""What --model-config reads from the config.json of about 120 models: each layer's op, heads, dims, window, scale, cap and
sinks, or the refusal. The expected values are those that the models' own code passes to its attention
(model_configs/README.md), and docs/models.md has a row for each family.

Usage: model_configs_test.py RINGATTN [--every-layer] [CONFIG …]. Without --every-layer, the first and the last layer of a
row of expected.tsv stand for all of its layers."""

import concurrent.futures
import csv
import math
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CORPUS = HERE / "model_configs"
PAGE = HERE.parents[1] / "docs/models.md"
SHAPE = {
    "attention": ["heads", "kv-heads", "head-dim", "head-dim-v", "mask", "window", "softmax-scale", "softcap"],
    "mla": ["heads", "head-dim", "rope-dim", "latent-dim", "head-dim-v", "mask", "window", "softmax-scale"],
    "linear_attention": ["heads", "head-dim", "head-dim-v", "scale", "rope"],
    "ssd": ["heads", "head-dim", "state-dim", "groups", "conv-width"],
    "selective_scan": ["heads", "state-dim", "groups", "conv-width"],
    "gated_delta": ["heads", "key-heads", "head-dim", "head-dim-v", "decay", "qk-norm"],
}
USAGE = 2  # exit code


def table(name):
    with open(CORPUS / name, encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def layers_of(text, every):
    """The layers of "0-4,6" that are tried; [None]: no --layer."""
    if text == "-":
        return [None]
    layers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    return layers if every else sorted({layers[0], layers[-1]})


def run(program, config, flags, layer):
    command = [program, "run", "--synthetic", "1", "--seq", "64", "--print-config", *flags]
    command += ["--model-config", str(CORPUS / f"{config}.json")]
    if layer is not None:
        command += ["--layer", str(layer)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGATTN_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    # Without the file's name, in which a model_type may stand.
    return done.returncode, done.stdout, done.stderr.strip().replace(str(CORPUS / f"{config}.json"), "FILE")


def printed(text):
    """The values that --print-config printed, by flag."""
    found = re.findall(r'^([\w-]+) = "?([^"\n]*?)"?(?:  #.*)?$', text, re.MULTILINE)
    return dict(found)


def wanted(text):
    """The values of an expected line of flags, by flag, and whether the layer has sinks."""
    words = text.split()
    sinks = words[-1] == "sinks"
    words = words[:-1] if sinks else words
    return {flag[2:]: value for flag, value in zip(words[::2], words[1::2])}, sinks


def window_of(values):
    left, right = (int(side) for side in values.get("window", "-1,-1").split(","))
    return left, 0 if values["mask"] == "causal" else right  # a causal mask ends at the row's own key


def canonical(values):
    """The values with defaults filled in, as they are compared."""
    op = values.get("op")
    shape = {"op": op, **{flag: values.get(flag) for flag in SHAPE.get(op, [])}}
    if op in ("attention", "mla"):
        shape["window"] = window_of(values)
        width = int(values["head-dim"]) + (int(values["rope-dim"]) if op == "mla" else 0)
        shape["head-dim-v"] = values.get("head-dim-v", values["head-dim"])
        shape["softmax-scale"] = float(values.get("softmax-scale", 1 / math.sqrt(width)))
    if op == "linear_attention":
        shape["head-dim-v"] = values.get("head-dim-v", values["head-dim"])
    if op == "attention":
        shape["softcap"] = float(values.get("softcap", 0))
    return shape


def differences(expected, code, output, message):
    """What is not as expected; an empty string: nothing."""
    kind, *rest = expected.split(" ", 2)
    if kind in ("asks", "refused"):
        words = rest[-1]
        right_code = USAGE if kind == "asks" else int(rest[0])
        if code != right_code:
            return f"exit code {code}, not {right_code}: {message or printed(output).get('op')}"
        if not any(word in message for word in words.split("|")):
            return f"the message does not say {words}: {message}"
        return ""
    if code != 0:
        return f"exit code {code}: {message}"
    values, sinks = wanted(expected)
    right, found = canonical(values), canonical(printed(output))
    wrong = [
        f"{flag} {found.get(flag)}, not {value}"
        for flag, value in right.items()
        if not (math.isclose(value, found.get(flag) or 0, rel_tol=1e-6) if isinstance(value, float) else value == found.get(flag))
    ]
    said = "# sinks of the model's layer" in output or "sinks" in message
    if sinks != said:
        wrong.append(f"sinks are {'not ' if sinks else ''}announced")
    return ", ".join(wrong)


def check_page(models):
    """docs/models.md names the families and model types of the corpus, and no others."""
    rows = re.findall(r"^\| ([^|]+?) \| ((?:`[\w.-]+`(?:, )?)+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = {(family, kind) for family, kinds in rows for kind in re.findall(r"`([^`]+)`", kinds)}
    read = set()
    for row in models:
        text = (CORPUS / f"{row['config']}.json").read_text(encoding="utf-8")
        read.add((row["family"], re.search(r'"model_type": "([^"]+)"', text)[1]))
    wrong = [f"{PAGE.name}: no config of {family} with model_type {kind}" for family, kind in sorted(said - read)]
    wrong += [f"{PAGE.name} has no row for {family} with model_type {kind}" for family, kind in sorted(read - said)]
    if len(rows) < 40:
        wrong.append(f"{PAGE.name} has {len(rows)} families")
    return wrong


def main():
    program, *names = sys.argv[1:]
    every = "--every-layer" in names
    names = [name for name in names if name != "--every-layer"]
    models = table("models.tsv")
    rows = table("expected.tsv")
    files = {path.stem for path in CORPUS.glob("*.json")}
    wrong = [] if names else check_page(models)
    for name, listed in (("models.tsv", {row["config"] for row in models}), ("expected.tsv", {row["config"] for row in rows})):
        wrong += [f"{name}: {config}.json is not there" for config in sorted(listed - files)]
        wrong += [f"{config}.json is not in {name}" for config in sorted(files - listed)]

    tried = []
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for row in rows:
            if names and row["config"] not in names:
                continue
            flags = [] if row["flags"] == "-" else row["flags"].split()
            for layer in layers_of(row["layers"], every):
                done = pool.submit(run, program, row["config"], flags, layer)
                tried.append((row["config"], *flags, *([] if layer is None else ["--layer", str(layer)]), row["expected"], done))
    for *job, expected, done in tried:
        fault = differences(expected, *done.result())
        if fault:
            wrong.append(f"{' '.join(job)}: {fault}")
    for fault in wrong:
        print(fault)
    print(f"{len(tried)} runs, {len(wrong)} faults")
    return 1 if wrong or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
