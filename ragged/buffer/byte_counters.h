// Bytes that RaggedFSDP itself writes outside collectives and compute. What isn't here isn't done: there is no
// copy-in and no copy-out.
#pragma once

#include "ragged/base/math.h"

namespace ragged::buffer {

struct ByteCounters {
  Index cast_in = 0;    // masters into this rank's ranges of an image
  Index cast_grad = 0;  // gradients into their slots of a reduce buffer
  Index in_place = 0;   // no copy: gradients that operations computed in their slots (fsdp/gradients_in_place.h)
  Index added = 0;      // gradients and shards added to what was there
  Index zeroed = 0;     // slots without gradient, padding
  Index copied = 0;     // anything else: a foreign .grad, values brought in at construction don't count

  ByteCounters& operator+=(const ByteCounters& b) {
    cast_in += b.cast_in;
    cast_grad += b.cast_grad;
    in_place += b.in_place;
    added += b.added;
    zeroed += b.zeroed;
    copied += b.copied;
    return *this;
  }
  friend bool operator==(const ByteCounters&, const ByteCounters&) = default;
};

}  // namespace ragged::buffer
