// A device that is late: what its parts offer each other. See ../__init__.py.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// --- streams.cpp: what runs when
using Sequence = uint64_t;

struct EventState {  // of one recording
  int device = 0;
  int64_t stream = 0;
  Sequence sequence = 0;
  bool done = false;
};
using Event = std::shared_ptr<EventState>;

// A piece of work. Called until it returns true; false: it waits for another process.
using Work = std::function<bool()>;

int device_count();
int current_device();
void set_device(int device);
c10::Stream current_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream(int device);
c10::Stream new_stream(int device);

void launch(c10::Stream stream, Work work);
Event record(c10::Stream stream);
void block(c10::Stream stream, const Event& event);
bool query(const Event& event);
bool query_stream(c10::Stream stream);
void synchronize(const Event& event);
void synchronize_stream(c10::Stream stream);
void synchronize_device(int device);
void set_lateness(double milliseconds);

// --- memory.cpp: memory of the device, which the host cannot read; pinned memory of the host
void* shadow(const void* address);  // where the device's own thread finds it
int device_of(const void* address);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address, bool* is_registered = nullptr);
void register_host(uintptr_t address, size_t nbytes);
void unregister_host(uintptr_t address);
void record_on_stream(const c10::DataPtr& pointer, c10::Stream stream);
int64_t allocated_bytes(int device);
void set_memory_limit(int64_t nbytes);

// --- guard.cpp
at::Generator& generator_of(int device);
void seed_all(uint64_t seed);
uint64_t next_seed(int device, std::optional<at::Generator> generator);  // of one operation that draws numbers

}  // namespace late
