// SPDX-License-Identifier: Apache-2.0
// The table of ops. An op is one directory of src/ops and one row here; programs, their help and their flags iterate
// the table and name no op.
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
// The op by its name or its name before 0.4; null: there is none.
const OpEntry* find_op(std::string_view name);

// The op that opens the file: the one that recognizes it or, where none does, the one that the user named, or else the
// only one whose own settings are given, or else the one that most of its tensors belong to. Its opening then says what
// is missing. `named`: the user's; empty: none.
// Throws kFile where several ops recognize the file, and where the op wants to be named; kUsage where the named op
// isn't the file's.
const OpEntry& op_of_file(const TensorFile& file, const SettingSources& sources, std::string_view named);
// Throws kUsage: the user named an op, and the file is one of `op`.
[[noreturn]] void refuse_named_op(const std::string& path, std::string_view named, std::string_view op);
// The first op that computes such a layer.
const OpEntry& op_of_layer(LayerKind kind);

// "ssd, selective_scan and conv1d": the ops that have a setting.
std::string ops_with(std::string_view setting);

// Ops that make a file of a file, each a subcommand of the same name.
std::span<const FileOpEntry* const> file_op_table();

// Adds an op of the program's own. Before anything else uses the table; not thread-safe.
void add_op(const OpEntry& entry);

}  // namespace ringattn
