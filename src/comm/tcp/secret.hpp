// SPDX-License-Identifier: Apache-2.0
// What ranks prove to each other that they know, before they form a world. Without it whoever reaches the store's
// address may take a rank's place.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace ringattn {

class Secret {
 public:
  // None: nobody proves anything.
  Secret() = default;
  // Throws kUsage for what is no secret (base/environment.hpp) and kUnsupported in a build without a crypto library;
  // `source` says in messages where the text comes from. No message shows the text.
  Secret(const std::string& text, std::string_view source);

  bool is_given() const { return text_ != nullptr; }
  // Empty where there is none.
  std::string_view text() const { return text_ == nullptr ? std::string_view() : std::string_view(*text_); }

 private:
  std::shared_ptr<const std::string> text_;
};

// RINGATTN_STORE_SECRET, or the first line of the file that RINGATTN_STORE_SECRET_FILE names; none where neither is
// set. Throws kUsage where both are, and kFile for a file that can't be read or that others than its owner can read.
Secret secret_of_environment();

}  // namespace ringattn
