// SPDX-License-Identifier: Apache-2.0
// The row of `quantize` in the table of ops that make files.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/jobs/file_op.hpp"
#include "ops/linear/quantize_model.hpp"

namespace ringattn {

namespace {

void check(const FileOpRequest& request) {
  if (!request.settings.weight_format.empty()) return;
  fail(ErrorCode::kUsage, {setting("format"), " is missing"}, "it says what weights become",
       {"Try ", setting("format", "int8"), ", or ", setting("format", "int4"), "."});
}

std::string ratio_text(std::int64_t before, std::int64_t after) {
  return fmt::format("{:.3f}", before > 0 ? static_cast<double>(after) / static_cast<double>(before) : 0.0);
}

FileOpTable layers_table(const QuantizeResult& result) {
  FileOpTable table;
  table.columns = {{"layer", "", ""},          {"out_features", "", ""}, {"in_features", "", ""},
                   {"before", "(bytes)", ""},  {"after", "(bytes)", ""}, {"share", "", ""},
                   {"error", "(relative)", ""}};
  for (const QuantizedLayer& layer : result.layers) {
    table.rows.push_back({layer.name, fmt::format("{}", layer.out_features), fmt::format("{}", layer.in_features),
                          fmt::format("{}", layer.bytes_before), fmt::format("{}", layer.bytes_after),
                          ratio_text(layer.bytes_before, layer.bytes_after),
                          fmt::format("{:.3e}", layer.relative_error)});
  }
  return table;
}

FileOpResult run(const FileOpRequest& request) {
  check(request);
  const Settings& settings = request.settings;
  const WeightFormat format = settings.weight_format == "int8" ? WeightFormat::kInt8 : WeightFormat::kInt4;
  const QuantizeResult result = quantize_model(
      {settings.input, request.output, request.replace, format, settings.search_mse, settings.ignore, request.threads});
  FileOpResult done;
  done.lines.push_back(fmt::format("{} quantized to {} ({}); scales by {}", counted(result.layers.size(), "layer"),
                                   format_name(format), compressed_format(format),
                                   settings.search_mse ? "the least squared error" : "the greatest magnitude"));
  std::string left;
  for (const std::string& layer : result.left) left += fmt::format("{}{}", left.empty() ? "" : ", ", layer);
  if (!left.empty()) done.lines.push_back(fmt::format("left as they are: {}", left));
  std::string copied;
  for (const std::string& name : result.copied) copied += fmt::format("{}{}", copied.empty() ? "" : ", ", name);
  if (!copied.empty()) done.lines.push_back(fmt::format("copied: {}", copied));
  done.lines.push_back(fmt::format(
      "{} of tensors become {}: {} of the bytes", format_bytes(static_cast<double>(result.bytes_before)),
      format_bytes(static_cast<double>(result.bytes_after)), ratio_text(result.bytes_before, result.bytes_after)));
  done.tables.push_back(layers_table(result));
  done.write = [result, format, search = settings.search_mse](JsonWriter& json) {
    json.member("format", format_name(format)).member("search", search ? "mse" : "none");
    json.member("bytes_before", result.bytes_before).member("bytes_after", result.bytes_after);
    json.key("layers").begin_array();
    for (const QuantizedLayer& layer : result.layers) {
      json.begin_object().member("name", layer.name).member("out_features", layer.out_features);
      json.member("in_features", layer.in_features).member("bytes_before", layer.bytes_before);
      json.member("bytes_after", layer.bytes_after).member("relative_error", layer.relative_error).end_object();
    }
    json.end_array().key("left").begin_array();
    for (const std::string& layer : result.left) json.value(layer);
    json.end_array();
  };
  return done;
}

}  // namespace

extern const FileOpEntry kQuantizeOp;
const FileOpEntry kQuantizeOp{.name = "quantize",
                              .check = check,
                              .run = run,
                              .synthetic = false,
                              .check_output = check_quantize_output,
                              .output_example = "model-int8"};

}  // namespace ringattn
