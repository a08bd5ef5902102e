// SPDX-License-Identifier: Apache-2.0
#include "ops/op_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"

namespace ringattn {

// Each row is defined in the directory of its op.
extern const FileOpEntry kCompressOp, kQuantizeOp;
extern const OpEntry kAttentionOp, kDecodeOp, kMlaOp, kAttentionBackwardOp, kSsdOp, kSsdBackwardOp, kSelectiveScanOp,
    kConv1dOp, kConv1dBackwardOp, kGatedDeltaOp, kBatchedGemmOp, kLinearOp, kReshardOp, kRopeOp;

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

const OpEntry& op_of_file(const TensorFile& file) {
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
  if (found != nullptr) return *found;
  // The one that most tensors belong to; its opening says which is missing.
  const auto present = [&](const OpEntry* entry) {
    return std::ranges::count_if(entry->tensors, [&](const OpTensor& tensor) {
      return !tensor.optional && file.file.contains(name_in(file.request.names, tensor.name));
    });
  };
  return **std::ranges::max_element(rows(), {}, present);
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
