// SPDX-License-Identifier: Apache-2.0
#include "ops/op_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

// Each row is defined in the directory of its op.
extern const FileOpEntry kCompressOp, kQuantizeOp;
extern const OpEntry kAttentionOp, kDecodeOp, kMlaOp, kAttentionBackwardOp, kSsdOp, kSsdBackwardOp, kSelectiveScanOp,
    kConv1dOp, kConv1dBackwardOp, kLinearAttentionOp, kGatedDeltaOp, kBatchedGemmOp, kLinearOp, kReshardOp, kRopeOp;

namespace {

std::vector<const OpEntry*>& rows() {
  static std::vector<const OpEntry*> table{&kAttentionOp,
                                           &kDecodeOp,
                                           &kMlaOp,
                                           &kAttentionBackwardOp,
                                           &kSsdOp,
                                           &kSsdBackwardOp,
                                           &kSelectiveScanOp,
                                           &kConv1dOp,
                                           &kConv1dBackwardOp,
                                           &kLinearAttentionOp,
                                           &kGatedDeltaOp,
                                           &kBatchedGemmOp,
                                           &kLinearOp,
                                           &kRopeOp,
                                           &kReshardOp};
  return table;
}

}  // namespace

std::span<const OpEntry* const> op_table() { return rows(); }

std::span<const FileOpEntry* const> file_op_table() {
  static constexpr const FileOpEntry* kTable[] = {&kCompressOp, &kQuantizeOp};
  return kTable;
}

void add_op(const OpEntry& entry) { rows().push_back(&entry); }

const OpEntry* find_op(std::string_view name) {
  for (const OpEntry* entry : rows()) {
    if (entry->name == name || (!entry->old_name.empty() && entry->old_name == name)) return entry;
  }
  return nullptr;
}

const OpEntry& op_entry(std::string_view name) {
  const OpEntry* const entry = find_op(name);
  if (entry == nullptr) fail(ErrorCode::kInternal, fmt::format("no op is called {}", name));
  return *entry;
}

namespace {

// How well a file fits an op that doesn't recognize it. Compared in this order: more of the op's tensors, fewer missing
// ones, more of its optional ones.
std::tuple<std::ptrdiff_t, std::ptrdiff_t, std::ptrdiff_t> fit(const OpEntry& entry, const TensorFile& file) {
  std::ptrdiff_t present = 0, missing = 0, optional = 0;
  for (const OpTensor& tensor : entry.tensors) {
    const bool has = file.file.contains(name_in(file.request.names, tensor.name));
    if (tensor.optional) {
      optional += has ? 1 : 0;
    } else {
      ++(has ? present : missing);
    }
  }
  return {present, -missing, optional};
}

bool has_own_setting(const OpEntry& entry, const SettingSources& sources) {
  return std::ranges::any_of(entry.own_settings, [&](const SettingRow& row) { return sources.chosen(row.name); });
}

bool is_asked_for(const OpEntry& entry, const SettingSources& sources) {
  return sources.given("model-config") || has_own_setting(entry, sources);
}

// The only op whose own settings the user gives, or null.
const OpEntry* op_of_settings(const SettingSources& sources) {
  const auto asked = [&](const OpEntry* entry) {
    return entry->recognizes != nullptr && has_own_setting(*entry, sources);
  };
  const auto found = std::ranges::find_if(rows(), asked);
  return std::ranges::count_if(rows(), asked) == 1 ? *found : nullptr;
}

}  // namespace

const OpEntry& op_of_file(const TensorFile& file, const SettingSources& sources, std::string_view named) {
  const OpEntry* const wanted = named.empty() ? nullptr : &op_entry(named);
  const OpEntry* found = nullptr;
  for (const OpEntry* entry : rows()) {
    if (entry->recognizes == nullptr || !entry->recognizes(file)) continue;
    if (found != nullptr) {
      fail(ErrorCode::kFile,
           fmt::format("{} has the tensors of {} and of {}", file.request.path, found->name, entry->name),
           "a job is of one op", "Leave out the tensors of the other op.");
    }
    found = entry;
  }
  if (found == nullptr) {
    if (wanted != nullptr && wanted->recognizes != nullptr) return *wanted;
    if (const OpEntry* const asked = op_of_settings(sources)) return *asked;
    const auto best = std::ranges::max_element(rows(), {}, [&](const OpEntry* entry) { return fit(*entry, file); });
    const auto [present, missing, optional] = fit(**best, file);
    return present + optional == 0 ? *rows().front()
                                   : **best;  // without a matching name, the default op reports the error
  }
  // The job of the found op may turn out to belong to an op that recognizes no files.
  const bool is_other = wanted != nullptr && wanted != found && wanted->recognizes != nullptr;
  if (found->refuse_unnamed != nullptr) {
    if (is_other) return *wanted;
    if (wanted == nullptr && !is_asked_for(*found, sources)) found->refuse_unnamed(file);
  }
  if (is_other && wanted->accepts_if_named != nullptr && wanted->accepts_if_named(file)) return *wanted;
  if (is_other) refuse_named_op(file.request.path, named, found->name);
  return *found;
}

void refuse_named_op(const std::string& path, std::string_view named, std::string_view op) {
  fail(ErrorCode::kUsage, MessageTemplate{setting("op", named), " contradicts ", setting("input", path)},
       fmt::format("the file has the tensors of {}", op),
       MessageTemplate{"Leave ", setting("op"), " out, or give a file of ", std::string(named), "."});
}

const OpEntry& op_of_layer(LayerKind kind) {
  const auto found = std::ranges::find_if(rows(), [&](const OpEntry* entry) { return entry->computes(kind); });
  return **found;
}

std::string ops_with(std::string_view setting) {
  std::vector<std::string_view> names;
  for (const OpEntry* entry : rows()) {
    if (entry->takes(setting)) names.push_back(entry->name);
  }
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

bool OpEntry::takes(std::string_view setting) const {
  return std::ranges::find(settings, setting) != settings.end() ||
         std::ranges::find(own_settings, setting, &SettingRow::name) != own_settings.end();
}

}  // namespace ringattn
