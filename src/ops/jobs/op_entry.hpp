// SPDX-License-Identifier: Apache-2.0
// A row of the table of ops (ops/op_table.hpp): the facts about an op that programs need before a job is open, and the
// function that opens a job.
#pragma once

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/transport.hpp"
#include "io/model_config.hpp"
#include "kernels/common/registry.hpp"
#include "ops/common/job_share.hpp"
#include "ops/common/tensor_file.hpp"
#include "ops/jobs/settings.hpp"

namespace ringattn {

class OpJob;

// A tensor of an input file.
struct OpTensor {
  std::string_view name;
  std::string_view axes;  // "[tokens, heads, head_dim]"
  bool optional = false;
};

// How a value is written in a config file.
enum class SettingKind { kText, kNumber, kSize, kSwitch };

// A setting that is not a member of Settings. Its text is in Settings::own. Ops with the same setting share the row.
struct SettingRow {
  std::string_view name;  // "temperature"
  SettingKind kind = SettingKind::kNumber;
  std::string_view value;     // shown after the name in the help: "X"
  std::string_view fallback;  // the default; not empty
  std::string_view help;
  void (*check)(std::string_view text);  // throws BadValue (values.hpp)
};

// An op's own default of a shared setting.
struct SettingDefault {
  std::string_view setting;
  std::string_view value;
};

// Receives the value of a setting from a model's config.
using FillSetting = std::function<void(std::string_view setting, const std::string& value)>;

// The sources of the values of settings.
class SettingSources {
 public:
  virtual ~SettingSources() = default;
  // Whether a user gave the value.
  virtual bool given(std::string_view setting) const = 0;
  // Whether the user chose it. A default that was written to a config file is given, but not chosen.
  virtual bool chosen(std::string_view setting) const = 0;
};

enum class OpUse { kRun, kVerify, kBench, kPlan };

struct OpRequest {
  const Settings& settings;
  const SettingSources& sources;
  std::shared_ptr<JobShare> share;  // shared with the ranks of this process; null: nothing is shared
  std::int64_t tokens = 0;          // of each sequence of synthetic input
  OpUse use = OpUse::kRun;
  Transport* world = nullptr;                     // null: the job is only planned
  KernelScope scope = KernelScope::kThisMachine;  // of a plan
  std::string rows_wanted = {};  // why queries that could be decode steps stay ring attention; empty: no reason
  bool timeline = false;         // a run also records when each of its parts was done

  bool from_file() const { return !settings.input.empty(); }
};

struct OpEntry {
  std::string_view name;  // "attention"
  std::string_view help;
  std::string_view file;  // describes an input file of the op in messages: "a file with keys and values"
  std::span<const OpTensor> tensors;
  std::span<const std::string_view> tensor_notes = {};  // lines about tensors that replace others
  std::span<const std::string_view> settings = {};      // shared settings of the op that not every op has
  std::span<const SettingRow> own_settings = {};
  std::span<const SettingDefault> defaults = {};
  unsigned layers = 0;  // kinds of model layers that it computes: bits 1 << LayerKind
  // Fills in the settings that a layer determines. Those of the shape are ignored if an input file determines them.
  void (*fill)(const ModelLayer& layer, const Settings& settings, const FillSetting& fill) = nullptr;
  std::string_view old_name = {};  // before 0.4
  std::string_view steps = {};     // the op that decodes a few queries at the ends of sequences
  std::string_view backward = {};  // the op that computes the gradients; empty: none
  // Whether a file holds this op's tensors, and not also those of another op. A file that several ops recognize is
  // refused. Names in FileInput::names count like the tensors' own names (name_in()). Null: another op opens the files,
  // and the job says that it belongs to this op.
  bool (*recognizes)(const TensorFile& file) = nullptr;
  // Whether a file that another op recognizes belongs to this op if the user names it. Null: no.
  bool (*accepts_if_named)(const TensorFile& file) = nullptr;
  // Throws kFile for a file that the op recognizes, but that may also be a file of another op with missing tensors.
  // Called if the user neither names the op nor gives one of its own settings or a model's config. Null: the tensors
  // decide.
  void (*refuse_unnamed)(const TensorFile& file) = nullptr;
  // Opens a job. Not collective. Throws kFile for a file without a job, and kUsage for settings that contradict each
  // other.
  std::unique_ptr<OpJob> (*make)(const OpRequest& request) = nullptr;

  // Whether the op has a setting that not every op has.
  bool takes(std::string_view setting) const;
  // The first kind of layer that it computes; absent: none.
  std::optional<LayerKind> layer() const {
    return layers == 0 ? std::nullopt : std::optional(static_cast<LayerKind>(std::countr_zero(layers)));
  }
  bool computes(LayerKind kind) const { return (layers >> static_cast<unsigned>(kind) & 1U) != 0; }
};

constexpr unsigned layer_bit(LayerKind kind) { return 1U << static_cast<unsigned>(kind); }

// Passes settings to a FillSetting: Fill{fill}("heads", 8)("head-dim", 64).
class Fill {
 public:
  explicit Fill(const FillSetting& fill) : fill_(fill) {}
  template <typename Value>
  const Fill& operator()(std::string_view setting, const Value& value) const {
    fill_(setting, fmt::format("{}", value));
    return *this;
  }

 private:
  const FillSetting& fill_;
};

}  // namespace ringattn
