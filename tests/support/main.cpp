// One thread a rank: ranks are threads already, and sums must not depend on the machine.
#include <gtest/gtest.h>

#include <ATen/Parallel.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  return RUN_ALL_TESTS();
}
