// SPDX-License-Identifier: Apache-2.0
// The secret that ranks prove to each other before they form a world. Without one, any process that reaches the store's
// address may join as a rank.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace ringattn {

class Secret {
 public:
  // No secret: ranks prove nothing.
  Secret() = default;
  // Throws kUsage for a text that is_secret() refuses (base/environment.hpp), and kUnsupported without a crypto
  // library. Messages name `source` as the origin of the text, and never show the text.
  Secret(const std::string& text, std::string_view source);

  bool is_given() const { return text_ != nullptr; }
  // Empty if there is no secret.
  std::string_view text() const { return text_ == nullptr ? std::string_view() : std::string_view(*text_); }

 private:
  std::shared_ptr<const std::string> text_;
};

// RINGATTN_STORE_SECRET, or the first line of the file that RINGATTN_STORE_SECRET_FILE names, or no secret if neither
// is set. Throws kUsage if both are set, and kFile for a file that can't be read or that users other than its owner can
// access.
Secret secret_of_environment();

}  // namespace ringattn
