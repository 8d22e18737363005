// Where the operands of a Problem are.
#pragma once

namespace ndsoftmax {

struct Addresses {
  const void* source;
  const void* grad;  // null where there is none
  void* result;
  const void* mask;  // null where there is none
  const void* bias;  // null where there is none
};

}  // namespace ndsoftmax
