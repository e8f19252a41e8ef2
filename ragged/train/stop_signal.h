// SIGTERM and SIGINT as a question that the training loop asks once a step, so that it can save before it goes.
#pragma once

#include <string>

namespace ragged::train {

/// While one lives, the first SIGTERM or SIGINT is noted; a second one ends the process as it always does. At most one
/// at a time in a process. The destructor puts back what was there before.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Number of the signal that came, or 0.
  int number() const;
};

/// "SIGTERM", "SIGINT", "signal 3".
std::string signal_name(int number);

}  // namespace ragged::train
