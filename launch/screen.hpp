// SPDX-License-Identifier: Apache-2.0
// Prints the output of a subcommand: the result on stdout (on stderr if a report, lines or `bench --output` use
// stdout), context lines with '#', and colour only where it is requested.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "launch/options.hpp"

namespace ringattn {

enum class Paint { kGood, kBad };

class Screen {
 public:
  // `shown`: false on all ranks but one, which then print nothing.
  Screen(const JobOptions& options, bool shown);

  // Prints text of the result unchanged.
  void print(std::string_view text) const;
  // Prints text on stdout, even if a report uses stdout, too.
  void print_result(std::string_view text) const;
  // Prints "# text", unless --quiet.
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

// Whether `file` is a terminal that a person watches. mpirun gives its ranks a pseudo-terminal, which doesn't count.
bool is_watched(std::FILE* file);

// Whether to write colours to `file`: if requested or, with auto, on a terminal that isn't dumb and without NO_COLOR.
bool wants_color(When when, std::FILE* file);

// Prints "ringattn: error: message" on stderr. All failures of the program are printed by this function.
void print_error_line(std::string_view message, When color);
// The same for a warning, which is not a failure.
void print_warning_line(std::string_view message, When color);
// Prints "# note" on stderr, even with --quiet: an assumption about the input.
void print_note_line(std::string_view note);

}  // namespace ringattn
