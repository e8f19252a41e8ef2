// Which tensors of a bucket share a uniform segment, and which leave for the ragged tail: the
// search behind plan_bucket, in terms of extents. Internal to the planner.
//
// [Note: the search]
// Tensors of equal size and block are one class, so that a choice is a count a class: tens to a few
// thousand states. For a state, the packing bound costs next to nothing and the exact shard size
// (uniform_search.h) some microseconds. A budget for the whole cost, starting just above the bound
// and growing, tells how large a state's shard may be: what the others need at least is subtracted.
// Most states fall to their bound, the rest are searched below that limit only. A dynamic programme
// over states then joins up to k of them. The first budget that admits a solution holds the best
// one. Everything is counted and nothing timed, so all ranks get the same answer.
#pragma once

#include <span>
#include <vector>

#include "ragged/plan/planner.h"

namespace ragged::plan::detail {

/// A tensor with elements. `extent` is what the uniform search sees: whole runs where blocks that
/// restart leave a rest.
struct SearchTensor {
  Extent extent;
  Index block = 1;
  Index restart = 0;
  Index ragged_blocks = 0;  // pieces that may have different owners
};

struct Partition {
  std::vector<std::vector<int>> segments{};  // tensors of each uniform segment, by position
  std::vector<int> ragged{};                 // ascending
  bool is_exact = true;                      // false: something was thinned out or cut off
};

class PartitionSearch {
 public:
  /// Presumes checked tensors and options; `tensors` must outlive the search.
  PartitionSearch(std::span<const SearchTensor> tensors, const PlanOptions& options);

  /// The cheapest partition with at most `max_ragged_blocks` blocks in the tail.
  Partition best(Index max_ragged_blocks);
  /// No partition with that limit has a smaller image, up to the alignment of starts.
  Index bound(Index max_ragged_blocks);

 private:
  // Tensors that the search doesn't tell apart, in groups that stay together.
  struct Class {
    std::vector<std::vector<int>> groups{};
    std::vector<Extent> extents{};  // of one group
    Index numel = 0;                // of one group, starts aligned
    Index ragged_blocks = 0;        // of one group; 0: may not leave
    int levels() const { return static_cast<int>(groups.size()); }
  };
  struct Entry {  // an extent of a class, in some order
    int of_class;
    Extent extent;
  };
  struct State {
    std::vector<int> takes;  // groups of each class
    Index numel = 0;         // starts aligned
    Index packed = 0;        // packing bound of the shard
    Index shard = kUnknown;  // exact, once known
    Index none_below = 0;    // no layout has a shard below this
    Index at_least = 0;      // image, ragged tail allowed
    Index ragged_blocks = 0;
    bool may_leave = true;
    int order = 0;  // that reached `shard`
    int first_class = 0;
  };
  static constexpr Index kUnknown = -1;

  void build_classes();
  void thin_classes();
  void build_orders();
  void build_states();
  void fill_packing_bounds();
  void fill_least(Index max_ragged_blocks, Index block_cost);
  Index evaluate(State& state, Index cutoff);
  bool try_budget(Index budget, Index max_ragged_blocks, Partition& partition);
  void join_states(Index budget, Index max_ragged_blocks);
  Index ragged_cost(const State& state) const;
  Partition reconstruct(std::size_t uniform, std::size_t ragged) const;
  template <class Visit>
  void for_each_part(std::size_t whole, Visit visit) const;

  std::span<const SearchTensor> tensors_;
  const PlanOptions& options_;
  std::vector<Class> classes_;
  std::vector<std::size_t> strides_;
  std::vector<std::vector<Entry>> orders_;
  std::vector<State> states_;
  std::vector<std::vector<Index>> cost_;  // [k][state]: cheapest with up to k + 1 segments
  bool is_exact_ = true;
  Index work_ = 0;
};

}  // namespace ragged::plan::detail
