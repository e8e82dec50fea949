// A backend of torch.distributed for the fake device: gloo, in streams of its own. What a kernel or a
// copy writes later is sent as it is then, so that a missing wait is seen on the other rank.
#include "device.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <set>
#include <sstream>
#include <thread>

namespace fake {

at::Tensor over_streams(const at::Tensor& t);  // of operators.cpp

namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Started = c10::intrusive_ptr<Work>;

struct StreamWork final : Work {
  SharedEvent event = std::make_shared<Event>();
  c10::DeviceIndex device;
  Tensors kept;  // until a stream waits, as NCCL's

  StreamWork(c10::DeviceIndex device, Tensors kept) : device(device), kept(std::move(kept)) {}
  bool isCompleted() override { return query(event); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    block(event, current_stream(device));
    kept.clear();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) fake::synchronize(event);  // blocks the host, as that of NCCL
    return true;
  }
};

class FakeBackend final : public Backend {
 public:
  FakeBackend(c10::intrusive_ptr<Backend> inner, const std::string& faults, double link)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), link_(link) {
    std::istringstream words(faults);
    for (std::string word; words >> word;) faults_.insert(word);
  }

  const std::string getBackendName() const override { return "fakeccl"; }
  bool supportsCoalescing() const override { return has("coalescing"); }
  void startCoalescing() override { TORCH_CHECK(has("coalescing"), "no coalesced calls"); }
  Started endCoalescing() override {
    return c10::make_intrusive<StreamWork>(current_device(), Tensors());
  }
  void setTimeout(std::chrono::milliseconds) override {}

  Started send(Tensors& tensors, int to, int tag) override {
    return start("to", to, tensors, [this, to, tag](Tensors& t) {
      std::this_thread::sleep_for(std::chrono::duration<double>(link_));
      return inner_->send(t, to, tags(tag));
    });
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    return start("from", from, tensors,
                 [this, from, tag](Tensors& t) { return inner_->recv(t, from, tags(tag)); });
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start("all", 0, tensors,
                 [this, options](Tensors& t) { return inner_->broadcast(t, options); });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto mine = options;
    using Op = c10d::ReduceOp::RedOpType;
    const auto op = Op(options.reduceOp.op_);
    TORCH_CHECK(op != Op::AVG || !has("no-avg"), "AVG is not supported");
    TORCH_CHECK((op != Op::MAX && op != Op::MIN) || !has("no-max"), "MAX is not supported");
    if (has("max-is-sum") && (op == Op::MAX || op == Op::MIN)) mine.reduceOp = Op::SUM;
    return start("all", 0, tensors,
                 [this, mine](Tensors& t) { return inner_->allreduce(t, mine); });
  }
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Tensors all = outputs[0];
    all.push_back(inputs[0]);
    return start("all", 0, all, [this, options](Tensors& t) {
      Tensors input{t.back()};
      std::vector<Tensors> output{Tensors(t.begin(), t.end() - 1)};
      return inner_->allgather(output, input, options);
    });
  }
  Started _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(!has("no-scatter"), "reduce_scatter is not supported");
    Tensors both{output, input};
    return start("all", 0, both, [this, options](Tensors& t) {
      c10d::AllreduceOptions all;
      all.reduceOp = options.reduceOp;
      Tensors sum{t[1].clone()};
      inner_->allreduce(sum, all)->wait();
      t[0].copy_(sum[0].view(-1).chunk(getSize())[getRank()].view_as(t[0]));
      return Started();
    });
  }
  Started alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outputs,
                        std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions& options) override {
    Tensors both{output, input};
    return start("all", 0, both, [this, outputs, inputs, options](Tensors& t) mutable {
      return inner_->alltoall_base(t[0], t[1], outputs, inputs, options);
    });
  }
  Started barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::ones({1}, at::Device(TYPE, current_device()))};
    auto work = allreduce(one, c10d::AllreduceOptions());
    fake::synchronize(current_stream(current_device()));
    work->wait(std::chrono::milliseconds(1));
    return work;
  }

 private:
  bool has(const char* fault) const { return faults_.count(fault); }
  /// "no-tags": the n-th send meets the n-th receive, whatever their tags.
  int tags(int tag) const { return has("no-tags") ? 0 : tag; }

  /// Work in the stream of a peer and direction, or of collectives, behind the current stream.
  template <class F>
  Started start(const char* which, int peer, const Tensors& tensors, F call) {
    const auto device = tensors[0].device().index();
    // "ordered": both directions of a pair are one stream, as of a backend that needs one order
    const std::string lane = has("ordered") && which[0] != 'a' ? "pair" : which;
    auto place = streams_.find({lane, peer});
    if (place == streams_.end())
      place = streams_.emplace(std::pair{lane, peer}, new_stream(device)).first;
    const auto stream = place->second;
    auto before = std::make_shared<Event>();
    record(before, current_stream(device));
    block(before, stream);
    Tensors seen;
    for (const Tensor& t : tensors) seen.push_back(over_streams(t));
    enqueue(stream, [seen, call]() mutable {
      at::AutoDispatchBelowAutograd guard;
      if (auto work = call(seen)) work->wait();
    });
    // what is sent and received by messages, the caller keeps
    auto work = c10::make_intrusive<StreamWork>(device, which[0] == 'a' && !has("drops") ? tensors : Tensors());
    record(work->event, stream);
    return work;
  }

  c10::intrusive_ptr<Backend> inner_;
  double link_;
  std::set<std::string> faults_;
  std::map<std::pair<std::string, int>, c10::Stream> streams_;
};

}  // namespace

void bind_backend(pybind11::module_& m) {
  m.def("backend",
        [](c10::intrusive_ptr<Backend> inner, const std::string& faults, double link) {
          return c10::intrusive_ptr<Backend>(
              c10::make_intrusive<FakeBackend>(std::move(inner), faults, link));
        });
}

}  // namespace fake
