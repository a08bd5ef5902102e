// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_index.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>

#include "io/json_reader.hpp"
#include "io/posix_file.hpp"
#include "io/safetensors_header.hpp"

namespace ringattn {

namespace {

constexpr JsonLimits kIndexLimits{16, std::size_t{1} << 18, HeaderLimits::kNameBytes};

constexpr std::size_t kMaxFiles = 4096;

TextSource index_source(std::string path) {
  return {std::move(path), "safetensors index", "Give the model's *.index.json, or one of its files."};
}

bool stays_inside(std::string_view file) {
  if (file.empty() || file.front() == '/') return false;
  for (const char c : file) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  for (std::size_t begin = 0; begin <= file.size();) {
    const std::size_t end = std::min(file.find('/', begin), file.size());
    const auto part = file.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

class IndexEvents final : public JsonEvents {
 public:
  IndexEvents(const TextSource& source, SafetensorsIndex& index) : source_(source), index_(index) {}

  bool has_map() const { return has_map_; }

  void begin_object() override {
    check_value("an object", depth_ == 0 || (depth_ == 1 && in_map_));
    ++depth_;
  }
  void end_object() override { close(); }
  void begin_array() override {
    check_value("an array", false);
    ++depth_;
  }
  void end_array() override { close(); }

  void key(std::string& name) override {
    if (depth_ == 1) {
      in_map_ = name == "weight_map";
      if (in_map_ && has_map_) source_.refuse("it has two entries weight_map");
      has_map_ = has_map_ || in_map_;
    } else if (in_map_) {
      tensor_ = name;
    }
  }

  void string(std::string& value) override {
    check_value("a string", depth_ == 2 && in_map_);
    if (!in_map_ || depth_ != 2) return;
    if (!stays_inside(value)) {
      source_.refuse(fmt::format("tensor {} is in {}, which is not a file inside the index's folder",
                                 in_quotes(tensor_), in_quotes(value)));
    }
    if (files_.insert(value).second && files_.size() > kMaxFiles) {
      source_.refuse(fmt::format("its tensors lie in more than {} files", kMaxFiles));
    }
    if (!index_.weight_map.emplace(tensor_, std::move(value)).second) {
      source_.refuse(fmt::format("it names tensor {} twice", in_quotes(tensor_)));
    }
  }
  void integer(std::uint64_t value) override { check_value(fmt::format("the number {}", value), false); }
  void other(std::string_view what) override { check_value(what, false); }

 private:
  // Below the top level, every value outside of weight_map is accepted.
  void check_value(std::string_view what, bool wanted) const {
    if (wanted) return;
    if (depth_ == 0) source_.refuse(fmt::format("it is {}, not an object", what));
    if (!in_map_) return;
    if (depth_ == 1) source_.refuse(fmt::format("its weight_map is {}, not an object", what));
    source_.refuse(fmt::format("the file of tensor {} is {}, not a name", in_quotes(tensor_), what));
  }

  void close() { --depth_; }

  const TextSource& source_;
  SafetensorsIndex& index_;
  int depth_ = 0;
  bool in_map_ = false;  // the value of the last top-level key belongs to weight_map
  bool has_map_ = false;
  std::string tensor_;
  std::set<std::string> files_;
};

SafetensorsIndex parse_scanned(std::string_view text, const TextSource& source) {
  SafetensorsIndex index;
  IndexEvents events(source, index);
  parse_json(text, source, events);
  if (!events.has_map()) source.refuse("it has no weight_map");
  return index;
}

}  // namespace

SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& path) {
  const TextSource source = index_source(path);
  JsonScan(source, kIndexLimits).feed(text);
  return parse_scanned(text, source);
}

SafetensorsIndex read_safetensors_index(const std::string& path) {
  const TextSource source = index_source(path);
  const FileDescriptor file = open_regular(path);
  const std::int64_t bytes = identify(file, path).bytes;
  if (bytes > static_cast<std::int64_t>(HeaderLimits::kBytes)) {
    source.refuse(fmt::format("it has {} bytes, more than {}", bytes, HeaderLimits::kBytes));
  }
  JsonScan scan(source, kIndexLimits);
  std::string text;
  text.reserve(static_cast<std::size_t>(bytes));  // growing would hold the text twice
  std::string piece;
  while (static_cast<std::int64_t>(text.size()) < bytes) {
    piece.resize(std::min<std::size_t>(std::size_t{1} << 20, static_cast<std::size_t>(bytes) - text.size()));
    read_exactly(file, path, static_cast<std::int64_t>(text.size()), std::as_writable_bytes(std::span(piece)));
    scan.feed(piece);
    text += piece;
  }
  return parse_scanned(text, source);
}

}  // namespace ringattn
