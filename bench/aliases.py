# SPDX-License-Identifier: Apache-2.0
"""Old names in committed result lines, and their new names. Result files are never rewritten, so every reader passes the
lines that it loads through modern()."""

from typing import Any

# Keys of a line or of its "job".
KEYS = {
    "predicted_ms": "estimated_ms",
    "exposed_ms": "exposed_comm_ms",
    "folds_ms": "compute_ms",
    "folds_by": "compute_by",
    "inner": "k",
    "outer": "n",
}
# Values of "kernel", "mode", "op", "kind" and "shape", in a line or its "job".
VALUES = {
    "sm90_fold": "sm90_attention",
    "sm80_fold": "sm80_attention",
    "sm80_plain": "sm80_simt",
    "cpu_fold": "cpu_attention",
    "sm90_latent": "sm90_mla",
    "sm90_latent_1k": "sm90_mla_split1k",
    "sm90_product": "sm90_gemm",
    "sm80_product": "sm80_gemm",
    "cpu_product": "cpu_gemm",
    "sm80_chain": "sm80_gemm_ordered",
    "sm90_scan": "sm90_ssd",
    "sm80_scan": "sm80_ssd",
    "cpu_scan": "cpu_ssd",
    "sm90_selective": "sm90_selective_scan",
    "sm80_selective": "sm80_selective_scan",
    "cpu_selective": "cpu_selective_scan",
    "sm80_convolution": "sm80_conv1d",
    "cpu_convolution": "cpu_conv1d",
    "convolution": "conv1d",
    "convolution-131k": "conv1d-131k",
    "folds": "compute",
}
# Values of "layout", in a line or its "plan".
LAYOUTS = {"groups": "KV splits"}
# Parts of "mask", in a line or its "job".
MASKS = {"lists of ": "block mask of ", ", one a head": ", one per head", ", one a KV head": ", one per KV head"}
NAMED = ("kernel", "mode", "op", "kind", "shape")
SCHEMAS = {
    "ringattn.bench/1": "ringattn.bench/2",
    "ringattn.scan/1": "ringattn.ssm/1",
    "ringattn.product/1": "ringattn.gemm/1",
}


def modern(line: dict[str, Any]) -> dict[str, Any]:
    """The line with today's names. Lines of other tools are unchanged, because none of their names equals an old name here."""
    changed = {}
    for key, value in line.items():
        if key in NAMED and isinstance(value, str):
            value = VALUES.get(value, value)
        elif key == "mask" and isinstance(value, str):
            for old, now in MASKS.items():
                value = value.replace(old, now)
        elif key == "layout" and isinstance(value, str):
            value = LAYOUTS.get(value, value)
        elif key == "schema":
            value = SCHEMAS.get(value, value)
        elif key in ("job", "plan") and isinstance(value, dict):
            value = modern(value)
        changed[KEYS.get(key, key)] = value
    return changed
