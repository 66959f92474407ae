// What parts of the late device offer each other that knows tensors.
#pragma once

#include "late.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace late {

// --- operators.cpp
Access access_to(const at::Tensor& tensor, bool is_write);

// --- guard.cpp
at::Generator& generator_of(int device);
void seed_all(uint64_t seed);
uint64_t next_seed(int device, std::optional<at::Generator> generator);  // of one operation that draws numbers

}  // namespace late
