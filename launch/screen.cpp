// SPDX-License-Identifier: Apache-2.0
#include "launch/screen.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "comm/launcher.hpp"

namespace ringattn {

Screen::Screen(const JobOptions& options, bool shown)
    : file_(options.json == "-" || options.jsonl == "-" || options.bench_output != BenchOutput::kTable ? stderr
                                                                                                       : stdout),
      shown_(shown),
      quiet_(options.quiet),
      verbose_(options.verbose),
      color_(wants_color(options.color, file_)) {}

void Screen::print(std::string_view text) const {
  if (!shown_) return;
  if (file_ == stdout) return print_result(text);
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), file_));
  std::fflush(file_);
}

void Screen::print_result(std::string_view text) const {
  if (!shown_) return;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fail(ErrorCode::kFile, "the result can't be written to stdout", std::strerror(errno),
         "Redirect stdout to a file that can be written.");
  }
}

void Screen::context(std::string_view text) const {
  if (!quiet_) print(fmt::format("# {}\n", text));
}

void Screen::detail(std::string_view text) const {
  if (verbose_) context(text);
}

std::string Screen::painted(std::string_view text, Paint paint) const {
  if (!color_) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", paint == Paint::kGood ? 32 : 31, text);
}

bool is_watched(std::FILE* file) { return ::isatty(::fileno(file)) == 1 && !launched_as_rank(); }

bool wants_color(When when, std::FILE* file) {
  if (when != When::kAuto) return when == When::kOn;
  const auto no_color = environment_value("NO_COLOR");
  return is_watched(file) && (!no_color || no_color->empty()) && environment_value("TERM") != "dumb";
}

namespace {

void print_line(std::string line, std::string_view message) {
  for (const char c : message) {  // names from files may contain any character
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      line += fmt::format("\\x{:02x}", static_cast<unsigned>(c));
    } else {
      line += c;
    }
  }
  line += '\n';
  std::fputs(line.c_str(), stderr);  // one write, so lines of several processes don't mix
  std::fflush(stderr);
}

std::string prefix(std::string_view kind, std::string_view paint, When color) {
  const bool painted = wants_color(color, stderr);
  return fmt::format("ringattn: {}{}:{} ", painted ? paint : "", kind, painted ? "\x1b[0m" : "");
}

}  // namespace

void print_error_line(std::string_view message, When color) { print_line(prefix("error", "\x1b[31m", color), message); }

void print_warning_line(std::string_view message, When color) {
  print_line(prefix("warning", "\x1b[33m", color), message);
}

void print_note_line(std::string_view note) { print_line("# ", note); }

}  // namespace ringattn
