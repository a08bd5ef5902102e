// SPDX-License-Identifier: Apache-2.0
#include "ops/jobs/golden.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/quotes.hpp"
#include "io/flat_table.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kSchema = "1";
MessageTemplate how_to_make_one() { return {command("verify", "record"), " writes one."}; }

struct Member {
  std::string_view key;
  std::string Golden::*value;
};

// In addition, a file has a member "digest_…" for each tensor of the result.
constexpr std::string_view kDigestPrefix = "digest_";
constexpr Member kMembers[] = {{"version", &Golden::version},   {"git", &Golden::git},
                               {"build_id", &Golden::build_id}, {"kernel", &Golden::kernel},
                               {"target", &Golden::target},     {"job", &Golden::job}};

[[noreturn]] void refuse(const std::string& path, std::string_view why) {
  fail(ErrorCode::kFile, fmt::format("{} is not a golden file", path), why, how_to_make_one());
}

bool is_digest(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

namespace {

// Fills in everything except the job.
Golden golden_of(std::string_view kernel, const std::string& target) {
  Golden golden;
  golden.version = version();
  golden.git = git_revision();
  golden.build_id = build_id();
  golden.kernel = kernel;
  golden.target = target;
  return golden;
}

}  // namespace

Golden golden_of(const JobInput& input, std::string_view kernel, const std::string& target) {
  const Job& job = input.job();
  std::string sequences;
  if (job.batch.sequences.size() <= 8) {
    for (const Sequence& s : job.batch.sequences) sequences += fmt::format(" {}x{}@{}", s.q_len, s.k_len, s.q_offset);
  }
  Golden golden = golden_of(kernel, target);
  golden.job = fmt::format("{}; {}; scale {};{}", input.seed() ? input.source() : "a file", describe(input),
                           job.spec.softmax_scale, sequences);
  return golden;
}

Golden golden_of(std::string job, std::string_view kernel, const std::string& target) {
  Golden golden = golden_of(kernel, target);
  golden.job = std::move(job);
  return golden;
}

Golden golden_of(const SsmInput& input, std::string_view kernel, const std::string& target) {
  const SsmJob& job = input.job();
  std::string lengths;
  if (job.lengths.size() <= 8) {
    for (const std::int64_t length : job.lengths) lengths += fmt::format(" {}", length);
  }
  Golden golden = golden_of(kernel, target);
  golden.job = fmt::format("{}; {}; {};{}", input.seed() ? input.source() : "a file", describe(job),
                           exact_settings(job), lengths);
  return golden;
}

std::string golden_text(const Golden& golden) {
  JsonWriter json;
  json.begin_object().member("schema", 1);
  for (const Member& member : kMembers) json.member(member.key, golden.*member.value);
  for (const auto& [tensor, digest] : golden.digests) json.member(std::string(kDigestPrefix) + tensor, digest);
  return json.end_object().text();
}

Golden parse_golden(std::string_view text, const std::string& path) {
  Golden golden;
  bool schema = false;
  std::vector<std::string_view> missing;
  for (const Member& member : kMembers) missing.push_back(member.key);
  for (const FlatEntry& entry : parse_json_table(text, path, ErrorCode::kFile, how_to_make_one())) {
    if (entry.key == "schema") {
      if (entry.kind != FlatKind::kInteger || entry.text != kSchema) {
        refuse(path, fmt::format("its schema is {}, and must be {}", shortened(entry.text), kSchema));
      }
      schema = true;
      continue;
    }
    if (entry.key.starts_with(kDigestPrefix)) {
      if (!is_digest(entry.text) && entry.text != kNoDigest) refuse(path, "a digest is not 32 hex digits");
      golden.digests[entry.key.substr(kDigestPrefix.size())] = entry.text;
      continue;
    }
    const auto* member = std::find_if(std::begin(kMembers), std::end(kMembers),
                                      [&](const Member& candidate) { return candidate.key == entry.key; });
    if (member == std::end(kMembers)) refuse(path, fmt::format("it has a member \"{}\"", shortened(entry.key)));
    if (entry.kind != FlatKind::kText) refuse(path, fmt::format("\"{}\" is not a string", shortened(entry.key)));
    golden.*member->value = entry.text;
    std::erase(missing, member->key);
  }
  if (!schema) refuse(path, "\"schema\" is missing");
  if (!missing.empty()) refuse(path, fmt::format("\"{}\" is missing", missing.front()));
  if (golden.digests.empty()) refuse(path, "it has no digest");
  return golden;
}

void check_comparable(const Golden& recorded, const Golden& now, const std::string& path) {
  if (recorded.job != now.job) {
    fail(ErrorCode::kUsage, fmt::format("{} belongs to another job", path),
         fmt::format("recorded: {}; now: {}", shortened(recorded.job), shortened(now.job)),
         "Give the job that it was recorded for.");
  }
  constexpr std::string_view kRecordAgain = "Record it again with this program on this machine.";
  for (const Member& member : kMembers) {
    const bool decides =
        member.key == "kernel" || member.key == "target" || member.key == "version" || member.key == "build_id";
    if (!decides || recorded.*member.value == now.*member.value) continue;
    fail(ErrorCode::kUnsupported, fmt::format("{} was made by another {}", path, member.key),
         fmt::format("\"{}\", this is \"{}\"", shortened(recorded.*member.value), now.*member.value), kRecordAgain);
  }
}

}  // namespace ringattn
