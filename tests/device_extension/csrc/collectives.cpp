// Collectives that behave as NCCL's: asynchronous on a stream of their own, and silent when a peer is gone.
//
// Each rank has a piece of shared memory into which it alone writes: the number of its newest operation, and the input
// of that one and the one before. Every rank reads what it needs from all of them. Nothing notices the end of a
// process, so an operation with a lost peer never ends, until `abort`.

#include "tensors.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

namespace late {
namespace {

constexpr size_t kSlotBytes = size_t(1) << 30;  // addresses, not memory
constexpr size_t kHeaderBytes = 4096;

struct Header {
  std::atomic<uint64_t> posted;  // operations whose input lies in a slot
  std::atomic<uint64_t> read;    // operations whose inputs of other ranks this rank needs no more
};

struct Peer {
  char* address;
  Header& header() const { return *reinterpret_cast<Header*>(address); }
  char* slot(uint64_t operation) const { return address + kHeaderBytes + (operation % 2) * kSlotBytes; }
};

char* map(int descriptor) {
  size_t nbytes = kHeaderBytes + 2 * kSlotBytes;
  void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  TORCH_CHECK(address != MAP_FAILED, "no addresses for a communicator");
  return static_cast<char*>(address);
}

struct Shared {  // outlives the backend: work on the stream may still use it
  std::vector<Peer> peers;
  std::atomic<bool> is_aborted{false};
  ~Shared() {
    for (Peer& peer : peers) munmap(peer.address, kHeaderBytes + 2 * kSlotBytes);
  }
};

struct LateWork final : c10d::Work {
  LateWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Stream stream, std::shared_ptr<Shared> shared)
      : Work(rank, type), outputs_(std::move(outputs)), stream_(stream), end_(record(stream)), shared_(std::move(shared)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return query(end_); }
  bool isSuccess() const override { return query(end_) && !shared_->is_aborted; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    TORCH_CHECK(!shared_->is_aborted, "the communicator was aborted");
    block(current_stream(stream_.device_index()), end_);
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::Stream stream_;
  Event end_;
  std::shared_ptr<Shared> shared_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor alias(void* address, const at::Tensor& like) {
  return at::from_blob(address, like.sizes(), at::TensorOptions().dtype(like.dtype()));
}

void reduce_into(at::Tensor sum, const std::vector<at::Tensor>& values, c10d::ReduceOp::RedOpType kind) {
  at::Tensor total = values[0].clone();
  for (size_t rank = 1; rank < values.size(); ++rank) switch (kind) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG: total.add_(values[rank]); break;
      case c10d::ReduceOp::PRODUCT: total.mul_(values[rank]); break;
      case c10d::ReduceOp::MIN: total = at::minimum(total, values[rank]); break;
      case c10d::ReduceOp::MAX: total = at::maximum(total, values[rank]); break;
      case c10d::ReduceOp::BAND: total.bitwise_and_(values[rank]); break;
      case c10d::ReduceOp::BOR: total.bitwise_or_(values[rank]); break;
      case c10d::ReduceOp::BXOR: total.bitwise_xor_(values[rank]); break;
      default: TORCH_CHECK(false, "not a reduction of the late device");
    }
  if (kind == c10d::ReduceOp::AVG) total.div_(static_cast<double>(values.size()));
  sum.copy_(total);
}

using Tensors = std::vector<at::Tensor>;
// Given all ranks' inputs, each as one tensor of bytes, writes this rank's outputs.
using Finish = std::function<void(const std::vector<char*>&)>;

class LateBackend final : public c10d::Backend {
 public:
  LateBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : Backend(rank, size), device_(current_device()), stream_(new_stream(device_)), shared_(std::make_shared<Shared>()),
        store_(store) {
    int descriptor = memfd_create("late-communicator", MFD_CLOEXEC);
    TORCH_CHECK(descriptor >= 0 && ftruncate(descriptor, kHeaderBytes + 2 * kSlotBytes) == 0, "no shared memory");
    auto own = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor);
    store->set("late/" + std::to_string(rank), std::to_string(device_) + " " + own);
    std::vector<std::string> devices;
    for (int other = 0; other < size; ++other) {
      auto text = store->get_to_str("late/" + std::to_string(other));
      auto space = text.find(' ');
      devices.push_back(text.substr(0, space));
      int opened = other == rank ? descriptor : open(text.substr(space + 1).c_str(), O_RDWR | O_CLOEXEC);
      TORCH_CHECK(opened >= 0, "rank ", other, " of the communicator is gone");
      shared_->peers.push_back({map(opened)});
      if (other != rank) close(opened);
    }
    for (int other = 0; other < size; ++other)
      TORCH_CHECK(
          other == rank || devices[other] != devices[rank], "duplicate device: ranks ", rank, " and ", other,
          " are both on late device ", device_);
    // Others may still have to open it.
    store->add("late/opened", 1);
    if (size > 1) while (store->add("late/opened", 0) < size) usleep(1000);
    close(descriptor);
  }

  const std::string getBackendName() const override { return "late"; }
  // As NCCL's, which frees memory of the device: it waits for what hangs there, also in another communicator.
  void abort() override {
    shared_->is_aborted = true;
    drain(device_);
  }
  void shutdown() override { shared_->is_aborted = true; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto kind = options.reduceOp.op_;
    return run(c10d::OpType::ALLREDUCE, tensors, tensors, [outputs = aliases(tensors), kind](auto& inputs) {
      reduce_all(outputs, inputs, kind);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto kind = options.reduceOp.op_;
    bool is_root = options.rootRank == getRank();
    return run(c10d::OpType::REDUCE, tensors, tensors, [outputs = aliases(tensors), kind, is_root](auto& inputs) {
      if (is_root) reduce_all(outputs, inputs, kind);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto root = options.rootRank;
    return run(c10d::OpType::BROADCAST, tensors, tensors, [outputs = aliases(tensors), root](auto& inputs) {
      size_t offset = 0;
      for (const at::Tensor& output : outputs) output.copy_(alias(inputs[root] + offset, output)), offset += padded(output);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    Tensors inputs{input}, outputs{output};
    return run(c10d::OpType::_ALLGATHER_BASE, inputs, outputs, [parts = chunks(output), this](auto& given) {
      for (size_t rank = 0; rank < parts.size(); ++rank) parts[rank].copy_(alias(given[rank], parts[rank]));
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return run(c10d::OpType::ALLGATHER, inputs, outputs[0], [parts = aliases(outputs[0])](auto& given) {
      for (size_t rank = 0; rank < parts.size(); ++rank) parts[rank].copy_(alias(given[rank], parts[rank]));
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Tensors> parts;
    for (at::Tensor& output : outputs) parts.push_back(chunks(output));
    return run(c10d::OpType::ALLGATHER_COALESCED, inputs, outputs, [parts](auto& given) {
      size_t offset = 0;
      for (const Tensors& of_one : parts) {
        for (size_t rank = 0; rank < of_one.size(); ++rank)
          of_one[rank].copy_(alias(given[rank] + offset, of_one[rank]));
        offset += padded(of_one[0]);
      }
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors inputs{input}, outputs{output};
    auto kind = options.reduceOp.op_;
    size_t first = output.nbytes() * getRank();
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, inputs, outputs, [to = aliases(outputs)[0], first, kind](auto& given) {
      Tensors values;
      for (char* address : given) values.push_back(alias(address + first, to));
      reduce_into(to, values, kind);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensors tensors{at::zeros({1}, at::TensorOptions().device(c10::Device(kType, device_)))};
    auto work = allreduce(tensors, {});
    synchronize_stream(stream_);
    return work;
  }

 private:
  static size_t padded(const at::Tensor& tensor) { return (tensor.nbytes() + 63) / 64 * 64; }

  static Tensors aliases(const Tensors& tensors) {
    Tensors made;
    for (const at::Tensor& tensor : tensors)
      made.push_back(at::from_blob(
          shadow(tensor.data_ptr()), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype())));
    return made;
  }

  Tensors chunks(const at::Tensor& tensor) const {
    at::Tensor flat = at::from_blob(
        shadow(tensor.data_ptr()), {getSize(), tensor.numel() / getSize()}, at::TensorOptions().dtype(tensor.dtype()));
    return flat.unbind();
  }

  static void reduce_all(const Tensors& outputs, const std::vector<char*>& inputs, c10d::ReduceOp::RedOpType kind) {
    size_t offset = 0;
    for (const at::Tensor& output : outputs) {
      Tensors values;
      for (char* address : inputs) values.push_back(alias(address + offset, output));
      reduce_into(output, values, kind);
      offset += padded(output);
    }
  }

  c10::intrusive_ptr<c10d::Work> run(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Finish finish) {
    TORCH_CHECK(!shared_->is_aborted, "the communicator was aborted");
    size_t nbytes = 0;
    for (const at::Tensor& tensor : inputs) {
      TORCH_CHECK(tensor.device() == c10::Device(kType, device_), "a tensor that is not on late device ", device_);
      nbytes += padded(tensor);
    }
    TORCH_CHECK(nbytes <= kSlotBytes, "more than a communicator of the late device carries at once");
    block(stream_, record(current_stream(device_)));
    uint64_t number = ++operations_;
    if (number == 1) store_->add("late/used", 1);  // as NCCL, which uses the store after the group is formed
    bool is_posted = false;
    Accesses accesses;
    for (const at::Tensor& tensor : inputs) accesses.push_back(access_to(tensor, false));
    for (const at::Tensor& tensor : outputs) accesses.push_back(access_to(tensor, true));
    launch(stream_, c10d::opTypeToString(type), accesses, [shared = shared_, from = aliases(inputs), finish, number, rank = getRank(), is_posted]() mutable {
      if (shared->is_aborted) return true;
      if (!is_posted) {
        for (const Peer& peer : shared->peers)
          if (peer.header().read + 2 < number) return false;  // its slot is still read
        at::AutoDispatchBelowADInplaceOrView below;
        char* to = shared->peers[rank].slot(number);
        for (const at::Tensor& tensor : from) alias(to, tensor).copy_(tensor), to += padded(tensor);
        shared->peers[rank].header().posted = number;
        is_posted = true;
      }
      std::vector<char*> given;
      for (const Peer& peer : shared->peers) {
        if (peer.header().posted < number) return false;
        given.push_back(peer.slot(number));
      }
      at::AutoDispatchBelowADInplaceOrView below;
      finish(given);
      shared->peers[rank].header().read = number;
      return true;
    });
    for (const Tensors* tensors : {&inputs, &outputs})
      for (const at::Tensor& tensor : *tensors) record_on_stream(tensor.storage().data_ptr(), stream_);
    return c10::make_intrusive<LateWork>(getRank(), type, outputs, stream_, shared_);
  }

  int device_;
  c10::Stream stream_;
  std::shared_ptr<Shared> shared_;
  c10::intrusive_ptr<c10d::Store> store_;
  uint64_t operations_ = 0;
};

}  // namespace

void bind_collectives(py::module& module) {
  py::class_<LateBackend, c10d::Backend, c10::intrusive_ptr<LateBackend>>(module, "LateBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
             py::gil_scoped_release released;
             return c10::make_intrusive<LateBackend>(store, rank, size);
           }));
}

}  // namespace late
