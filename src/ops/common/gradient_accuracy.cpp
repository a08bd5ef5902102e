// SPDX-License-Identifier: Apache-2.0
#include "ops/common/gradient_accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/json_writer.hpp"

namespace ringattn {

GradientAccuracy::GradientAccuracy(std::string_view of) {
  std::copy_n(of.begin(), std::min(of.size(), name.size() - 1), name.begin());
}

void GradientAccuracy::compare(double value, double exact, double allowed_error, std::int64_t at, int at_head) {
  const bool finite = std::isfinite(static_cast<float>(exact));
  if (finite != std::isfinite(value)) ++misplaced;
  if (!finite || !std::isfinite(value)) return;
  const double own = std::abs(value - exact);
  if (compared++ > 0 && own / allowed_error <= part) return;
  part = own / allowed_error;
  error = own;
  allowed = allowed_error;
  place = at;
  head = at_head;
}

bool pass(std::span<const GradientAccuracy> gradients) {
  return std::ranges::all_of(gradients, [](const GradientAccuracy& of) { return of.misplaced == 0 && of.part <= 1.0; });
}

std::vector<GradientAccuracy> merge_ranks(const Collective& collective, std::span<const GradientAccuracy> own) {
  std::vector<GradientAccuracy> all(own.begin(), own.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    GradientAccuracy& total = all[i];
    std::int64_t compared = 0;
    std::int64_t misplaced = 0;
    for (const GradientAccuracy& theirs : collective.gather_values(own[i])) {
      compared += theirs.compared;
      misplaced += theirs.misplaced;
      if (theirs.compared > 0 && (total.compared == 0 || theirs.part > total.part)) total = theirs;
    }
    total.compared = compared;
    total.misplaced = misplaced;
  }
  return all;
}

std::string accuracy_line(const GradientAccuracy& gradient) {
  std::string line;
  if (gradient.compared == 0) {
    line = fmt::format("{}: nothing is compared", gradient.name.data());
  } else {
    line = fmt::format("{}: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at {}, head {}",
                       gradient.name.data(), gradient.part, gradient.error, gradient.allowed, gradient.place,
                       gradient.head);
  }
  if (gradient.misplaced > 0) {
    line += fmt::format("; {} values are NaN or infinite where fp64 has another value", gradient.misplaced);
  }
  return line;
}

std::vector<std::string> accuracy_lines(std::span<const GradientAccuracy> gradients) {
  std::vector<std::string> lines;
  for (const GradientAccuracy& gradient : gradients) {
    if (gradient.compared > 0 || gradient.misplaced > 0) lines.push_back(accuracy_line(gradient));
  }
  return lines;
}

void write_accuracy(JsonWriter& json, std::int64_t rows, std::span<const GradientAccuracy> gradients) {
  std::int64_t misplaced = 0;
  json.begin_object().member("rows", rows);
  for (const GradientAccuracy& gradient : gradients) {
    misplaced += gradient.misplaced;
    json.key(gradient.name.data());
    if (gradient.compared == 0) {
      json.null();
      continue;
    }
    json.begin_object().member("greatest_error", gradient.error).member("allowed", gradient.allowed);
    json.member("token", gradient.place).member("head", gradient.head).end_object();
  }
  json.member("misplaced", misplaced).end_object();
}

}  // namespace ringattn
