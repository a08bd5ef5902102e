// SPDX-License-Identifier: Apache-2.0
// The table of ops. An op is one directory of src/ops and one row here. Programs, their help and their flags iterate
// over the table and name no op.
//
//   const OpEntry& op = op_entry("attention");
//   std::unique_ptr<OpJob> job = op.make(request);
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ops/jobs/file_op.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

// The first is the default.
std::span<const OpEntry* const> op_table();
// Throws kInternal for a name that no op has.
const OpEntry& op_entry(std::string_view name);
// The op with this current name, or this name before 0.4; null if there is none.
const OpEntry* find_op(std::string_view name);

// The op that opens the file: the one that recognizes it. If none does: the op that the user named, or the only op
// whose own settings are given, or the op to which most of the file's tensors belong. Opening the file then reports
// what is missing. `named`: the user's; empty: none. Throws kFile if several ops recognize the file, or if the op must
// be named; kUsage if the named op is not the file's.
// isn't the file's.
const OpEntry& op_of_file(const TensorFile& file, const SettingSources& sources, std::string_view named);
// Throws kUsage: the user named an op, but the file belongs to `op`.
[[noreturn]] void refuse_named_op(const std::string& path, std::string_view named, std::string_view op);
// The first op that computes such a layer.
const OpEntry& op_of_layer(LayerKind kind);

// "ssd, selective_scan and conv1d": the ops that have a setting.
std::string ops_with(std::string_view setting);

// Ops that convert a file, each a subcommand of the same name.
std::span<const FileOpEntry* const> file_op_table();

// Adds an op of the program itself. Call it before anything uses the table. Not thread-safe.
void add_op(const OpEntry& entry);

}  // namespace ringattn
