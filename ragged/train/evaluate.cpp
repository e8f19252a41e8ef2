#include "ragged/train/evaluate.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "ragged/train/data.h"

namespace ragged::train {
namespace {

// Without a backward nothing drops what stays gathered until then, and the next step would start with it.
void reshard_all(const fsdp::Unit& root) {
  for (const auto& unit : root.units()) unit->reshard();
}

}  // namespace

double validation_loss(
    const comm::World& world, fsdp::Unit& root, LanguageModel& model, const at::Tensor& text,
    const ValidationOptions& options) {
  const at::NoGradGuard no_grad;
  Logits logits_of{model};
  at::Tensor sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(world.device()));
  // Every rank runs as many forwards as the others, since each gathers; a rank with nothing left repeats sequences
  // that don't count.
  const Index round = world.size() * options.batch;
  for (Index first = 0; first < options.sequences; first += round) {
    const Index mine = first + world.rank() * options.batch;
    const Batch batch = validation_batch(text, options.sequence, options.sequences, mine, options.batch);
    const at::Tensor logits = root.call(logits_of, batch.tokens.to(world.device()));
    const Index counting = std::clamp<Index>(options.sequences - mine, 0, options.batch);
    if (counting == 0) continue;
    sum += at::cross_entropy_loss(
        logits.narrow(0, 0, counting).to(at::kFloat).flatten(0, 1),
        batch.targets.narrow(0, 0, counting).to(world.device()).flatten(), /*weight=*/{}, at::Reduction::Sum);
  }
  reshard_all(root);
  world.all().all_reduce_sum(sum, "validation loss").wait();
  return sum.item<double>() / static_cast<double>(options.sequences * options.sequence);
}

std::string generate(
    fsdp::Unit& root, LanguageModel& model, c10::Device device, std::string_view prompt, const SampleOptions& options) {
  const at::NoGradGuard no_grad;
  Logits logits_of{model};
  at::Generator generator = at::detail::createCPUGenerator(options.seed);
  std::vector<std::int64_t> tokens;
  for (char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));
  for (Index i = 0; i < options.bytes; ++i) {
    const auto seen = std::min<std::ptrdiff_t>(std::ssize(tokens), options.context);
    const std::vector<std::int64_t> tail(tokens.end() - seen, tokens.end());
    const at::Tensor context = at::tensor(tail, at::kLong).unsqueeze(0);
    const at::Tensor logits = root.call(logits_of, context.to(device));
    // Tokens beyond the bytes have no text.
    const at::Tensor last = logits[0][-1].narrow(0, 0, 256).to(at::kCPU, at::kFloat);
    const at::Tensor next = options.temperature > 0
        ? at::multinomial((last / options.temperature).softmax(0), 1, false, generator)
        : last.argmax();
    tokens.push_back(next.item<std::int64_t>());
  }
  reshard_all(root);
  std::string text;
  for (std::int64_t token : tokens) text += static_cast<char>(token);
  return text;
}

std::string printable(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c != '\n' && (c < ' ' || c > '~')) c = '?';
  }
  return result;
}

}  // namespace ragged::train
