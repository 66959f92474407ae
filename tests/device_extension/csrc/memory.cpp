// Memory. The device's lies in a file without a name that is mapped twice: tensors have the addresses of a mapping that
// nobody may read (a host that tries dies by SIGSEGV), the device's thread uses the other one.

#include "late.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace late {
namespace {

constexpr size_t kDeviceBytes = size_t(8) << 30;  // addresses, not memory
constexpr size_t kGrain = 512, kPage = 4096;

struct Block {
  char* address;
  size_t nbytes;
  int device;
  int64_t stream;  // whose work may use it again at once after it was freed
  std::set<int64_t> users;  // other streams that used it
  std::vector<Event> others;  // after which they are past it, once it was freed
};

bool poisons() {
  static bool poisons = std::getenv("LATE_POISON") == nullptr || std::string(std::getenv("LATE_POISON")) != "0";
  return poisons;
}

c10::Stream stream_of(int device, int64_t stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), stream);
}

// What is used again is overwritten, in the order of its stream.
void poison(const Block& block, char* address) {
  auto begin = reinterpret_cast<uintptr_t>(block.address);
  launch(stream_of(block.device, block.stream), "allocation", {{block.address, begin, begin + block.nbytes, true}},
      [address, nbytes = block.nbytes] {
        if (poisons()) std::memset(address, 0xff, nbytes);  // NaN in each type of floating point
        return true;
      });
}

class Memory {
 public:
  Memory() {
    size_t total = kDeviceBytes * device_count();
    descriptor = memfd_create("late-device", MFD_CLOEXEC);
    TORCH_CHECK(descriptor >= 0 && ftruncate(descriptor, total) == 0, "no memory for the late device");
    base = static_cast<char*>(mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    other = static_cast<char*>(mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0));
    TORCH_CHECK(base != MAP_FAILED && other != MAP_FAILED, "no addresses for the late device");
  }

  Block* take(size_t nbytes, int device, int64_t stream) {
    nbytes = (std::max<size_t>(nbytes, 1) + kGrain - 1) / kGrain * kGrain;
    std::unique_lock lock(mutex_);
    settle();
    auto& free = free_[{device, stream, nbytes}];
    if (!free.empty()) {
      Block* block = free.back();
      free.pop_back();
      used[device] += nbytes;
      poison(*block, other + (block->address - base));
      return block;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, used[device] + nbytes <= limit && next_[device] + nbytes <= kDeviceBytes,
        "late device ", device, " out of memory: ", used[device], " bytes are in use");
    Block* block = new Block{base + kDeviceBytes * device + next_[device], nbytes, device, stream, {}};
    next_[device] += nbytes;
    used[device] += nbytes;
    blocks_[block->address] = block;
    return block;
  }

  void give_back(Block* block) {
    std::unique_lock lock(mutex_);
    used[block->device] -= block->nbytes;
    for (int64_t stream : block->users) block->others.push_back(record(stream_of(block->device, stream)));
    block->users.clear();
    if (block->others.empty())
      free(block);
    else
      waiting_.push_back(block);
  }

  void used_by(const void* address, c10::Stream stream) {
    std::unique_lock lock(mutex_);
    auto found = blocks_.find(const_cast<void*>(address));
    if (found != blocks_.end() && stream.id() != found->second->stream) found->second->users.insert(stream.id());
  }

  // Where the memory lies in this process's file, for another process.
  Exported exported(const void* address, size_t nbytes) {
    return {getpid(), descriptor, static_cast<size_t>(static_cast<const char*>(address) - base), nbytes};
  }

  // Map a part of another process's file at addresses of this one's device that nothing else gets.
  void* import(const Exported& memory, int device) {
    auto path = "/proc/" + std::to_string(memory.process) + "/fd/" + std::to_string(memory.descriptor);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(file >= 0, "process ", memory.process, ", whose memory was exported, is gone");
    size_t first = memory.offset / kPage * kPage, nbytes = memory.offset - first + memory.nbytes;
    nbytes = (nbytes + kPage - 1) / kPage * kPage;
    std::unique_lock lock(mutex_);
    size_t place = kDeviceBytes * device + (next_[device] + kPage - 1) / kPage * kPage;
    next_[device] = place - kDeviceBytes * device + nbytes;
    void* mapped = mmap(other + place, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, first);
    close(file);
    TORCH_CHECK(mapped != MAP_FAILED, "the exported memory cannot be mapped");
    return base + place + (memory.offset - first);
  }

  int descriptor;
  char *base, *other;
  std::map<int, size_t> used;
  size_t limit = kDeviceBytes;

 private:
  void free(Block* block) {
    free_[{block->device, block->stream, block->nbytes}].push_back(block);
  }

  // Freed memory that other streams used can be used again once they are past that.
  void settle() {
    for (size_t index = 0; index < waiting_.size();) {
      Block* block = waiting_[index];
      bool over = true;
      for (Event& event : block->others) over = over && has_happened(event);
      if (!over) {
        ++index;
        continue;
      }
      for (Event& event : block->others) forget(block->address, event->clock);
      block->others.clear();
      free(block);
      waiting_.erase(waiting_.begin() + index);
    }
  }

  std::mutex mutex_;
  std::map<int, size_t> next_;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free_;
  std::unordered_map<void*, Block*> blocks_;
  std::vector<Block*> waiting_;
};

Memory& memory() {
  static Memory* one = new Memory();
  return *one;
}

void free_device(void* context) { memory().give_back(static_cast<Block*>(context)); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device();
    c10::Device place(kType, device);
    if (nbytes == 0) return {nullptr, nullptr, &free_device, place};
    Block* block = memory().take(nbytes, device, current_stream(device).id());
    return {block->address, block, &free_device, place};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    auto reads = reinterpret_cast<uintptr_t>(from), writes = reinterpret_cast<uintptr_t>(to);
    Accesses accesses{{from, reads, reads + count, false}, {to, writes, writes + count, true}};
    launch(current_stream(-1), "resize", accesses, [=] {
      std::memcpy(shadow(to), shadow(from), count);
      return true;
    });
  }
};

}  // namespace

void* shadow(const void* address) {
  if (address == nullptr) return nullptr;
  return memory().other + (static_cast<const char*>(address) - memory().base);
}
int device_of(const void* address) { return (static_cast<const char*>(address) - memory().base) / kDeviceBytes; }
c10::Allocator* device_allocator() {
  static DeviceAllocator one;
  return &one;
}
void record_on_stream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (pointer.get() != nullptr) memory().used_by(pointer.get(), stream);
}
Exported export_memory(const void* address, size_t nbytes) { return memory().exported(address, nbytes); }
void* import_memory(const Exported& exported, int device) { return memory().import(exported, device); }
void release_memory(const void* address) {
  // The mapping stays until the process ends: work on a stream may still use it.
  if (is_in_use(address)) report("imported memory is released while the device still uses it");
}
int64_t allocated_bytes(int device) { return memory().used[device]; }
int64_t memory_limit() { return memory().limit; }
void set_memory_limit(int64_t nbytes) { memory().limit = nbytes; }

namespace {
struct Registered {
  Registered() { c10::SetAllocator(kType, device_allocator()); }
} registered;
}  // namespace
}  // namespace late
