// What the profiler would see of this thread: c10d operations and our own ranges, by name.
#pragma once

#include <string>
#include <vector>

#include <ATen/record_function.h>

namespace ragged::test {

/// Records while it lives; one at a time a thread.
class Recorded {
 public:
  Recorded() {
    names().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Recorded::note).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  }
  ~Recorded() { at::removeCallback(handle_); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  int count(const std::string& name) const {
    return static_cast<int>(std::count(names().begin(), names().end(), name));
  }
  /// All collectives of c10d, whichever.
  int count_c10d() const {
    return static_cast<int>(
        std::count_if(names().begin(), names().end(), [](const auto& name) { return name.starts_with("c10d::"); }));
  }
  const std::vector<std::string>& all() const { return names(); }

 private:
  static std::vector<std::string>& names() {
    thread_local std::vector<std::string> list;
    return list;
  }
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    names().emplace_back(function.name());
    return nullptr;
  }

  at::CallbackHandle handle_ = 0;
};

}  // namespace ragged::test
