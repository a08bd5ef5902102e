// SPDX-License-Identifier: Apache-2.0
// What the lines of both benchmarks of linear layers have in common (schema "ringattn.linear/1").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/build.hpp"
#include "base/json_writer.hpp"
#include "bench/quantile.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn {

// Begins the line's object: what was measured.
inline void begin_linear_line(JsonWriter& line, const std::string& git, std::string_view device,
                              std::string_view kernel, std::int64_t rows, const LinearSpec& spec) {
  line.begin_object().member("schema", "ringattn.linear/1");
  line.key("tool").begin_object().member("name", "ringattn").member("version", version()).end_object();
  line.member("git", git);
  line.key("devices").begin_array().value(device).end_array();
  line.member("kernel", kernel);
  line.key("job").begin_object().member("rows", rows).member("n", spec.out_features);
  line.member("k", spec.in_features).member("activation", activation_name(spec.activation, spec.gated));
  line.member("parallel", parallel_name(spec.parallel)).member("weights", format_name(spec.weights));
  line.member("dtype", dtype_name(spec.dtype)).end_object();
}

// `sorted`: µs of a launch.
inline void add_linear_times(JsonWriter& line, const std::vector<double>& sorted, std::int64_t copies,
                             std::int64_t launches) {
  line.member("cache", "cold").member("copies", copies).member("launches", launches);
  line.member("samples", sorted.size());
  line.key("ms").begin_object().member("median", quantile(sorted, 0.5) * 1e-3);
  line.member("p10", quantile(sorted, 0.1) * 1e-3).member("p90", quantile(sorted, 0.9) * 1e-3).end_object();
}

}  // namespace ringattn
