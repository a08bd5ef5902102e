// SPDX-License-Identifier: Apache-2.0
// The line of a measured step (schema "ringattn.decode/1"), which bench/result_lines.py reads.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/build.hpp"
#include "base/json_writer.hpp"
#include "bench/decode_gpu_arguments.hpp"
#include "bench/quantile.hpp"

namespace ringattn {

// `times`: microseconds of a step in each replay; none where it can't be measured, for which `error` has the reason.
inline std::string decode_line(std::string_view kernel, std::string_view device, const DecodeShape& shape,
                               std::vector<double> times, std::string_view error) {
  std::sort(times.begin(), times.end());
  const CacheRotation rotation = cache_rotation_of(shape);
  JsonWriter line(false);
  line.begin_object().member("schema", "ringattn.decode/1");
  line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
  line.member("git", std::string(git_revision()) + (git_dirty() ? "-dirty" : ""));
  line.key("devices").begin_array().value(device).end_array();
  line.member("kernel", kernel);
  line.key("job").begin_object().member("batch", shape.batch).member("keys", shape.keys).member("rows", shape.rows);
  line.member("heads", shape.heads).member("kv_heads", shape.kv_heads).member("head_dim", shape.head_dim);
  line.member("head_dim_v", shape.head_dim_v).member("dtype", "bf16").member("page_size", shape.page).end_object();
  std::string form = shape.slices == 0 ? std::string() : fmt::format("slices {}", shape.slices);
  if (shape.prefix > 0) form += fmt::format("{}prefix {}", form.empty() ? "" : ", ", shape.prefix);
  if (shape.listed > 0) {
    form += fmt::format("{}{} {} blocks of {}", form.empty() ? "" : ", ", shape.chosen ? "best" : "listed",
                        shape.listed, kMaskBlockKeys);
  }
  if (shape.cache != "plain") form += (form.empty() ? "" : ", ") + shape.cache;
  if (shape.update) form += (form.empty() ? "" : ", ") + std::string("with its update");
  line.member("form", form);
  line.member("caches", rotation.caches).member("launches", rotation.launches).member("samples", times.size());
  if (times.empty()) {
    line.key("us").null().member("error", error);
  } else {
    line.key("us").begin_object().member("median", quantile(times, 0.5));
    line.member("p10", quantile(times, 0.1)).member("p90", quantile(times, 0.9)).end_object();
  }
  return line.end_object().text();
}

}  // namespace ringattn
