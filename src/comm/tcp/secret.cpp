// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/secret.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/file_descriptor.hpp"
#include "comm/tcp/mac.hpp"

namespace ringattn {

namespace {

constexpr const char* kText = "RINGATTN_STORE_SECRET";
constexpr const char* kFile = "RINGATTN_STORE_SECRET_FILE";
constexpr std::size_t kMaxFileBytes = 4096;

std::optional<std::string> variable_value(const char* name) {
  std::optional<std::string> value = environment_value(name);
  return value && value->empty() ? std::nullopt : value;
}

std::string read_secret_file(const std::string& path) {
  const auto refuse = [&](const std::string& why, std::string_view suggestion) {
    fail(ErrorCode::kFile, fmt::format("{} can't be read as a secret", path), why, std::string(suggestion));
  };
  // O_NONBLOCK: opening a FIFO would wait for a writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.valid()) {
    refuse(std::error_code(errno, std::generic_category()).message(), "Set RINGATTN_STORE_SECRET_FILE to its path.");
  }
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    refuse("it is not a regular file", "Write the secret into a file of its own.");
  }
  if ((status.st_mode & 077) != 0) {
    refuse(fmt::format("others than its owner can use it: its mode is {:03o}", status.st_mode & 0777U),
           "Run chmod 600 on it, and make a new secret if others may have read it.");
  }
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    refuse("it belongs to another user", "Write the secret into a file of your own.");
  }
  std::string bytes(kMaxFileBytes, '\0');
  const ssize_t count = uninterrupted([&] { return ::read(file.get(), bytes.data(), bytes.size()); });
  if (count < 0) refuse(std::error_code(errno, std::generic_category()).message(), "See what is wrong with the file.");
  bytes.resize(static_cast<std::size_t>(count));
  bytes.resize(std::min(bytes.find('\n'), bytes.size()));
  if (bytes.ends_with('\r')) bytes.pop_back();
  return bytes;
}

}  // namespace

Secret::Secret(const std::string& text, std::string_view source) {
  if (!is_secret(text)) {
    fail(ErrorCode::kUsage, fmt::format("{} holds no secret", source),
         "one has 32 to 1024 printable characters without blanks", "Make one by `openssl rand -hex 32`.");
  }
  if (const std::string why = why_no_mac(); !why.empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("the secret of {} can't be used", source), why,
         "Install OpenSSL's libcrypto and build with its headers (libssl-dev), or unset it on all ranks (set it to "
         "nothing for the launcher).");
  }
  text_ = std::make_shared<const std::string>(text);
}

Secret secret_of_environment() {
  const std::optional<std::string> text = variable_value(kText);
  const std::optional<std::string> path = variable_value(kFile);
  if (text && path) {
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", kText, kFile), "both are set", "Unset one of them.");
  }
  if (text) return {*text, kText};
  if (path) return {read_secret_file(*path), *path};
  return {};
}

}  // namespace ringattn
