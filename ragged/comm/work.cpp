#include "ragged/comm/work.h"

#include <ATen/record_function.h>

#include "ragged/base/error.h"
#include "ragged/comm/group_state.h"

namespace ragged::comm {
namespace {

std::string first_line(const std::exception& e) {
  std::string text = e.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 300));
}

}  // namespace

struct Work::State {
  std::shared_ptr<GroupState> group;
  const char* operation;
  std::string unit;
  std::vector<compat::WorkPtr> works;
  std::function<void()> finish;
  bool done = false;
};

Work::Work(std::shared_ptr<GroupState> group, const char* operation, std::string_view unit)
    : state_(std::make_shared<State>(
          State{std::move(group), operation, std::string(unit), {}, nullptr, false})) {}

void Work::add(const std::function<compat::WorkPtr()>& issue) {
  try {
    state_->works.push_back(issue());
  } catch (const std::exception& e) {
    state_->group->fail(state_->operation, state_->unit, first_line(e));
  }
}

void Work::on_complete(std::function<void()> finish) { state_->finish = std::move(finish); }

void Work::wait() {
  if (!state_) return;
  const std::shared_ptr<State> state = std::move(state_);
  state_.reset();
  if (state->done) return;
  state->done = true;  // of the copies too
  ProfilerRange range("ragged::wait", state->unit);
  const auto start = std::chrono::steady_clock::now();
  try {
    for (compat::WorkPtr& work : state->works) work->wait(state->group->deadline);
  } catch (const std::exception& e) {
    state->group->fail(state->operation, state->unit, first_line(e));
  }
  state->group->wait_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (state->finish) state->finish();
}

void Work::abandon() noexcept {
  if (!state_) return;
  const std::shared_ptr<State> state = std::move(state_);
  state_.reset();
  if (state->done) return;
  state->done = true;
  for (compat::WorkPtr& work : state->works) {
    try {
      work->wait(state->group->deadline);
    } catch (...) {  // NOLINT(bugprone-empty-catch): the failure that led here was reported already
    }
  }
}

void GroupState::fail(const char* operation, std::string_view unit, const std::string& reason) {
  const std::string message = fmt::format(
      "[{}] Expected all ranks of group '{}' to finish this operation of unit '{}' within {:.1f} s, but got: {} "
      "(rank {} of {}). A peer died, is stuck, or ran a different sequence of units; look at the first error among "
      "the ranks, and set RAGGED_CHECK=1 to compare their sequences.",
      operation, name, unit, static_cast<double>(deadline.count()) / 1000.0, reason, rank, size);
  if (failure.empty()) failure = message;
  throw CommError(message);
}

struct ProfilerRange::Guard {
  at::RecordFunction function;
  explicit Guard(at::StepCallbacks&& callbacks) : function(std::move(callbacks)) {}
};

ProfilerRange::ProfilerRange(const char* operation, std::string_view unit) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  guard_ = std::make_unique<Guard>(std::move(*callbacks));
  guard_->function.before(fmt::format("{} {}", operation, unit));
}

ProfilerRange::~ProfilerRange() = default;

}  // namespace ragged::comm
