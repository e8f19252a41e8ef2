// For comparisons with other implementations: the logits that a checkpoint of `ragged train` gives, on one process and
// without the exporter.
//     ragged_logits CHECKPOINT TOKEN...     prints a line of numbers for each token
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "ragged/checkpoint/read.h"
#include "ragged/train/language_model.h"

namespace {

using namespace ragged;  // NOLINT: a program of a page

// The whole of a parameter.
void fill(const checkpoint::Checkpoint& saved, const std::string& name, const at::Tensor& parameter) {
  checkpoint::ReadPiece piece;
  piece.name = name;
  piece.dtype = "F32";
  piece.shape = parameter.sizes().vec();
  piece.owned = {0, parameter.numel()};
  const checkpoint::ReadPlan plan(saved, {std::move(piece)}, /*allow_unused=*/true);
  auto* bytes = static_cast<std::byte*>(parameter.mutable_data_ptr());
  plan.read([&](std::size_t, Index offset, checkpoint::Bytes part) {
    std::memcpy(bytes + offset, part.data(), part.size());
  });
}

void print_logits(const std::string& folder, const std::vector<Index>& tokens) {
  const at::NoGradGuard no_grad;
  const auto saved = checkpoint::Checkpoint::open(folder);
  const train::Config config = train::parse_config(saved.index().facts.texts.at("config"), folder);
  const auto model = train::make_model(config.model, train::parameters_on(c10::kCPU));
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model->named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) fill(saved, parameter.key(), parameter.value());
  }
  const at::Tensor input = at::tensor(tokens, at::kLong).unsqueeze(0);
  const at::Tensor logits = model->forward_logits(input).squeeze(0).contiguous();
  for (Index t = 0; t < logits.size(0); ++t) {
    for (Index i = 0; i < logits.size(1); ++i) std::printf("%.9g ", static_cast<double>(logits[t][i].item<float>()));
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: ragged_logits CHECKPOINT TOKEN...\n");
    return 2;
  }
  try {
    std::vector<Index> tokens;
    for (int i = 2; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
    print_logits(argv[1], tokens);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ragged_logits: error: %s\n", error.what());
    return 1;
  }
}
