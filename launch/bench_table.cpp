// SPDX-License-Identifier: Apache-2.0
#include "launch/bench_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace ringattn {

namespace {

bool comparable(const BenchPoint& left, const BenchPoint& right) {
  return left.measured() && right.measured() && left.world == right.world && left.job == right.job;
}

// With one decimal: in TFLOP/s if any line of the table reaches 1 TFLOP/s, otherwise (as on a CPU) in GFLOP/s.
std::string rate_text(double tflops, bool tera) { return fmt::format("{:.1f}", tera ? tflops : tflops * 1e3); }

bool in_tera(std::span<const BenchPoint> points) {
  return std::any_of(points.begin(), points.end(),
                     [](const BenchPoint& point) { return point.tflops_per_rank >= 1.0; });
}

}  // namespace

std::vector<PointPair> pair_points(std::span<const BenchPoint> ours, std::span<const BenchPoint> theirs) {
  std::vector<PointPair> pairs;
  for (const BenchPoint& mine : ours) {
    std::map<std::string, const BenchPoint*> last;
    for (const BenchPoint& other : theirs) {
      if (comparable(mine, other)) last[who(other)] = &other;
    }
    for (const auto& [name, other] : last) pairs.push_back({mine, *other});
  }
  return pairs;
}

std::vector<PointPair> pair_with_baseline(std::span<const BenchPoint> ours, std::span<const BenchPoint> baseline) {
  std::vector<PointPair> pairs;
  for (const BenchPoint& mine : ours) {
    const BenchPoint* last = nullptr;
    for (const BenchPoint& other : baseline) {
      const bool same = who(mine) == who(other) && mine.layout == other.layout && mine.block == other.block &&
                        mine.overlap == other.overlap;
      if (same && comparable(mine, other)) last = &other;
    }
    if (last != nullptr) pairs.push_back({mine, *last});
  }
  return pairs;
}

namespace {

Table step_table(std::span<const BenchPoint> points) {
  const std::vector<Table::Column> columns{{"keys", "a sequence"},
                                           {"seqs"},
                                           {"rows"},
                                           {"page"},
                                           {"samples"},
                                           {"step", "(us)"},
                                           {"p10", "(us)"},
                                           {"p90", "(us)"},
                                           {"GB/s", "all ranks"},
                                           {"mem/rank", "(MiB)"},
                                           {"digest"}};
  Table table(columns);
  for (const BenchPoint& point : points) {
    const BenchJob& job = point.job;
    std::vector<std::string> cells{fmt::format("{}", job.seq), fmt::format("{}", job.batch),
                                   fmt::format("{}", job.tokens),
                                   job.number("page_size") > 0 ? fmt::format("{}", job.number("page_size")) : "dense",
                                   fmt::format("{}", point.samples)};
    if (!point.measured()) {
      cells.resize(columns.size(), std::string(Table::kNoValue));
      table.add(std::move(cells));
      continue;
    }
    for (const double ms : {point.ms.median, point.ms.p10, point.ms.p90})
      cells.push_back(fmt::format("{:.2f}", ms * 1e3));
    cells.push_back(fmt::format("{:.1f}", point.gb_per_s));
    cells.push_back(fmt::format("{:.1f}", static_cast<double>(point.memory_peak) / 0x1p20));
    cells.push_back(point.digest);
    table.add(std::move(cells));
  }
  return table;
}

Table stream_table(std::span<const BenchPoint> points) {
  const std::vector<Table::Column> columns{{"tokens"},
                                           {"seqs"},
                                           {"samples"},
                                           {"median", "(ms)"},
                                           {"p10", "(ms)"},
                                           {"p90", "(ms)"},
                                           {"Mtokens/s"},
                                           {"GB/s", "all ranks"},
                                           {"exposed comm", "(ms)"},
                                           {"estimated", "(ms)"},
                                           {"mem/rank", "(MiB)"},
                                           {"digest"}};
  Table table(columns);
  for (const BenchPoint& point : points) {
    std::vector<std::string> cells{fmt::format("{}", point.job.tokens), fmt::format("{}", point.job.batch),
                                   fmt::format("{}", point.samples)};
    if (!point.measured()) {
      cells.resize(columns.size(), std::string(Table::kNoValue));
      table.add(std::move(cells));
      continue;
    }
    for (const double ms : {point.ms.median, point.ms.p10, point.ms.p90}) cells.push_back(fmt::format("{:.3f}", ms));
    cells.push_back(fmt::format("{:.3f}", static_cast<double>(point.job.tokens) / point.ms.median * 1e-3));
    cells.push_back(fmt::format("{:.2f}", point.gb_per_s));
    cells.push_back(fmt::format("{:.3f}", point.exposed_comm_ms));
    cells.push_back(point.estimated_ms > 0.0 ? fmt::format("{:.3f}", point.estimated_ms) : "-");
    cells.push_back(fmt::format("{:.1f}", static_cast<double>(point.memory_peak) / 0x1p20));
    cells.push_back(point.digest);
    table.add(std::move(cells));
  }
  return table;
}

}  // namespace

Table points_table(std::span<const BenchPoint> points, std::optional<double> sgemm) {
  if (!points.empty() && points.front().job.kind == BenchKind::kStream) return stream_table(points);
  if (!points.empty() && points.front().job.kind == BenchKind::kStep) return step_table(points);
  const bool tera = in_tera(points);
  std::vector<Table::Column> columns{{"tokens"},
                                     {"seqs"},
                                     {"block"},
                                     {"mode"},
                                     {"samples"},
                                     {"median", "(ms)"},
                                     {"p10", "(ms)"},
                                     {"p90", "(ms)"},
                                     {tera ? "TFLOP/s" : "GFLOP/s", "per rank"},
                                     {"exposed comm", "(%)"},
                                     {"estimated", "(ms)"},
                                     {"mem/rank", "(MiB)"}};
  // The column `compute`: the time of the same job without communication, as a share of the whole run's.
  const bool has_compute = std::any_of(points.begin(), points.end(), [&](const BenchPoint& point) {
    return point.mode == kWholeMode && point.measured() &&
           std::any_of(points.begin(), points.end(), [&](const BenchPoint& other) {
             return other.mode == kComputeMode && other.block == point.block && comparable(point, other);
           });
  });
  if (has_compute) columns.push_back({"compute", "(%)"});
  if (sgemm) columns.push_back({"of SGEMM", "(%)"});
  Table table(columns);
  for (const BenchPoint& point : points) {
    std::vector<std::string> cells{fmt::format("{}", point.job.tokens), fmt::format("{}", point.job.batch),
                                   point.block > 0 ? fmt::format("{}", point.block) : "auto", point.mode,
                                   fmt::format("{}", point.samples)};
    if (!point.measured()) {
      cells.resize(columns.size(), std::string(Table::kNoValue));
      table.add(std::move(cells));
      continue;
    }
    cells.push_back(fmt::format("{:.3f}", point.ms.median));
    cells.push_back(fmt::format("{:.3f}", point.ms.p10));
    cells.push_back(fmt::format("{:.3f}", point.ms.p90));
    cells.push_back(rate_text(point.tflops_per_rank, tera));
    cells.push_back(
        fmt::format("{:.1f}", point.ms.median > 0.0 ? 100.0 * point.exposed_comm_ms / point.ms.median : 0.0));
    cells.push_back(point.estimated_ms > 0.0 ? fmt::format("{:.3f}", point.estimated_ms) : "-");
    cells.push_back(fmt::format("{:.1f}", static_cast<double>(point.memory_peak) / 0x1p20));
    if (has_compute) {
      std::string percent = "-";
      for (const BenchPoint& other : points) {
        if (point.mode != kWholeMode || other.mode != kComputeMode || other.block != point.block) continue;
        if (comparable(point, other)) percent = fmt::format("{:.1f}", 100.0 * other.ms.median / point.ms.median);
      }
      cells.push_back(percent);
    }
    if (sgemm) cells.push_back(fmt::format("{:.1f}", 100.0 * point.tflops_per_rank * 1e12 / *sgemm));
    table.add(std::move(cells));
  }
  return table;
}

std::string pairs_text(std::span<const PointPair> pairs) {
  std::vector<BenchPoint> points;
  for (const PointPair& pair : pairs) points.push_back(pair.ours);
  const bool tera = in_tera(points);
  const std::string unit = tera ? "(TFLOP/s)" : "(GFLOP/s)";
  Table table({{"tokens"}, {"seqs"}, {"ours", unit}, {"theirs", unit}, {"ours/theirs"}, {"peer"}});
  for (const PointPair& pair : pairs) {
    std::string name = who(pair.theirs);
    std::replace(name.begin(), name.end(), ' ', '_');  // so that each column is one word
    table.add({fmt::format("{}", pair.ours.job.tokens), fmt::format("{}", pair.ours.job.batch),
               rate_text(pair.ours.tflops_per_rank, tera), rate_text(pair.theirs.tflops_per_rank, tera),
               fmt::format("{:.3f}", pair.speed()), name});
  }
  return table.text();
}

}  // namespace ringattn
