// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_points.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/build.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "base/text_file.hpp"
#include "kernels/common/registry.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kAdvice = "Write one with `ringattn bench --jsonl FILE`.";

using Json = nlohmann::json;

constexpr std::size_t kMostBytes = std::size_t{16} << 20;
constexpr std::size_t kLongestLine = std::size_t{64} << 10;  // a parsed line takes up to a hundred times its length

// Lines before schema 2 call a block mask "lists of 128x128 blocks, one a head".
std::string modern_mask(std::string mask) {
  constexpr std::pair<std::string_view, std::string_view> kRenamedParts[] = {
      {"lists of ", "block mask of "}, {", one a head", ", one per head"}, {", one a KV head", ", one per KV head"}};
  for (const auto& [old, now] : kRenamedParts) {
    if (const std::size_t at = mask.find(old); at != std::string::npos) mask.replace(at, old.size(), now);
  }
  return mask;
}

BenchJob read_job(const Json& job) {
  BenchJob result;
  result.tokens = job.at("tokens").get<std::int64_t>();
  result.batch = job.at("batch").get<std::int64_t>();
  result.seq = job.value("seq", std::int64_t{0});
  result.source = job.value("source", "");
  if (job.contains("page_size")) result.kind = BenchKind::kStep;  // only decode steps have it
  // Lines of the default op, or of its decode steps, may omit the op.
  const OpEntry& usual = *op_table().front();
  const std::string op = job.value("op", std::string(result.kind == BenchKind::kStep ? usual.steps : usual.name));
  const OpEntry* const entry = find_op(op);
  result.op = entry == nullptr ? op : entry->name;
  constexpr std::string_view kApart[] = {"tokens", "batch", "seq", "source", "op"};
  for (const auto& [name, value] : job.items()) {
    if (std::ranges::find(kApart, name) != std::end(kApart)) continue;
    if (value.is_number_integer()) {
      result.members.emplace_back(name, value.get<std::int64_t>());
    } else {
      result.members.emplace_back(name,
                                  name == "mask" ? modern_mask(value.get<std::string>()) : value.get<std::string>());
    }
  }
  return result;
}

BenchPoint read_point(const Json& line) {
  BenchPoint point;
  point.tool = line.at("tool").at("name").get<std::string>();
  point.git = line.at("git").get<std::string>();
  point.host = line.at("host").get<std::string>();
  point.devices = line.at("devices").get<std::vector<std::string>>();
  point.world = line.at("world").get<int>();
  point.transport = line.at("transport").get<std::string>();
  point.kernel = line.at("kernel").get<std::string>();
  if (const std::string_view renamed = renamed_kernel(point.kernel); !renamed.empty()) point.kernel = renamed;
  point.job = read_job(line.at("job"));
  point.samples = line.at("samples").get<std::int64_t>();
  point.error = line.value("error", "");
  // Only our own lines have these members.
  point.mode = line.value("mode", std::string(kWholeMode));
  if (point.mode == "folds") point.mode = kComputeMode;  // lines before schema 2
  point.layout = line.value("layout", "");
  if (point.layout == "groups") point.layout = "KV splits";  // older lines
  point.stripe = line.value("stripe", std::int64_t{0});
  point.block = line.value("block", std::int64_t{0});
  point.blocks = line.value("blocks", std::int64_t{0});
  point.overlap = line.value("overlap", true);
  if (!line.at("ms").is_null()) {
    const Json& ms = line.at("ms");
    point.ms = {ms.at("median").get<double>(), ms.at("p10").get<double>(), ms.at("p90").get<double>()};
    point.tflops_per_rank = line.at("tflops_per_rank").get<double>();
    point.gb_per_s = line.value("gb_per_s", 0.0);
    point.digest = line.value("digest", "");
  }
  return point;
}

}  // namespace

void write_bench_job(JsonWriter& json, const BenchJob& job) {
  json.member("tokens", job.tokens).member("seq", job.seq).member("batch", job.batch);
  for (const auto& [name, value] : job.members) {
    std::visit([&](const auto& held) { json.member(name, held); }, value);
  }
  if (!job.source.empty()) json.member("source", job.source);
  if (job.op != op_table().front()->name) json.member("op", job.op);
}

void write_point(JsonWriter& json, const BenchPoint& point, std::span<const std::string> arguments) {
  const bool is_peer = !point.tool_version.empty();
  json.begin_object().member("schema", kBenchSchema);
  json.key("tool").begin_object().member("name", point.tool);
  if (is_peer) {
    json.member("version", point.tool_version);
  } else {
    json.member("version", version()).member("git", git_revision()).member("dirty", git_dirty());
    json.member("build_id", build_id());
  }
  json.end_object();
  json.key("argv").begin_array(true);
  for (const std::string& argument : arguments) json.value(argument);
  json.end_array();
  json.member("git", point.git).member("host", point.host).key("devices").begin_array(true);
  for (const std::string& device : point.devices) json.value(device);
  json.end_array();
  json.member("world", point.world).member("transport", point.transport).member("kernel", point.kernel);
  json.member("mode", point.mode);
  const BenchJob& job = point.job;
  json.key("job").begin_object();
  write_bench_job(json, job);
  json.end_object();
  json.member("layout", point.layout).member("stripe", point.stripe).member("block", point.block);
  json.member("blocks", point.blocks).member("overlap", point.overlap).member("samples", point.samples);
  if (point.measured()) {
    json.key("ms").begin_object().member("median", point.ms.median).member("p10", point.ms.p10);
    json.member("p90", point.ms.p90).end_object();
    json.member("tflops_per_rank", point.tflops_per_rank);
    if (job.kind == BenchKind::kStep) {
      json.member("us", point.ms.median * 1e3).member("gb_per_s", point.gb_per_s);
      if (!is_peer) json.member("digest", point.digest);
    }
    if (job.kind == BenchKind::kStep || is_peer) {  // figures that these do not measure or estimate
      json.key("exposed_comm_ms").null().key("estimated_ms").null();
    } else {
      json.member("exposed_comm_ms", point.exposed_comm_ms).key("estimated_ms");
      if (point.estimated_ms > 0.0 || job.kind == BenchKind::kRing) {
        json.value(point.estimated_ms);
      } else {
        json.null();
      }
    }
    if (job.kind == BenchKind::kStream) {
      json.member("tokens_per_s", static_cast<double>(job.tokens) / point.ms.median * 1e3);
      json.member("gb_per_s", point.gb_per_s);
      if (!is_peer) json.member("digest", point.digest);
    }
    if (is_peer) {
      json.key("memory_peak_bytes").null();
    } else {
      json.member("memory_peak_bytes", point.memory_peak).member("memory_planned_bytes", point.memory_planned);
    }
  } else {
    for (const char* name : {"ms", "tflops_per_rank", "exposed_comm_ms", "estimated_ms", "memory_peak_bytes"}) {
      json.key(name).null();
    }
  }
  if (!point.error.empty()) json.member("error", point.error);
  json.end_object();
}

std::vector<BenchPoint> read_points(const std::string& path, std::string_view flag) {
  const std::string text = read_text_file(path, kMostBytes);
  std::vector<BenchPoint> points;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line(text.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (line.size() > kLongestLine) {
      fail(ErrorCode::kFile, fmt::format("line {} of {} is too long", number, path),
           fmt::format("it has {} bytes, of at most {}", line.size(), kLongestLine), kAdvice);
    }
    const Json parsed = Json::parse(line, nullptr, false);
    if (!parsed.is_object()) {
      fail(ErrorCode::kFile, fmt::format("line {} of {} is not a JSON object", number, path),
           fmt::format("{} takes lines that bench or bench/peers wrote", flag), kAdvice);
    }
    const auto schema = parsed.find("schema");
    if (schema == parsed.end() || (*schema != kBenchSchema && *schema != kFirstBenchSchema)) continue;
    try {
      points.push_back(read_point(parsed));
    } catch (const Json::exception& error) {
      const std::string_view what = error.what();  // "[json.exception.out_of_range.403] key 'kernel' not found"
      fail(ErrorCode::kFile, fmt::format("line {} of {} is not a complete point", number, path),
           std::string(what.substr(what.find(' ') + 1)), kAdvice);
    }
    if (const BenchPoint& point = points.back(); point.measured() && !(point.ms.median > 0.0)) {
      fail(ErrorCode::kFile, fmt::format("line {} of {} is not a complete point", number, path),
           fmt::format("its median is {} ms", point.ms.median), kAdvice);
    }
  }
  if (points.empty()) {
    fail(ErrorCode::kFile, fmt::format("{} holds no point of a benchmark", path),
         fmt::format("no line has the schema \"{}\"", kBenchSchema), kAdvice);
  }
  return points;
}

std::string who(const BenchPoint& point) {
  std::string name = fmt::format("{} {}", point.tool, point.kernel);
  if (point.world > 1) name += fmt::format(", {}", point.transport);
  if (point.mode == kComputeMode) name += ", compute only";
  return name;
}

}  // namespace ringattn
