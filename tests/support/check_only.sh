#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check_only.sh COMPILER … -o OBJECT …: a compiler launcher. The compiler checks the source, and OBJECT is empty.
set -e
"$@" -fsyntax-only
while [ "$1" != -o ]; do
  shift
done
: >"$2"
