// keepstep_ext: what Keepstep needs inside the training process and cannot say in Python.
//
// SoloBackend    one rank of a real job, alone: the real rank and size, every operation complete
//                when it returns, futures carrying the tensors. A rank whose peers are gone keeps
//                its groups usable, and a newcomer builds and warms up its model before it has any
//                peer. Values from other ranks are invented (own input, or zeros): nothing that is
//                computed in solo mode survives.
// replace_backend  swaps the Backend inside a ProcessGroup in place. DDP's reducer, FSDP and
//                DeviceMesh hold the ProcessGroup, so none of them has to know. c10d offers no such
//                call (setBackend keeps an existing entry), hence the access to private members.
// reducer_*      whether DDP's reducer has recorded the order for its one bucket rebuild.
// get_buckets    which parameters are in which of a reducer's buckets.
// set_buckets    gives a reducer the buckets that its peers have.
// restart_static_graph  makes the next backward of a reducer its first.
// viewed_grads   which gradients are views of a reducer's buckets; view_grads makes them so.
// Sender         a thread that hashes memory and sends it to a vault without the interpreter.
// note_waits, end_waits  see gloo_waits.cpp.
//
// Only pybind11 and c10d headers are included: torch/extension.h doubles the build time.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "digests.h"
#include "gloo_waits.h"
#include "numbers.h"
#include "samples.h"
#include "sender.h"

// The holder that torch's own bindings use; the declaration must be equal to theirs.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace py = pybind11;

namespace keepstep {

using c10d::Backend;
using c10d::OpType;
using c10d::ProcessGroup;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class SoloWork : public c10d::Work {
 public:
  SoloWork(int rank, OpType op, Tensors result) : Work(rank, op), result_(std::move(result)) {
    std::vector<c10::Device> devices;
    for (const auto& tensor : result_) {
      const auto device = tensor.device();
      if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
        devices.push_back(device);
      }
    }
    // DDP's hooks demand a list of tensors from the future; torch's own fake group dies on that.
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    future_->markCompleted(c10::IValue(result_));
    completed_ = true;
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  int sourceRank() const override { return rank_; }
  Tensors result() override { return result_; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class SoloBackend : public Backend {
 public:
  SoloBackend(int rank, int size, std::string name, c10::intrusive_ptr<Options> options)
      : Backend(rank, size),
        name_(name),
        options_(options ? std::move(options) : c10::make_intrusive<Options>(std::move(name))) {}

  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds) override {}
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(OpType::COALESCED, {}); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return done(OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done(OpType::ALLREDUCE, tensors);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done(OpType::_ALLREDUCE_SPARSE, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return done(OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return done(OpType::REDUCE, tensors);
  }

  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    at::AutoDispatchBelowAutograd guard;
    Tensors flat;
    for (size_t i = 0; i < out.size(); ++i) {
      for (auto& slot : out[i]) {
        slot.copy_(in[i]);
        flat.push_back(slot);
      }
    }
    return done(OpType::ALLGATHER, std::move(flat));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    fill(out, in);
    return done(OpType::_ALLGATHER_BASE, {out});
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    at::AutoDispatchBelowAutograd guard;
    Tensors flat;
    for (auto& list : out) {
      for (size_t i = 0; i < list.size(); ++i) {
        list[i].copy_(in[i]);
        flat.push_back(list[i]);
      }
    }
    return done(OpType::ALLGATHER_COALESCED, std::move(flat));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&)
      override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill(out[i], in[i]);
    }
    return done(OpType::ALLGATHER_COALESCED, out);
  }

  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& opts) override {
    at::AutoDispatchBelowAutograd guard;
    Tensors flat;
    if (rank_ == opts.rootRank) {
      for (auto& slot : out[0]) {
        slot.copy_(in[0]);
        flat.push_back(slot);
      }
    }
    return done(OpType::GATHER, std::move(flat));
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& opts) override {
    at::AutoDispatchBelowAutograd guard;
    if (rank_ == opts.rootRank) {
      out[0].copy_(in[0][rank_]);
    } else {
      out[0].zero_();
    }
    return done(OpType::SCATTER, out);
  }

  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions&) override {
    at::AutoDispatchBelowAutograd guard;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i].copy_(in[i][rank_]);
    }
    return done(OpType::REDUCE_SCATTER, out);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&)
      override {
    slice(out, in);
    return done(OpType::_REDUCE_SCATTER_BASE, {out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      slice(out[i], in[i]);
    }
    return done(OpType::REDUCE_SCATTER, out);
  }

  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    at::AutoDispatchBelowAutograd guard;
    if (out.numel() == in.numel()) {
      out.view({-1}).copy_(in.reshape({-1}));
    } else {
      out.zero_();
    }
    return done(OpType::ALLTOALL_BASE, {out});
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions&) override {
    at::AutoDispatchBelowAutograd guard;
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i].sizes() == in[i].sizes()) {
        out[i].copy_(in[i]);
      } else {
        out[i].zero_();
      }
    }
    return done(OpType::ALLTOALL, out);
  }

  WorkPtr send(Tensors& tensors, int, int) override { return done(OpType::SEND, tensors); }
  WorkPtr recv(Tensors& tensors, int, int) override {
    zero(tensors);
    return done(OpType::RECV, tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int) override {
    zero(tensors);
    return done(OpType::RECVANYSOURCE, tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(OpType::BARRIER, {}); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void waitForPendingWorks() override {}
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  uint64_t operations() const { return operations_; }

 private:
  WorkPtr done(OpType op, Tensors result) {
    ++operations_;
    return c10::make_intrusive<SoloWork>(rank_, op, std::move(result));
  }
  // Every rank's slot gets this rank's input.
  void fill(at::Tensor& out, const at::Tensor& in) const {
    at::AutoDispatchBelowAutograd guard;
    auto slots = out.view({size_, -1});
    slots.copy_(in.reshape({1, -1}).expand_as(slots));
  }
  // This rank's slice, unreduced.
  void slice(at::Tensor& out, const at::Tensor& in) const {
    at::AutoDispatchBelowAutograd guard;
    out.view({-1}).copy_(in.reshape({size_, -1}).select(0, rank_));
  }
  static void zero(Tensors& tensors) {
    at::AutoDispatchBelowAutograd guard;
    for (auto& tensor : tensors) {
      tensor.zero_();
    }
  }

  std::string name_;
  uint64_t operations_ = 0;
  c10::intrusive_ptr<Options> options_;
};

// An explicit instantiation may name private members; the friend hands the pointer out.
template <class Tag, typename Tag::type Member>
struct Expose {
  friend typename Tag::type member(Tag) { return Member; }
};
struct ByType {
  using type =
      std::unordered_map<ProcessGroup::BackendType, c10::intrusive_ptr<Backend>> ProcessGroup::*;
  friend type member(ByType);
};
struct ByDevice {
  using type = std::unordered_map<c10::DeviceType, c10::intrusive_ptr<Backend>> ProcessGroup::*;
  friend type member(ByDevice);
};
struct GroupStore {
  using type = c10::intrusive_ptr<c10d::Store> ProcessGroup::*;
  friend type member(GroupStore);
};
struct RebuiltParams {
  using type = std::vector<at::Tensor> c10d::Reducer::*;
  friend type member(RebuiltParams);
};
struct Params {
  using type = const std::vector<at::Tensor> c10d::Reducer::*;
  friend type member(Params);
};
struct Backwards {
  using type = long c10d::Reducer::*;
  friend type member(Backwards);
};
struct HookCounts {
  using type = std::unordered_map<size_t, int> c10d::Reducer::*;
  friend type member(HookCounts);
};
struct BucketCache {
  using type = std::unordered_map<size_t, std::vector<at::Tensor>> c10d::Reducer::*;
  friend type member(BucketCache);
};
// The type of a bucket is private too, so this member's type cannot be written down.
template <typename Tag, auto Member>
struct ExposeUnnamed {
  friend auto member(Tag) { return Member; }
};
struct Buckets {
  friend auto member(Buckets);
};
template struct ExposeUnnamed<Buckets, &c10d::Reducer::buckets_>;
template struct Expose<BucketCache, &c10d::Reducer::cached_variables_for_bucket_>;
template struct Expose<ByType, &ProcessGroup::backendTypeToBackend_>;
template struct Expose<ByDevice, &ProcessGroup::deviceTypeToBackend_>;
template struct Expose<GroupStore, &ProcessGroup::store_>;
template struct Expose<RebuiltParams, &c10d::Reducer::rebuilt_params_>;
template struct Expose<Params, &c10d::Reducer::params_>;
template struct Expose<Backwards, &c10d::Reducer::num_bwd_calls_>;
template struct Expose<HookCounts, &c10d::Reducer::numGradHooksTriggeredMap_>;

std::vector<std::pair<ProcessGroup::BackendType, c10::intrusive_ptr<Backend>>> backends(
    ProcessGroup& group) {
  const auto& by_type = group.*member(ByType());
  return {by_type.begin(), by_type.end()};
}

c10::intrusive_ptr<Backend> replace_backend(
    ProcessGroup& group, ProcessGroup::BackendType type, const c10::intrusive_ptr<Backend>& fresh) {
  auto& by_type = group.*member(ByType());
  auto found = by_type.find(type);
  TORCH_CHECK(found != by_type.end(), "the group has no backend of this type");
  auto old = found->second;
  TORCH_CHECK(
      old->getRank() == fresh->getRank() && old->getSize() == fresh->getSize(),
      "rank and size of a group never change");
  fresh->setBoundDeviceId(old->getBoundDeviceId());
  found->second = fresh;
  for (auto& entry : group.*member(ByDevice())) {
    if (entry.second == old) {
      entry.second = fresh;
    }
  }
  return old;
}

void replace_store(ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store) {
  group.*member(GroupStore()) = store;
}

// Indices of the parameters in each bucket. (The public way to look at buckets allocates and zeroes
// memory as large as all gradients.)
std::vector<std::vector<size_t>> get_buckets(const c10d::Reducer& reducer) {
  std::vector<std::vector<size_t>> found;
  for (const auto& bucket : reducer.*member(Buckets())) {
    found.push_back(bucket.variable_indices);
  }
  return found;
}

// Only between a reset and the next forward: the reducer must not be waiting for gradients.
void set_buckets(c10d::Reducer& reducer, std::vector<std::vector<size_t>> buckets) {
  reducer.initialize_buckets(std::move(buckets));
  (reducer.*member(BucketCache())).clear();
}

// With static_graph the first backward of a reducer is special: it counts the hooks of every
// parameter. One that was interrupted has to be the first again.
void restart_static_graph(c10d::Reducer& reducer) {
  reducer.*member(Backwards()) = 0;
  (reducer.*member(HookCounts())).clear();
}

// Parameters whose gradient is a view of its bucket (gradient_as_bucket_view, after a backward). DDP
// divides such a gradient in place and multiplies any other by the reciprocal on its way into the
// bucket; the results can differ in the last bit.
std::vector<size_t> viewed_grads(const c10d::Reducer& reducer) {
  std::vector<size_t> found;
  for (const auto& bucket : reducer.*member(Buckets())) {
    for (size_t i = 0; i < bucket.bucket_views_in.size(); ++i) {
      const auto& grad = bucket.variables[i].grad();
      if (grad.defined() && grad.is_alias_of(bucket.bucket_views_in[i])) {
        found.push_back(bucket.variable_indices[i]);
      }
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Makes these gradients views, with zeros in them.
void view_grads(c10d::Reducer& reducer, const std::vector<size_t>& wanted) {
  for (auto& bucket : reducer.*member(Buckets())) {
    for (size_t i = 0; i < bucket.bucket_views_in.size(); ++i) {
      if (std::binary_search(wanted.begin(), wanted.end(), bucket.variable_indices[i])) {
        bucket.bucket_views_in[i].zero_();
        bucket.variables[i].mutable_grad() = bucket.bucket_views_in[i];
      }
    }
  }
}

// Python's memory. Whoever calls keeps it as long as it is used.
std::vector<iovec> pieces_of(const py::list& views) {
  std::vector<iovec> found;
  found.reserve(views.size());
  for (const auto& one : views) {
    Py_buffer view;
    if (PyObject_GetBuffer(one.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    found.push_back({view.buf, static_cast<size_t>(view.len)});
    PyBuffer_Release(&view);
  }
  return found;
}

uint64_t put(Sender& sender, const std::string& header, const py::list& views) {
  return sender.put({header, pieces_of(views)});
}

// What Python sends, header by header with the memory that follows it.
Sender::Instead sending(const py::object& function) {
  if (function.is_none()) return {};
  return [function](const std::vector<Sender::Item>& batch) {
    const py::gil_scoped_acquire interpreter;
    try {
      py::list said;
      for (const auto& item : batch) {
        py::list views;
        for (const auto& [at, size] : item.pieces) {
          views.append(py::memoryview::from_memory(static_cast<const void*>(at), size));
        }
        said.append(py::make_tuple(py::bytes(item.header), views));
      }
      return function(said).cast<bool>();
    } catch (const std::exception&) {
      return false;
    }
  };
}

struct EndSender {
  void operator()(Sender* sender) const {
    {
      const py::gil_scoped_release others;  // it may wait for the interpreter
      sender->close();
    }
    if (sender->ours()) delete sender;
  }
};

}  // namespace keepstep

PYBIND11_MODULE(keepstep_ext, m) {
  using namespace keepstep;
  py::module_::import("torch._C._distributed_c10d");
  py::class_<SoloBackend, Backend, c10::intrusive_ptr<SoloBackend>>(m, "SoloBackend")
      // Options of another backend (NCCL's), which the real one that follows takes over.
      .def(py::init([](int rank, int size, std::string name, const py::object& options) {
        auto given = options.is_none() ? c10::intrusive_ptr<Backend::Options>()
                                       : options.cast<c10::intrusive_ptr<Backend::Options>>();
        return c10::make_intrusive<SoloBackend>(rank, size, std::move(name), std::move(given));
      }))
      // init_process_group writes into backend.options
      .def_property_readonly("options", &SoloBackend::getBackendOptions)
      .def_property_readonly("operations", &SoloBackend::operations);
  m.def("backends", &backends);
  m.def("replace_backend", &replace_backend);
  m.def("replace_store", &replace_store);
  m.def("use_count", [](Backend& backend) {
    // Reclaiming takes a reference of its own.
    return c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(&backend).use_count() - 1;
  });
  m.def("note_waits", &note_waits);
  m.def("end_waits", &end_waits, py::call_guard<py::gil_scoped_release>());
  m.def("numbers", &numbers, py::call_guard<py::gil_scoped_release>());
  m.def("can_digest", &can_digest);
  m.def("sampled", [](const py::list& tensors, const py::list& parts, size_t count, bool places) {
    const auto found = sampled(tensors.ptr(), parts.ptr(), count, places);
    return py::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(Sample));
  });
  py::class_<Sender, std::unique_ptr<Sender, EndSender>>(m, "Sender")
      .def(py::init([](int socket, double silence_s, size_t batch_bytes, uint64_t last,
                       const py::object& instead) {
        return new Sender(socket, silence_s, batch_bytes, last, sending(instead));
      }))
      .def("put", &put)
      .def("wait_read", &Sender::wait_read, py::call_guard<py::gil_scoped_release>())
      .def("close", &Sender::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("read", &Sender::read)
      .def_property_readonly("failed", &Sender::failed)
      .def_property_readonly("error", &Sender::error);
  m.def("get_buckets", &get_buckets);
  m.def("set_buckets", &set_buckets);
  m.def("restart_static_graph", &restart_static_graph);
  m.def("viewed_grads", &viewed_grads);
  m.def("view_grads", &view_grads);
  m.def("reducer_size", [](c10d::Reducer& r) { return (r.*member(Params())).size(); });
  m.def("reducer_pending", [](c10d::Reducer& r) { return (r.*member(RebuiltParams())).size(); });
  m.def("reducer_should_rebuild", [](c10d::Reducer& r) { return r.should_rebuild_buckets(); });
}
