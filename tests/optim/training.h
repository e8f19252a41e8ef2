// A small transformer that learns made-up text under any optimizer: what tells optimizers apart by their losses.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ragged/optim/optimizer.h"
#include "tests/optim/trees.h"

namespace ragged::test {

struct TextRun {
  std::vector<double> losses{};      // by step, from 1 on
  std::vector<at::Tensor> params{};  // all of them in one, in fp64: after each of `kept_steps`
};

struct TextTraining {
  int steps = 100;
  double lr = 1e-3;  // reached after 40 steps
  std::vector<int> kept_steps{};
};

/// On one rank, in blocks that every optimizer takes, with clipping.
TextRun train_on_text(
    comm::World& world, const TextTraining& options,
    const std::function<std::unique_ptr<optim::Optimizer>(std::shared_ptr<fsdp::Unit>)>& make);

}  // namespace ragged::test
