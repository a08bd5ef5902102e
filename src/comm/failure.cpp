// SPDX-License-Identifier: Apache-2.0
#include "comm/failure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <system_error>

#include "base/host.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

MessageTemplate late_suggestion() {
  return {"See whether they failed or were stopped; raise ", setting("timeout"), " if they are only slow."};
}

}  // namespace

std::string RankNames::host(int rank) const {
  return hosts_.empty() ? host_name() : hosts_[static_cast<std::size_t>(rank)];
}

std::string RankNames::name(int rank) const {
  if (hosts_.empty()) return fmt::format("rank {}", rank);
  return fmt::format("rank {} on {}", rank, host(rank));
}

std::string RankNames::list(std::span<const int> ranks) const {
  constexpr std::size_t kListed = 8;
  std::string text;
  for (const int rank : ranks.first(std::min(ranks.size(), kListed))) {
    if (!text.empty()) text += ", ";
    text += name(rank);
  }
  if (ranks.size() > kListed) text += fmt::format(" and {} more", ranks.size() - kListed);
  return text;
}

void fail_late(std::string_view what, const Deadline& deadline, const RankNames& names, int rank,
               std::span<const int> awaited) {
  fail_rank(Error(ErrorCode::kPeer, fmt::format("{} did not finish within {:g} s", what, deadline.seconds()),
                  fmt::format("{} waits for {}", names.name(rank), names.list(awaited)), late_suggestion()));
}

Error silent_error(const RankNames& names, std::span<const int> silent, double seconds) {
  return Error(ErrorCode::kPeer, fmt::format("{} fell silent", names.list(silent)),
               fmt::format("no heartbeat for {:g} s: stopped, stuck, or unreachable", seconds), late_suggestion());
}

Error error_at_location(const Error& error, ErrorLocation location, std::string_view prefix) {
  Error located(error.code(), {prefix, error.problem()}, error.why(), error.suggestion());
  located.set_location(std::move(location));
  return located;
}

Error aborted_error(const RankNames& names, int rank, const Error& error) {
  if (error.location() != nullptr) return error;
  return error_at_location(error, {rank, names.host(rank)}, names.name(rank) + " failed: ");
}

Error lone_error(int rank, const Error& error) {
  if (error.location() != nullptr || error.code() == ErrorCode::kPeer) return error;
  return error_at_location(error, {rank, host_name()}, fmt::format("rank {} on {}: ", rank, host_name()));
}

bool is_packed_error(std::string_view bytes) {
  return !bytes.empty() && bytes.front() >= static_cast<char>(ErrorCode::kWrongResult) &&
         bytes.front() <= static_cast<char>(ErrorCode::kInternal);
}

void note_failure() noexcept {
  if (RankLiveness* const liveness = RankLiveness::current()) liveness->on_failure(as_error(std::current_exception()));
}

Error as_error(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::kMemory, "can't allocate memory", "the host has no more to give",
                 {"Use more hosts, or fewer tokens; ", command("plan"), " says what a rank needs."});
  } catch (const std::system_error& error) {
    // The standard library reports a thread that can't be started as this error.
    if (error.code() == std::errc::resource_unavailable_try_again) {
      return Error(ErrorCode::kUnsupported, "can't start a thread", error.code().message(),
                   "Use fewer ranks or threads, or raise the limit on this user's processes (ulimit -u).");
    }
    return Error(ErrorCode::kInternal, "unexpected exception", error.what(), "This is a bug.");
  } catch (const std::exception& error) {
    return Error(ErrorCode::kInternal, "unexpected exception", error.what(), "This is a bug.");
  } catch (...) {
    return Error(ErrorCode::kInternal, "unexpected exception", "of an unknown type", "This is a bug.");
  }
}

}  // namespace ringattn
