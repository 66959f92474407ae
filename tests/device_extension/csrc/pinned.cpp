// Memory of the host that the device reads and writes by itself, through a mapping of its own.
//
// From the launch of a copy until the host has waited for it, the host's pages are closed: the host that touches them
// all the same is reported, and goes on.

#include "late.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <signal.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

namespace late {
namespace {

constexpr uintptr_t kPage = 4096;

struct Range {
  size_t nbytes;
  char* alias;
  bool is_registered;
};

std::mutex mutex;
std::map<uintptr_t, Range> ranges;
struct sigaction before;

uintptr_t up(uintptr_t address) { return (address + kPage - 1) / kPage * kPage; }
uintptr_t down(uintptr_t address) { return address / kPage * kPage; }

std::map<uintptr_t, Range>::iterator find(uintptr_t address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return ranges.end();
  auto found = std::prev(after);
  return address < found->first + found->second.nbytes ? found : ranges.end();
}

void open_pages(uintptr_t start, const Range& range) {
  mprotect(reinterpret_cast<void*>(start), up(range.nbytes), PROT_READ | PROT_WRITE);
}

void on_fault(int number, siginfo_t* info, void* context) {
  {
    std::unique_lock lock(mutex);
    auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    auto found = info->si_code == SEGV_ACCERR ? find(address) : ranges.end();
    if (found != ranges.end()) {
      open_pages(found->first, found->second);
      report(
          "the host uses byte " + std::to_string(address - found->first) + " of " + std::to_string(found->second.nbytes) +
          " bytes of pinned memory that the device still uses");
      return;
    }
  }
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(number);
  else
    signal(number, SIG_DFL);  // and again
}

void add(uintptr_t start, size_t nbytes, bool is_registered) {
  TORCH_CHECK(start % kPage == 0, "the late device registers whole pages");
  // A size of 0: one more mapping of the same pages, which have to be shared memory.
  void* alias = mremap(reinterpret_cast<void*>(start), 0, up(nbytes), MREMAP_MAYMOVE);
  TORCH_CHECK(alias != MAP_FAILED, "the late device registers shared memory only");
  std::unique_lock lock(mutex);
  TORCH_CHECK(
      ranges.emplace(start, Range{nbytes, static_cast<char*>(alias), is_registered}).second,
      "this memory is registered already");
}

void remove(uintptr_t start) {
  bool is_used = is_in_use(reinterpret_cast<void*>(start));
  std::unique_lock lock(mutex);
  auto found = ranges.find(start);
  TORCH_CHECK(found != ranges.end(), "this memory is not registered");
  // Memory that torch has pinned is kept until copies are over.
  if (is_used && found->second.is_registered) report("registered memory is given up while the device still uses it");
  open_pages(start, found->second);
  // Its alias stays mapped: work on a stream may still use it.
  ranges.erase(found);
}

size_t size_of(uintptr_t start) {
  std::unique_lock lock(mutex);
  return ranges.at(start).nbytes;
}

void free_pinned(void* address) {
  size_t nbytes = size_of(reinterpret_cast<uintptr_t>(address));
  remove(reinterpret_cast<uintptr_t>(address));
  munmap(address, up(nbytes));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, [](void*) {}, c10::Device(c10::kCPU)};
    void* address = mmap(nullptr, up(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "no host memory");
    add(reinterpret_cast<uintptr_t>(address), nbytes, false);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

struct Installed {
  Installed() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
  }
} installed;

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator one;
  return &one;
}

std::optional<Pinned> find_pinned(const void* address) {
  std::unique_lock lock(mutex);
  auto found = find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.end()) return std::nullopt;
  auto start = reinterpret_cast<char*>(found->first);
  return Pinned{start, found->second.alias + (static_cast<const char*>(address) - start), found->second.is_registered};
}

bool is_pinned(const void* address) { return find_pinned(address).has_value(); }

void close_pages(const void* memory, const std::vector<Closed>& parts) {
  std::unique_lock lock(mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(memory));
  if (found == ranges.end()) return;
  open_pages(found->first, found->second);
  for (bool writes : {false, true})  // what is written may not be read either
    for (const Closed& part : parts)
      if (part.is_write == writes && up(part.begin) < down(part.end))
        mprotect(reinterpret_cast<void*>(up(part.begin)), down(part.end) - up(part.begin), writes ? PROT_NONE : PROT_READ);
}

void register_host(uintptr_t address, size_t nbytes) { add(address, nbytes, true); }
void unregister_host(uintptr_t address) { remove(address); }

}  // namespace late
