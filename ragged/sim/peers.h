// How other engines would lay out the same parameters: their public padding rules, as arithmetic on shapes. For
// comparison only; nothing here runs their code. Sizes are elements over all ranks, for one copy of the state.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "ragged/plan/bucket_plan.h"

namespace ragged::sim {

enum class Peer {
  kFsdp1,             // a flat parameter per unit, 16-byte starts, cut anywhere
  kFsdp2,             // rows of each parameter, equal chunks
  kZero3,             // each parameter flat, cut anywhere
  kMegatronV1,        // tensors on a grid of rows, an expert group and another
  kMegatronV2,        // the same with a grid that no tensor escapes
  kMegatronV1PerRow,  // v1 with one group per distinct row size
  kMegatronV2PerRow,  // v2 likewise
};

inline constexpr Peer kAllPeers[] = {Peer::kFsdp1,           Peer::kFsdp2,      Peer::kZero3,
                                     Peer::kMegatronV1,      Peer::kMegatronV2, Peer::kMegatronV1PerRow,
                                     Peer::kMegatronV2PerRow};

/// "FSDP2", as people write it.
std::string_view title(Peer peer);
/// "fsdp2", as JSON names it.
std::string_view key(Peer peer);

struct PeerOptions {
  int ranks = 1;
  Index start_alignment = 8;   // of FSDP1: elements in 16 bytes of the compute dtype; 1: none
  Index block_rows = 1;        // of Megatron v2: rows of a block; its BlockAtomic
  int mesh_ranks = 0;          // of Megatron v2, which pads for replicas too; 0: ranks
  Index persistent = 100'000;  // of ZeRO-3: parameters up to this size stay whole on every rank
};

struct PeerLayout {
  Index size = 0;               // gathered: parameters and padding
  Index padding = 0;            // size less the parameters
  int groups = 0;               // collectives of one gather
  Index blocks_cut = 0;         // blocks, as the parameters' specs ask for them, with a border inside
  Index gather_copied = 0;      // elements a rank writes around one gather beside the collective itself
  Index reduce_written = 0;     // elements a rank writes to bring gradients where the reduction reads them
  Index replicated = 0;         // elements kept in whole by ranks that don't own them
  std::vector<Index> starts{};  // of each tensor in its group's buffer (or in its own)
};

/// One unit's layout. Rows are what lies behind the first dim, so a stack of experts has rows of a whole expert, as
/// these engines have it. Throws InvalidArgument for fewer than one rank.
PeerLayout peer_layout(Peer peer, std::span<const plan::ParamSpec> params, const PeerOptions& options);

/// Blocks with a border inside, when borders lie at multiples of `shard` in a buffer where the tensor begins at
/// `start`.
Index blocks_cut(Index start, Index numel, Index block, Index restart, Index shard);

}  // namespace ragged::sim
