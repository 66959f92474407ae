// What torch asks of a kind of device: guards, streams, events, generators, hooks.

#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    if (device.index() >= 0) set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = late::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) late::block(stream, *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(*static_cast<Event*>(event));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_on_stream(pointer, stream);
  }
};

// A seed and a count of the operations that drew from it: the host knows at launch what an operation will draw.
struct LateGenerator final : c10::GeneratorImpl {
  explicit LateGenerator(int device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto* words = static_cast<const uint64_t*>(state.data());
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "not a generator's state");
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::kByte);
    auto* words = reinterpret_cast<uint64_t*>(state.data_ptr<uint8_t>());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new LateGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  static c10::DeviceType device_type() { return kType; }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

std::vector<at::Generator>& generators() {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int device = 0; device < device_count(); ++device) made->push_back(at::make_generator<LateGenerator>(device));
    return made;
  }();
  return *all;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generators().at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<LateGenerator>(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DataPtr fresh = device_allocator()->allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) device_allocator()->copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registered;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

at::Generator& generator_of(int device) { return generators().at(device); }

void seed_all(uint64_t seed) {
  for (at::Generator& generator : generators()) generator.set_current_seed(seed);
}

uint64_t next_seed(int device, std::optional<at::Generator> given) {
  at::Generator generator = given ? *given : generators().at(device);
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 1);
  return generator.current_seed() * 6364136223846793005u + offset * 1442695040888963407u + 1;
}

}  // namespace late
