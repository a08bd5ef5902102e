#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a Python test; 77 means skipped, with the reason on stdout.
command -v python3 >/dev/null 2>&1 || { echo "skipped: needs python3"; exit 77; }
exec python3 "$@"
