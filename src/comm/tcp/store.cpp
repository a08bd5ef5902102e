// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "base/host.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

std::string StoreAddress::text() const { return endpoint_text(host, port); }

std::optional<StoreAddress> parse_store_address(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (host.starts_with('[') != host.ends_with(']')) return std::nullopt;
  if (host.starts_with('[')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return std::nullopt;  // the end of an unbracketed IPv6 address is ambiguous
  }
  constexpr std::size_t kMaxHostName = 253;
  const bool printable = std::ranges::all_of(host, [](char c) { return c > ' ' && c < '\x7f'; });
  if (host.empty() || host.size() > kMaxHostName || !printable) return std::nullopt;
  StoreAddress address{std::string(host), 0};
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  const bool whole = error == std::errc{} && end == port.data() + port.size();
  if (!whole || address.port < 1 || address.port > 65535) return std::nullopt;
  return address;
}

std::string Hello::host_text() const { return printable({host, ::strnlen(host, sizeof host)}); }
std::string Hello::job_text() const { return {job, ::strnlen(job, sizeof job)}; }

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 255;
  std::string all(text.substr(0, kLongest));
  std::ranges::replace_if(
      all, [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }, '?');
  return all;
}

Hello hello_of(const StoreOptions& options) {
  Hello hello{};
  hello.rank = options.rank;
  hello.size = options.size;
  const std::string host = host_name();
  std::memcpy(hello.host, host.data(), std::min(host.size(), sizeof hello.host - 1));
  std::memcpy(hello.job, options.job.data(), std::min(options.job.size(), sizeof hello.job - 1));
  return hello;
}

std::string job_name(const std::string& job) {
  return job.empty() ? "a job without a name" : fmt::format("job {}", printable(job));
}

std::string error_text(int number) { return std::error_code(number, std::generic_category()).message(); }

std::string pack_texts(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) {
    all += bytes_of(static_cast<std::uint32_t>(text.size()));
    all += text;
  }
  return all;
}

std::optional<std::vector<std::string>> unpack_texts(std::string_view bytes, int count) {
  std::vector<std::string> texts;
  for (int i = 0; i < count; ++i) {
    const auto length = value_of<std::uint32_t>(bytes.substr(0, sizeof(std::uint32_t)));
    if (!length || *length > bytes.size() - sizeof(std::uint32_t)) return std::nullopt;
    bytes.remove_prefix(sizeof(std::uint32_t));
    texts.emplace_back(bytes.substr(0, *length));
    bytes.remove_prefix(*length);
  }
  return bytes.empty() ? std::optional(texts) : std::nullopt;
}

namespace {

void check_options(const StoreOptions& options) {
  if (options.size < 1 || options.size > kMaxStoreRanks || options.rank < 0 || options.rank >= options.size) {
    fail(ErrorCode::kUsage, fmt::format("there is no rank {} of {}", options.rank, options.size),
         fmt::format("a world has 1 to {} ranks, counted from 0", kMaxStoreRanks), "Check what starts the ranks.");
  }
  if (options.job.size() > kMaxJobName) {
    fail(ErrorCode::kUsage, "the job's name is too long", fmt::format("it has {} bytes", options.job.size()),
         fmt::format("Give one of at most {}.", kMaxJobName));
  }
  static_cast<void>(Timeouts(options.seconds));  // throws if it is out of range
}

}  // namespace

std::unique_ptr<Store> make_store(const StoreOptions& options) {
  check_options(options);
  const Secret secret = options.secret ? *options.secret : secret_of_environment();
  return options.rank == 0 ? serve_store(options, secret) : connect_to_store(options, secret);
}

}  // namespace ringattn
