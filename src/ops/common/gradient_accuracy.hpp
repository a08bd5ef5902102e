// SPDX-License-Identifier: Apache-2.0
// The errors of an op's gradients against fp64, one by one, for reports and lines of text.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.hpp"

namespace ringattn {

class JsonWriter;

// One gradient. Trivially copyable, because ranks exchange it.
struct GradientAccuracy {
  std::array<char, 20> name{};
  std::int64_t compared = 0;  // elements that are finite here and in fp64
  double part = 0.0;          // the greatest error, as a fraction of the allowed error
  double error = 0.0;         // that error
  double allowed = 0.0;
  std::int64_t place = 0;  // location of that error: a packed token, or a sequence of initial states; 0 for a parameter
  std::int32_t head = 0;   // its head, group or channel
  std::int64_t misplaced = 0;  // elements that are NaN or infinite here or in fp64, but not the same in both

  explicit GradientAccuracy(std::string_view of = {});
  // Compares an element.
  void compare(double value, double exact, double allowed_error, std::int64_t at, int at_head);
};

bool pass(std::span<const GradientAccuracy> gradients);
// Collective. Merges the accuracies of all ranks.
std::vector<GradientAccuracy> merge_ranks(const Collective& collective, std::span<const GradientAccuracy> own);

// "dx: greatest error 0.3 of what is allowed, …"
std::string accuracy_line(const GradientAccuracy& gradient);
// The lines of the gradients that were compared.
std::vector<std::string> accuracy_lines(std::span<const GradientAccuracy> gradients);
// Writes the object "accuracy" of a report.
void write_accuracy(JsonWriter& json, std::int64_t rows, std::span<const GradientAccuracy> gradients);

}  // namespace ringattn
