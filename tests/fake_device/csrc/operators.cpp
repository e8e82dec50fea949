// The fake accelerator for torch: guard, hooks, generator, and every operator by the CPU's kernel in
// a stream.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <set>
#include <thread>

namespace fake {
namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using torch::jit::Stack;

// ---- guard ----
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    set_device(device.index());
    return before;
  }
  Device getDevice() const override { return Device(TYPE, current_device()); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) set_device(device.index());
  }
  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return new_stream(device.index());
  }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const Stream& stream) const override { return idle(stream); }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device); }

  static SharedEvent& event_of(void* event) { return *static_cast<SharedEvent*>(event); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<SharedEvent*>(event);
  }
  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) *event = new SharedEvent(std::make_shared<Event>());
    event_of(*event)->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    fake::record(event_of(*event), stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) fake::block(event_of(event), stream);
  }
  bool queryEvent(void* event) const override { return !event || query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) fake::synchronize(event_of(event));
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return milliseconds(event_of(first), event_of(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& stream) const override {
    allocator()->recordStream(ptr, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- generators: the CPU's numbers ----
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit Generator(DeviceIndex device, at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device().index(), cpu.clone());
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < MOST_DEVICES; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

// ---- hooks ----
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device < 0 ? current_device() : device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, current_device()); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

// ---- tensors over the memory of others ----
/// A tensor of `device` with the geometry of `like` over memory that it does not own.
Tensor over(const Tensor& like, void* p, c10::DeviceType device, c10::DispatchKey key) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), like.storage().nbytes(), c10::DataPtr(p, Device(device)),
      device == c10::kMeta ? c10::GetAllocator(c10::kMeta) : nullptr, device == c10::kMeta);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

/// What a kernel in a stream computes with.
Tensor in_stream(const Tensor& t) {
  if (!t.is_privateuseone()) return t;
  void* base = seen_by_streams(t.storage().data_ptr().get());
  return over(t, base, c10::kCPU, c10::DispatchKey::CPU);
}

Tensor on_meta(const Tensor& t) {
  if (!t.is_privateuseone()) return t;
  return over(t, nullptr, c10::kMeta, c10::DispatchKey::Meta);
}

/// Numbers to draw for: ordinary memory of the host with the geometry of a tensor.
Tensor scratch(const Tensor& t) {
  return t.is_privateuseone() ? at::empty_strided(t.sizes(), t.strides(), t.dtype()) : t;
}

/// A stack with each tensor replaced.
template <class F>
IValue map_tensors(const IValue& value, const F& f) {
  auto one = [&](const Tensor& t) { return t.defined() ? f(t) : t; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(one(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(one(*t)) : t);
    return list;
  }
  return value;
}

template <class F>
Stack map_stack(const Stack& stack, const F& f) {
  Stack mapped;
  for (const IValue& value : stack) mapped.push_back(map_tensors(value, f));
  return mapped;
}

std::vector<Tensor> tensors_in(const IValue& value) {
  std::vector<Tensor> found;
  map_tensors(value, [&](const Tensor& t) {
    found.push_back(t);
    return t;
  });
  return found;
}

Tensor empty_like_strided(const Tensor& like, Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      like.sizes(), like.strides(), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.scalar_type());
}

// ---- every operator ----
struct Call {
  const c10::OperatorHandle& op;
  c10::OperatorHandle kernel;  // of which the CPU has one
  Stack arguments;
  Device device = Device(TYPE, -1);

  Call(const c10::OperatorHandle& op, Stack stack)
      : op(op), kernel(op), arguments(std::move(stack)) {
    for (IValue& value : arguments) {
      for (const Tensor& t : tensors_in(value)) {
        if (!t.is_privateuseone()) continue;
        TORCH_CHECK(device.index() < 0 || device == t.device(), op.schema().name(),
                    " got tensors on ", device, " and ", t.device());
        device = t.device();
      }
      if (value.isDevice() && device.index() < 0) device = value.toDevice();
    }
    if (device.index() < 0) device = Device(TYPE, current_device());
    const std::string& name = op.schema().name();
    const bool indexed = name.find("aten::index") == 0 || name.find("aten::_index") == 0;
    for (IValue& value : arguments) {  // numbers are passed by value, as to a kernel of a GPU
      value = map_tensors(value, [&](const Tensor& t) {
        if (t.is_privateuseone()) return t;
        TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || indexed), name, " got tensors on ", device,
                    " and ", t.device());
        auto copy = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      });
    }
  }

  Stream stream() const { return current_stream(device.index()); }

  /// The argument that a result is, if the schema says so; `written` or a view.
  std::optional<size_t> alias(size_t result, bool written) const {
    const auto* info = op.schema().returns()[result].alias_info();
    if (!info) return std::nullopt;
    for (size_t i = 0; i < op.schema().arguments().size(); i++) {
      const auto* other = op.schema().arguments()[i].alias_info();
      if (other && other->isWrite() == written && other->beforeSets() == info->beforeSets())
        return i;
    }
    return std::nullopt;
  }

  bool has_tensors_alone() const {
    for (const auto& result : op.schema().returns()) {
      auto type = result.type();
      if (!type->isSubtypeOf(*c10::TensorType::get()) &&
          !type->isSubtypeOf(*c10::ListType::ofTensors()))
        return false;
    }
    return true;
  }

  /// The results on meta; none where they depend on data or meta has no kernel.
  std::optional<Stack> shapes() const {
    for (auto tag : kernel.getTags())
      if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output)
        return std::nullopt;
    if (!has_tensors_alone()) return std::nullopt;
    Stack stack = map_stack(arguments, on_meta);
    for (IValue& value : stack) {
      if (value.isDevice()) value = Device(c10::kMeta);
      if (value.isGenerator()) value = IValue();
    }
    Stack before = stack;
    try {
      kernel.callBoxed(&stack);
    } catch (const std::exception&) {  // the CPU's kernel says what is wrong, if anything is
      return std::nullopt;
    }
    for (size_t i = 0; i < arguments.size(); i++) {  // out= of another shape
      auto theirs = tensors_in(before[i]), mine = tensors_in(arguments[i]);
      for (size_t n = 0; n < mine.size(); n++)
        if (mine[n].sizes() != theirs[n].sizes() && mine[n].is_privateuseone())
          mine[n].resize_(theirs[n].sizes());
    }
    return stack;
  }

  /// A tensor for a result on meta, or a view of the argument that it aliases.
  Tensor made(const Tensor& meta, const std::vector<Tensor>& viewed) const {
    if (viewed.empty()) return empty_like_strided(meta, device);
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(viewed[0].storage()), viewed[0].key_set(),
        meta.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(meta.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    if (meta.is_conj() != view.is_conj()) view._set_conj(meta.is_conj());
    if (meta.is_neg() != view.is_neg()) view._set_neg(meta.is_neg());
    return view;
  }

  static void run(const c10::OperatorHandle& op, Stack& stack) {
    at::AutoDispatchBelowAutograd guard;
    // where it returns several arguments, as topk with out=, torch drops them before it returns them
    const Stack kept = stack;
    op.callBoxed(&stack);
  }

  /// Results of known shapes: the kernel is put into the stream, and the host goes on.
  Stack start(const Stack& metas, const std::optional<Stack>& drawn) {
    Stack results;
    std::vector<std::pair<size_t, Stack>> filled;  // places of results, and where they are copied
    bool views = true;
    for (size_t i = 0; i < metas.size(); i++) {
      if (auto from = alias(i, true)) {
        results.push_back(arguments[*from]);
        views = false;
        continue;
      }
      auto from = alias(i, false);
      auto viewed = from ? tensors_in(arguments[*from]) : std::vector<Tensor>();
      results.push_back(
          map_tensors(metas[i], [&](const Tensor& meta) { return made(meta, viewed); }));
      if (from) continue;
      views = false;
      filled.emplace_back(i, Stack{map_tensors(results.back(), in_stream)});
    }
    if (views && !results.empty()) return results;
    Stack inputs = map_stack(drawn ? *drawn : arguments, in_stream);
    for (IValue& value : inputs)
      if (value.isDevice()) value = Device(c10::kCPU);
    enqueue(stream(), [kernel = kernel, inputs, filled]() mutable {
      run(kernel, inputs);
      for (auto& [place, outputs] : filled) {
        auto from = tensors_in(inputs[place]), to = tensors_in(outputs[0]);
        for (size_t n = 0; n < to.size(); n++) to[n].copy_(from[n]);
      }
    });
    return results;
  }

  /// Results that depend on data: the host waits for the kernel.
  Stack wait(const std::optional<Stack>& drawn) {
    Stack inputs = map_stack(drawn ? *drawn : arguments, in_stream);
    for (IValue& value : inputs)
      if (value.isDevice()) value = Device(c10::kCPU);
    enqueue(stream(), [this, &inputs] { run(kernel, inputs); });
    synchronize(stream());
    Stack results;
    for (size_t i = 0; i < inputs.size(); i++) {
      if (auto from = alias(i, true)) {
        results.push_back(arguments[*from]);
        continue;
      }
      results.push_back(map_tensors(inputs[i], [&](const Tensor& t) {
        auto to = empty_like_strided(t, device);
        to.copy_(t);
        return to;
      }));
    }
    return results;
  }
};

/// Draws whose use of the generator depends on shapes alone.
bool draws_by_shape(const std::string& name) {
  static const std::set<std::string> names = {"aten::uniform_", "aten::normal_", "aten::random_",
                                              "aten::bernoulli_", "aten::exponential_",
                                              "aten::randperm"};
  return names.count(name);
}

void any_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Call call(op, torch::jit::pop(*stack, schema.arguments().size()));
  c10::DeviceGuard guard(call.device);
  at::AutoDispatchBelowAutograd below;
  std::optional<Stack> drawn;
  bool by_shape = true;
  for (size_t i = 0; i < call.arguments.size(); i++) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    const auto& given = call.arguments[i];
    auto generator = given.isNone() ? default_generator(call.device.index()) : given.toGenerator();
    TORCH_CHECK(generator.device() == call.device, "a generator of ", generator.device(),
                " for tensors on ", call.device);
    auto& numbers = generator.get<Generator>()->cpu;
    TORCH_CHECK(!recording(), "a draw cannot be recorded");
    drawn = call.arguments;
    by_shape = draws_by_shape(schema.name());
    (*drawn)[i] = numbers;
    if (by_shape) {  // the host goes on to the state behind the draw
      auto start = numbers.clone();
      Stack again = map_stack(*drawn, scratch);
      for (IValue& value : again)
        if (value.isDevice()) value = Device(c10::kCPU);
      Call::run(op, again);
      (*drawn)[i] = start;
    }
  }
  auto metas = by_shape ? call.shapes() : std::nullopt;
  for (IValue& result : metas ? call.start(*metas, drawn) : call.wait(drawn))
    stack->push_back(std::move(result));
}

// ---- what has no kernel on the CPU, or moves memory ----
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// To or from the host: memory that is not pinned is read before the call returns.
void copy_with_host(const Tensor& from, const Tensor& to, bool asynchronous) {
  const bool up = to.is_privateuseone();
  const auto stream = current_stream((up ? to : from).device().index());
  Tensor source = from;
  TORCH_CHECK(!recording() || is_pinned((up ? from : to).storage().data_ptr().get()),
              "a copy of ordinary memory of the host cannot be recorded");
  if (up && !is_pinned(from.storage().data_ptr().get()))
    source = from.clone();
  else if (!up && from.is_conj())
    source = from.resolve_conj();
  // a tensor of the host without its object of Python
  auto seen = [](const Tensor& t) { return t.is_cpu() ? t.detach() : in_stream(t); };
  enqueue(stream, [out = seen(to), in = seen(source)] {
    at::AutoDispatchBelowAutograd guard;
    Tensor target = out;
    target.copy_(in);
  });
  if (!asynchronous) synchronize(stream);
}

/// Between devices: in the stream of the source, which the stream of the target waits for.
void copy_between(const Tensor& from, const Tensor& to) {
  const auto source = current_stream(from.device().index());
  const auto target = current_stream(to.device().index());
  auto wait = [](Stream waiting, Stream first) {
    if (waiting == first) return;
    auto event = std::make_shared<Event>();
    record(event, first);
    block(event, waiting);
  };
  wait(source, target);
  enqueue(source, [out = in_stream(to), in = in_stream(from)] {
    at::AutoDispatchBelowAutograd guard;
    Tensor target = out;
    target.copy_(in);
  });
  wait(target, source);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool asynchronous) {
  if (to.numel() == 0) return to;
  if (from.is_privateuseone() && to.is_privateuseone())
    copy_between(from, to);
  else
    copy_with_host(from, to, asynchronous);
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void grow(const c10::Storage& storage, size_t size) {
  if (size <= storage.nbytes()) return;
  c10::DeviceGuard guard(storage.device());
  auto memory = allocator()->allocate(size);
  if (storage.nbytes())
    enqueue(current_stream(storage.device().index()),
            [to = seen_by_streams(memory.get()),
             from = seen_by_streams(storage.data_ptr().get()),
             n = storage.nbytes()] { std::memcpy(to, from, n); });
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  if (size)
    grow(storage, size);
  else {
    c10::DeviceGuard guard(storage.device());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(allocator()->allocate(0));
    storage.unsafeGetStorageImpl()->set_nbytes(0);
  }
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow(self.storage(), at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                          self.itemsize(), self.storage_offset()));
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

/// As the CPU does it, so that dropout has its bits; F.dropout does not ask the CPU for this.
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto noise = at::empty_like(x).bernoulli_(1 - p);
  if (p < 1) noise.div_(1 - p);
  return {x * noise, noise != 0};
}

int64_t fused_attention(const Tensor&, const Tensor&, const Tensor&,
                        const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

/// Convolutions: torch asks other devices for operators that the CPU does not have.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  const bool backward = op.schema().name() == "aten::convolution_backward_overrideable";
  const char* name = backward ? "aten::convolution_backward" : "aten::convolution";
  Call call(op, torch::jit::pop(*stack, op.schema().arguments().size()));
  call.kernel = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (backward) {
    const Tensor& weight = call.arguments[2].toTensor();
    const bool transposed = call.arguments[6].toBool();
    int64_t channels = transposed ? weight.size(1) * call.arguments[8].toInt() : weight.size(0);
    call.arguments.insert(call.arguments.begin() + 3, IValue(std::vector<int64_t>{channels}));
  }
  at::AutoDispatchBelowAutograd below;
  auto metas = call.shapes();
  TORCH_CHECK(metas, "a convolution without shapes");
  for (IValue& result : call.start(*metas, std::nullopt)) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout);
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
}

// A copy resolves a conjugate itself; without these it would be resolved by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::fused_attention)
}

namespace fake {
Tensor over_streams(const Tensor& t) { return in_stream(t); }
void bind_backend(pybind11::module_& m);

/// Where torch has a kernel for the CPU and a formula for all other devices, take the kernel: the
/// formula has other bits.
void prefer_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> kept;
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.find("aten::") != 0 ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    kept.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunction<&any_operator>(), std::nullopt, nullptr,
        "fake device"));
  }
}
}  // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake;
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  c10::SetAllocator(TYPE, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  prefer_kernels();
  m.def("device_count", [] { return int(device_count()); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  bind_backend(m);
  m.def("set_delays", &set_delays);
  m.def("host_waits", &host_waits);
  using GraphClass = std::shared_ptr<Graph>;
  struct Held {
    GraphClass graph = std::make_shared<Graph>();
  };
  pybind11::class_<Held>(m, "Graph")
      .def(pybind11::init<>())
      .def("begin", [](Held& held) { begin_recording(held.graph); })
      .def("end", [](Held&) { end_recording(); })
      .def("replay", [](Held& held) { replay(*held.graph); }, NoGil());
  m.def("tasks_run", [](int device) { return tasks_run(device); });
  m.def("sleep", [](int device, double seconds) {
    enqueue(current_stream(device),
            [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  }, NoGil());
}
