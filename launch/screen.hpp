// SPDX-License-Identifier: Apache-2.0
// Where a subcommand prints: the result on stdout (on stderr when a report, lines or `bench --output` take stdout),
// context lines with '#', colour only where it is wanted.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "launch/options.hpp"

namespace ringattn {

enum class Paint { kGood, kBad };

class Screen {
 public:
  // `shown`: false on all ranks but one; then nothing is printed.
  Screen(const JobOptions& options, bool shown);

  // Text of the result, as it is.
  void print(std::string_view text) const;
  // Text on stdout, whatever takes it.
  void print_result(std::string_view text) const;
  // "# text", unless --quiet.
  void context(std::string_view text) const;
  // Prints "# text", only with --verbose.
  void detail(std::string_view text) const;
  std::string painted(std::string_view text, Paint paint) const;
  bool verbose() const { return verbose_; }

 private:
  std::FILE* file_;
  bool shown_;
  bool quiet_;
  bool verbose_;
  bool color_;
};

// Whether a person watches `file` as it is written. mpirun gives its ranks a pseudo-terminal that doesn't count.
bool is_watched(std::FILE* file);

// Whether to write colours to `file`: asked for, or (auto) on a terminal that isn't dumb and without NO_COLOR.
bool wants_color(When when, std::FILE* file);

// The program's one way to report a failure: "ringattn: error: message" on stderr.
void print_error_line(std::string_view message, When color);
// The same for what its user should know of, and that is no failure.
void print_warning_line(std::string_view message, When color);
// "# note" on stderr, also with --quiet: what was assumed of the input.
void print_note_line(std::string_view note);

}  // namespace ringattn
