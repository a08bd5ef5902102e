// SPDX-License-Identifier: Apache-2.0
#include "io/json_tree.hpp"

#include <fmt/format.h>

#include <utility>

namespace ringattn {

namespace {

using Kind = JsonNode::Kind;

std::string without_infinities(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\' && i + 1 < text.size()) plain += text[i++];
      in_string = c != '"';
    } else {
      bool replaced = false;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        if (text.substr(i).starts_with(word)) {
          plain += R"({"__float__": ")" + std::string(word) + R"("})";
          i += word.size() - 1;
          replaced = true;
          break;
        }
      }
      if (replaced) continue;
      in_string = c == '"';
    }
    plain += text[i];
  }
  return plain;
}

class TreeBuilder final : public JsonEvents {
 public:
  explicit TreeBuilder(const TextSource& source) : source_(source) {}

  JsonNode take() { return std::move(root_); }

  void begin_object() override { open(Kind::kObject); }
  void end_object() override { close(); }
  void begin_array() override { open(Kind::kList); }
  void end_array() override { close(); }
  void key(std::string& name) override {
    Level& top = levels_.back();
    if (top.node->members.contains(name)) {
      source_.refuse(fmt::format("it names {} twice", in_quotes(path_of(name))));
    }
    top.key = name;
  }
  void string(std::string& value) override {
    JsonNode node;
    node.kind = Kind::kString;
    node.text = std::move(value);
    add(std::move(node));
  }
  void integer(std::uint64_t value) override { number(static_cast<double>(value)); }
  void real(double value, std::string_view) override { number(value); }
  void other(std::string_view what) override {
    JsonNode node;
    node.kind = what == "null"    ? Kind::kNull
                : what == "true"  ? Kind::kTrue
                : what == "false" ? Kind::kFalse
                                  : Kind::kOther;
    if (node.kind == Kind::kOther) node.text = what;
    add(std::move(node));
  }

 private:
  struct Level {
    JsonNode* node;
    std::string key;  // of an object: the key whose value comes next
  };

  std::string path_of(std::string_view name) const {
    std::string path;
    for (const Level& level : levels_) {
      if (&level != &levels_.back() && level.node->is_object()) path += level.key + ".";
    }
    return path.append(name);
  }
  void number(double value) {
    JsonNode node;
    node.kind = Kind::kNumber;
    node.number = value;
    add(std::move(node));
  }
  JsonNode* add(JsonNode node) {
    if (levels_.empty()) {
      if (!node.is_object()) source_.refuse(fmt::format("it is {}, not an object", kind_text(node)));
      root_ = std::move(node);
      return &root_;
    }
    Level& top = levels_.back();
    if (top.node->is_list()) return &top.node->list.emplace_back(std::move(node));
    return &(top.node->members[top.key] = std::move(node));
  }
  // The parent's list does not grow while its last element is open, so the pointer stays valid.
  void open(Kind kind) {
    JsonNode node;
    node.kind = kind;
    levels_.push_back({add(std::move(node)), {}});
  }
  void close() { levels_.pop_back(); }

  const TextSource& source_;
  JsonNode root_;
  std::vector<Level> levels_;
};

}  // namespace

const JsonNode* JsonNode::member(std::string_view name) const {
  const auto found = members.find(name);
  return found == members.end() ? nullptr : &found->second;
}

const JsonNode* JsonNode::at(std::string_view path) const {
  const JsonNode* node = this;
  while (node != nullptr && !path.empty()) {
    const std::size_t dot = path.find('.');
    node = node->member(path.substr(0, dot));
    path.remove_prefix(dot == std::string_view::npos ? path.size() : dot + 1);
  }
  return node;
}

std::string_view non_finite_text(const JsonNode& node) {
  const JsonNode* const text = node.members.size() == 1 ? node.member("__float__") : nullptr;
  return text != nullptr && text->is_string() ? std::string_view(text->text) : std::string_view();
}

std::string kind_text(const JsonNode& node) {
  if (const std::string_view text = non_finite_text(node); !text.empty()) return std::string(text);
  switch (node.kind) {
    case Kind::kNull:
      return "null";
    case Kind::kFalse:
      return "false";
    case Kind::kTrue:
      return "true";
    case Kind::kNumber:
      return "a number";
    case Kind::kString:
      return "a string";
    case Kind::kList:
      return "a list";
    case Kind::kObject:
      return "an object";
    case Kind::kOther:
      break;
  }
  return node.text;
}

JsonNode parse_json_object(std::string_view text, const TextSource& source, const JsonLimits& limits) {
  JsonScan scan(source, limits);
  scan.feed(text);
  TreeBuilder builder(source);
  parse_json(without_infinities(text), source, builder);
  return builder.take();
}

}  // namespace ringattn
