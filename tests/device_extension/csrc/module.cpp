// What Python sees of the late device.

#include "tensors.h"

#include <ATen/ATen.h>

#include <torch/csrc/utils/pybind.h>

namespace late {
void bind_collectives(py::module& module);
}

PYBIND11_MODULE(_late, module) {
  using released = py::call_guard<py::gil_scoped_release>;
  module.def("device_count", &late::device_count);
  module.def("current_device", &late::current_device);
  module.def("set_device", &late::set_device);
  module.def("synchronize", &late::synchronize_device, released());
  module.def("seed_all", &late::seed_all);
  module.def("random_state", [](int device) { return late::generator_of(device).get_state(); });
  module.def("set_random_state", [](int device, const at::Tensor& state) { late::generator_of(device).set_state(state); });
  module.def("register_host", &late::register_host);
  module.def("unregister_host", &late::unregister_host);
  module.def("races", &late::take_reports);
  module.def("export_memory", [](const at::Tensor& tensor) {
    auto exported = late::export_memory(tensor.data_ptr(), tensor.nbytes());
    return std::tuple(exported.process, exported.descriptor, exported.offset, exported.nbytes);
  });
  module.def("import_memory", [](std::tuple<int, int, size_t, size_t> handle, int device) {
    auto [process, descriptor, offset, nbytes] = handle;
    void* address = late::import_memory({process, descriptor, offset, nbytes}, device);
    auto options = at::TensorOptions().dtype(at::kByte).device(c10::Device(late::kType, device));
    return at::from_blob(address, {static_cast<int64_t>(nbytes)}, [](void* place) { late::release_memory(place); }, options);
  });
  module.def("allocated_bytes", &late::allocated_bytes);
  module.def("memory_limit", &late::memory_limit);
  module.def("set_memory_limit", &late::set_memory_limit);
  module.def("set_lateness", &late::set_lateness);
  late::bind_collectives(module);
}
