// What a communicator has carried, in bytes and calls. Logical collectives are counted: one a call of
// Communicator, however many c10d operations carry it.
#pragma once

#include "ragged/base/math.h"

namespace ragged::comm {

/// Each gather and reduction counts its whole image once, on every rank; an all-to-all what this rank sends to others.
/// A group of one counts nothing.
struct Traffic {
  Index gathered_bytes = 0;
  Index reduced_bytes = 0;
  Index all_reduced_bytes = 0;
  Index all_to_all_bytes = 0;
  Index other_bytes = 0;  // broadcasts; what the order check exchanges counts nowhere
  Index all_gathers = 0;
  Index reduce_scatters = 0;
  Index all_reduces = 0;
  Index all_to_alls = 0;
  Index others = 0;

  Traffic& operator+=(const Traffic& t) {
    gathered_bytes += t.gathered_bytes;
    reduced_bytes += t.reduced_bytes;
    all_reduced_bytes += t.all_reduced_bytes;
    all_to_all_bytes += t.all_to_all_bytes;
    other_bytes += t.other_bytes;
    all_gathers += t.all_gathers;
    reduce_scatters += t.reduce_scatters;
    all_reduces += t.all_reduces;
    all_to_alls += t.all_to_alls;
    others += t.others;
    return *this;
  }
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

}  // namespace ragged::comm
