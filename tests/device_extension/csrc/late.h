// A device that is late: what its parts offer each other. See ../__init__.py.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;

using Key = std::pair<int, int64_t>;  // of a stream: its device, and its number there
inline Key key_of(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

// --- races.cpp: whether operations on the same memory are ordered
using Clock = std::map<Key, uint64_t>;  // of each stream, how many of its operations come before

struct Access {  // to a part of a piece of memory
  const void* memory;  // where the piece begins
  uintptr_t begin, end;
  bool is_write;
};
using Accesses = std::vector<Access>;

void note_launch(c10::Stream stream, const std::string& name, const Accesses& accesses);
void note_host(const std::string& name, const Accesses& accesses);  // the host reads or writes at once
void note_wait(c10::Stream stream, const Clock& until);
void note_host_wait(const Clock& until);
Clock clock_of(c10::Stream stream);
Clock clock_of_device(int device);
void forget(const void* memory, const Clock& until);  // what came before: the memory has a new use
bool is_in_use(const void* memory);  // by operations that the host has not waited for; forgets all of them
void report(const std::string& text);
std::vector<std::string> take_reports();

// --- streams.cpp: what runs when
using Sequence = uint64_t;

struct EventState {  // of one recording
  int device = 0;
  int64_t stream = 0;
  Sequence sequence = 0;
  bool done = false;
  Clock clock = {};
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

void launch(c10::Stream stream, const std::string& name, const Accesses& accesses, Work work);
Event record(c10::Stream stream);
void block(c10::Stream stream, const Event& event);
bool query(const Event& event);
bool has_happened(const Event& event);  // as `query`, for the device's own use: the host learns nothing
bool query_stream(c10::Stream stream);
void synchronize(const Event& event);
void synchronize_stream(c10::Stream stream);
void synchronize_device(int device);
void drain(int device);  // as `synchronize_device`, for the device's own use: the host learns nothing
void set_lateness(double milliseconds);

// --- memory.cpp: memory of the device, which the host cannot read
void* shadow(const void* address);  // where the device's own thread finds it
int device_of(const void* address);
c10::Allocator* device_allocator();
void record_on_stream(const c10::DataPtr& pointer, c10::Stream stream);
struct Exported {  // memory of the device, for another process
  int process, descriptor;
  size_t offset, nbytes;
};
Exported export_memory(const void* address, size_t nbytes);  // as long as it is not freed
void* import_memory(const Exported& exported, int device);  // orders nothing between the processes
void release_memory(const void* address);  // that was imported
int64_t allocated_bytes(int device);
int64_t memory_limit();
void set_memory_limit(int64_t nbytes);

// --- pinned.cpp: memory of the host that the device uses by itself
struct Pinned {
  const void* start;
  void* alias;  // where the device finds the address
  bool is_registered;  // by `register_host`; otherwise torch has allocated it
};
struct Closed {
  uintptr_t begin, end;
  bool is_write;
};
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
std::optional<Pinned> find_pinned(const void* address);
void register_host(uintptr_t address, size_t nbytes);
void unregister_host(uintptr_t address);
void close_pages(const void* memory, const std::vector<Closed>& parts);

}  // namespace late
