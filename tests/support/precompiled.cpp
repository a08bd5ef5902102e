// SPDX-License-Identifier: Apache-2.0
// The target whose precompiled headers the tests share needs a source of its own.
