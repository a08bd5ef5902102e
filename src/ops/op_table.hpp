// SPDX-License-Identifier: Apache-2.0
// The table of ops: what programs need to know of an op before a job is opened. An op is one row here and one
// directory of src/ops; the program, its help and its flags iterate the table.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/op.hpp"
#include "io/model_config.hpp"

namespace ringattn {

// The default of a setting of the shape, where an op has one of its own.
struct SettingDefault {
  std::string_view setting;
  std::string_view value;
};

// Takes the value of a setting that a model's config gives.
using FillSetting = std::function<void(std::string_view setting, const std::string& value)>;

struct OpEntry {
  Op op;
  std::string_view help;
  std::array<std::string_view, 4> tensors;  // lines about the tensors of an input file; empty ones end the list
  std::string_view file;                    // an input file of the op, in messages: "a file with keys and values"
  std::array<SettingDefault, 2> defaults;   // empty ones end the list
  // The shape of a model's layer, as settings.
  void (*fill_shape)(const ModelLayer& layer, const FillSetting& fill);
};

std::span<const OpEntry> op_table();
const OpEntry& op_entry(Op op);

// "ssd, selective_scan and conv1d": the ops of which `ops` has the bit 1 << Op.
std::string op_names(unsigned ops);

}  // namespace ringattn
