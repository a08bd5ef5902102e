// SPDX-License-Identifier: Apache-2.0
// Tells a launcher what a rank would (base/outcome.hpp), as words separated by commas say:
// rank=R, started=N (it has begun, one of N of its host), starting=0 (MPI), leaving=S, code=C, signal=S, wait=SECONDS
// (it waits). Any other word is sent as it is, which no launcher understands. Usage: fake_rank WORDS
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>

#include "base/outcome.hpp"

int main(int argc, char** argv) {
  using ringattn::Outcome;
  const char* const folder = std::getenv(ringattn::kOutcomesVariable);
  const int socket = folder == nullptr || argc != 2 ? -1 : ringattn::connect_outcome_socket(folder);
  if (socket < 0) return 1;
  Outcome outcome;
  std::istringstream words(argv[1]);
  for (std::string word; std::getline(words, word, ',');) {
    const std::string name = word.substr(0, word.find('='));
    char* end = nullptr;
    const std::string value = word.substr(std::min(name.size() + 1, word.size()));
    const double seconds = std::strtod(value.c_str(), &end);
    const auto number = static_cast<int>(seconds);
    const auto tell = [&](Outcome::State state) {
      outcome.state = state;
      outcome.number = number;
      ::send(socket, &outcome, sizeof(outcome), 0);
    };
    if (value.empty() || *end != '\0') {
      ::send(socket, word.data(), word.size(), 0);
    } else if (name == "wait") {
      ::usleep(static_cast<unsigned>(seconds * 1e6));
    } else if (name == "rank") {
      outcome.rank = number;
    } else if (name == "started") {
      outcome.ranks_on_host = number;
      tell(Outcome::State::kBegun);
    } else {
      tell(name == "starting"  ? Outcome::State::kStarting
           : name == "leaving" ? Outcome::State::kLeaving
           : name == "code"    ? Outcome::State::kCode
                               : Outcome::State::kSignal);
    }
  }
  return 0;
}
