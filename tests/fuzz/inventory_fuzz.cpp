// libFuzzer on the reader of model inventories: any text is an inventory or an InvalidArgument. tools/fuzz runs it.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ragged/base/error.h"
#include "ragged/plan/inventory.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const ragged::plan::Inventory inventory = ragged::plan::inventory_from_json(text);
    if (inventory.units.size() > 1000) return 0;  // a few bytes may stand for millions, which is slow and no fault
    const ragged::plan::Inventory merged = ragged::plan::merge_layers(inventory, 2);
    if (merged.numel() != inventory.numel()) __builtin_trap();
    for (const ragged::plan::InventoryUnit& unit : merged.units) {
      static_cast<void>(ragged::plan::param_specs(unit, {.rows = 2}));
    }
  } catch (const ragged::InvalidArgument&) {
  }
  return 0;
}
