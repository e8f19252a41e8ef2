#include "ragged/train/stop_signal.h"

#include <atomic>
#include <csignal>

#include <fmt/format.h>

#include "ragged/base/error.h"

namespace ragged::train {
namespace {

// A handler can reach nothing but globals: the only mutable ones that there are.
std::atomic<int> g_number{0};
std::atomic<bool> g_is_installed{false};
struct sigaction g_before_term;  // NOLINT
struct sigaction g_before_int;   // NOLINT

static_assert(std::atomic<int>::is_always_lock_free, "a handler may not wait");

void note(int number) {
  g_number = number;
  // Once: whoever sends another doesn't want to wait.
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
}

}  // namespace

StopSignal::StopSignal() {
  RAGGED_CHECK(!g_is_installed.exchange(true), "[signal] Expected one StopSignal at a time, but there is another.");
  g_number = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, &g_before_term);
  sigaction(SIGINT, &action, &g_before_int);
}

StopSignal::~StopSignal() {
  sigaction(SIGTERM, &g_before_term, nullptr);
  sigaction(SIGINT, &g_before_int, nullptr);
  g_is_installed = false;
}

int StopSignal::number() const {
  return g_number;
}

std::string signal_name(int number) {
  if (number == SIGTERM) return "SIGTERM";
  if (number == SIGINT) return "SIGINT";
  return fmt::format("signal {}", number);
}

}  // namespace ragged::train
