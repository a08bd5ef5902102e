// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "io/tensor_roles.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;

SafetensorsHeader parse_header(const FileDescriptor& file, const std::string& path, std::int64_t file_bytes) {
  SafetensorsHeaderReader::check_file_size(path, file_bytes);
  std::array<std::byte, 8> length;
  read_exactly(file, path, 0, length);
  SafetensorsHeaderReader reader(path, length, file_bytes);
  std::string piece;
  for (std::int64_t offset = 8; reader.missing() > 0; offset += static_cast<std::int64_t>(piece.size())) {
    piece.resize(std::min(kPiece, reader.missing()));
    read_exactly(file, path, offset, std::as_writable_bytes(std::span(piece)));
    reader.feed(piece);
  }
  return reader.finish();
}

bool is_now(const std::string& path, const FileIdentity& identity) {
  try {
    return identify(open_regular(path), path) == identity;
  } catch (const Error&) {
    return false;  // opening it reports why
  }
}

}  // namespace

SafetensorsShard::SafetensorsShard(std::string path)
    : path_(std::move(path)),
      file_(open_regular(path_)),
      identity_(identify(file_, path_)),
      header_(parse_header(file_, path_, identity_.bytes)) {}

void SafetensorsShard::read(const TensorInfo& tensor, std::int64_t offset, std::span<std::byte> target) const {
  const auto bytes = static_cast<std::int64_t>(target.size());
  if (offset < 0 || bytes > tensor.bytes() || offset > tensor.bytes() - bytes) {
    fail(ErrorCode::kInternal, fmt::format("read past tensor {} of {}", in_quotes(tensor.name), path_),
         fmt::format("{} bytes at {} of {}", bytes, offset, tensor.bytes()));
  }
  read_exactly(file_, path_, header_.data_offset + tensor.begin + offset, target);
}

void SafetensorsShard::read_header(const std::function<void(std::span<const std::byte>)>& visit) const {
  std::vector<std::byte> piece;
  for (std::int64_t offset = 0; offset < header_.data_offset; offset += static_cast<std::int64_t>(piece.size())) {
    piece.resize(std::min(kPiece, static_cast<std::size_t>(header_.data_offset - offset)));
    read_exactly(file_, path_, offset, piece);
    visit(piece);
  }
}

bool SafetensorsShard::is_current() const { return is_now(path_, identity_); }

void SafetensorsShard::check_unchanged() const {
  if (identify(file_, path_) != identity_) {
    fail(ErrorCode::kFile, fmt::format("{} has changed", path_), "it was written to since it was opened",
         "Leave input files alone while a job reads them.");
  }
}

std::string TensorSource::text() const { return fmt::format("{} of {}", in_quotes(info->name), shard->path()); }

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  if (!path_.ends_with(kIndexSuffix)) {
    single_ = std::make_unique<SafetensorsShard>(path_);
    identity_ = single_->identity();
    return;
  }
  identity_ = identify(open_regular(path_), path_);
  index_ = read_safetensors_index(path_);
  folder_ = path_.substr(0, path_.rfind('/') + 1);  // npos + 1 is 0: no folder
}

std::vector<std::string_view> SafetensorsFile::names() const {
  std::vector<std::string_view> names;
  if (single_) {
    for (const TensorInfo& tensor : single_->header().tensors) names.push_back(tensor.name);
  } else {
    for (const auto& [tensor, file] : index_.weight_map) names.push_back(tensor);
  }
  return names;
}

bool SafetensorsFile::contains(std::string_view name) const {
  return single_ ? single_->header().find(name) != nullptr : index_.weight_map.contains(name);
}

TensorSource SafetensorsFile::tensor(std::string_view name) const {
  if (single_) {
    const TensorInfo* info = single_->header().find(name);
    if (info == nullptr) fail_unknown(name);
    return {single_.get(), info};
  }
  const auto entry = index_.weight_map.find(name);
  if (entry == index_.weight_map.end()) fail_unknown(name);
  const SafetensorsShard& holder = shard(entry->second);
  const TensorInfo* info = holder.header().find(name);
  if (info == nullptr) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", holder.path(), in_quotes(name)),
         fmt::format("{} says it does", path_), "Check that the model was copied whole.");
  }
  return {&holder, info};
}

bool SafetensorsFile::is_current() const {
  const std::lock_guard lock(mutex_);
  return is_now(path_, identity_) && std::all_of(shards_.begin(), shards_.end(), [](const auto& entry) {
           return entry.second == nullptr || entry.second->is_current();
         });
}

const std::string* SafetensorsFile::metadata(std::string_view key) const {
  if (!single_) return nullptr;
  const auto& metadata = single_->header().metadata;
  const auto at = metadata.find(key);
  return at == metadata.end() ? nullptr : &at->second;
}

const SafetensorsShard& SafetensorsFile::shard(const std::string& file) const {
  const std::lock_guard lock(mutex_);
  auto& slot = shards_[file];
  if (!slot) slot = std::make_unique<SafetensorsShard>(folder_ + file);
  return *slot;
}

namespace {

// Names of q, k and v in other libraries. Their axis order differs, so they are not aliases (known_names.hpp).
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"q", "query"},     {"q", "query_states"}, {"q", "query_layer"},  {"k", "key"},        {"k", "key_states"},
    {"k", "key_layer"}, {"v", "value"},        {"v", "value_states"}, {"v", "value_layer"}};
constexpr std::string_view kPackedNames[] = {"qkv", "packed_qkv", "qkv_packed", "mixed_qkv", "Wqkv"};

// The suggestion for a file that has q, k or v under other names or packed; absent for any other file.
std::optional<MessageTemplate> other_rows(const SafetensorsFile& file, std::string_view missing) {
  if (missing != "q" && missing != "k" && missing != "v") return std::nullopt;
  for (const std::string_view packed : kPackedNames) {
    if (file.contains(packed))
      return MessageTemplate(fmt::format("A packed {} can't be read; split it.", in_quotes(packed)));
  }
  std::string renamed;
  for (const auto& [role, other] : kOtherNames) {
    if (file.contains(role) || !file.contains(other)) continue;
    renamed += fmt::format("{}{}={}", renamed.empty() ? "" : ",", role, other);
  }
  if (renamed.empty()) return std::nullopt;
  return MessageTemplate{"Try ", setting("tensors", renamed), ", with ", setting("order"), " where heads come first."};
}

}  // namespace

void SafetensorsFile::fail_unknown(std::string_view name) const {
  constexpr std::size_t kListed = 8;
  constexpr std::size_t kCompared = 10'000;  // computing the edit distance to a hundred thousand names takes a while
  std::vector<std::string_view> known = names();
  std::string holds = "it holds no tensors";
  if (!known.empty()) {
    std::vector<std::string> shown;
    for (std::size_t i = 0; i < std::min(kListed, known.size()); ++i) shown.push_back(in_quotes(known[i]));
    holds = fmt::format("it holds {}{}", fmt::join(shown, ", "),
                        known.size() > kListed ? fmt::format(" and {} more", known.size() - kListed) : "");
  }
  if (const auto suggestion = other_rows(*this, name)) {
    fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", path_, in_quotes(name)), holds, *suggestion);
  }
  const bool role = is_tensor_role(name);
  std::erase_if(known, [&](std::string_view other) {
    if (role && is_tensor_role(other)) return true;  // w_uv is not a misspelt w_uk
    if (name.size() == 1) return other.size() != 1 || std::tolower(other[0]) != std::tolower(name[0]);
    return other.size() > 2 * name.size() + 8;  // can't be near, and takes long to compare
  });
  known.resize(std::min(known.size(), kCompared));
  const std::string near = nearest_name(name, known.data(), known.size());
  fail(ErrorCode::kFile, fmt::format("{} has no tensor {}", path_, in_quotes(name)), holds,
       near.empty() ? MessageTemplate{"Name it with ", setting("tensors"), "."}
                    : MessageTemplate(fmt::format("Did you mean {}?", in_quotes(near))));
}

}  // namespace ringattn
