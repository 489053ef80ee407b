#include "fusewire-gloo-sys/cpp/bridge.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <gloo/gather.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/store.h>
#include <gloo/scatter.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/types.h>

#include "fusewire-gloo-sys/src/ffi.rs.h"

namespace fusewire_gloo {

namespace {

using Milliseconds = std::chrono::milliseconds;

// Implements Gloo's store interface with the caller's Rendezvous object. One deadline bounds all
// calls together.
class RustStore : public gloo::rendezvous::Store {
 public:
  RustStore(const StoreBox& store, Milliseconds timeout)
      : store_(store), deadline_(Clock::now() + timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    guarded(key, [&] {
      const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
      store_.set(text(key), rust::Slice<const uint8_t>(bytes, data.size()));
    });
  }

  // Gloo calls `get` for some keys without a prior `wait`.
  std::vector<char> get(const std::string& key) override {
    wait({key});
    std::vector<char> value;
    guarded(key, [&] {
      const auto bytes = store_.get(text(key));
      value.assign(bytes.begin(), bytes.end());
    });
    return value;
  }

  void wait(const std::vector<std::string>& keys) override {
    wait(keys, Milliseconds::zero());
  }

  // Ignores the timeout that Gloo passes, which is a fifth of the caller's timeout (see `connect`),
  // and uses the time left until the deadline.
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override {
    // Rounded up, so that a wait that uses the whole time ends after the deadline.
    const auto left = std::chrono::ceil<Milliseconds>(deadline_ - Clock::now());
    const auto names = join(keys);
    guarded(names, [&] { store_.wait(keys, uint64_t(std::max<int64_t>(left.count(), 0))); });
  }

 private:
  static rust::Str text(const std::string& key) {
    return rust::Str(key.data(), key.size());
  }

  static std::string join(const std::vector<std::string>& keys) {
    std::string names;
    for (const auto& key : keys) {
      names += (names.empty() ? "" : ", ") + key;
    }
    return names;
  }

  template <typename Call>
  void guarded(const std::string& key, Call&& call) {
    try {
      call();
    } catch (const rust::Error& error) {
      const bool late = Clock::now() >= deadline_;
      const auto kind = late ? Failure::kTimeout : Failure::kRendezvous;
      throw Failure(kind, peer(key), std::string(error.what()) + " (key \"" + key + "\")");
    }
  }

  // Gloo's keys are a rank number, optionally with the prefix "rank_".
  static int peer(const std::string& key) {
    const auto digits = key.rfind("rank_", 0) == 0 ? key.substr(5) : key;
    const auto isDigit = [](char c) { return c >= '0' && c <= '9'; };
    if (digits.empty() || digits.size() > 6 ||
        !std::all_of(digits.begin(), digits.end(), isDigit)) {
      return -1;
    }
    return std::stoi(digits);
  }

  const StoreBox& store_;
  const Clock::time_point deadline_;
};

gloo::AllreduceOptions::Func reduction(uint8_t dtype, uint8_t op) {
  return [dtype, op](void* out, const void* a, const void* b, size_t count) {
    reduce_into(
        dtype,
        op,
        static_cast<uint8_t*>(out),
        static_cast<const uint8_t*>(a),
        static_cast<const uint8_t*>(b),
        count);
  };
}

template <typename T, typename Options>
void bind(Options& options, const uint8_t* input, uint8_t* output, size_t count) {
  if (input != output) {
    // The input is never written. Gloo uses one buffer type for both directions.
    options.setInput(reinterpret_cast<T*>(const_cast<uint8_t*>(input)), count);
  }
  options.setOutput(reinterpret_cast<T*>(output), count);
}

template <typename Options>
void bindElements(
    Options& options,
    const uint8_t* input,
    uint8_t* output,
    size_t count,
    size_t element) {
  switch (element) {
    case 1:
      return bind<uint8_t>(options, input, output, count);
    case 2:
      return bind<uint16_t>(options, input, output, count);
    case 4:
      return bind<uint32_t>(options, input, output, count);
    case 8:
      return bind<uint64_t>(options, input, output, count);
    default:
      throw Failure(Failure::kInvalid, -1, "an element of " + std::to_string(element) + " bytes");
  }
}

template <typename Options>
Options with(const std::shared_ptr<MeshContext>& context, const Call& call) {
  Options options(context);
  options.setTag(call.tag);
  options.setTimeout(Milliseconds(call.timeout_ms));
  return options;
}

uint8_t* readable(const uint8_t* input) {
  return const_cast<uint8_t*>(input);
}

} // namespace

std::string describe(const std::exception& error) noexcept {
  try {
    char kind = Failure::kInvalid;
    int peer = -1;
    if (const auto* failure = dynamic_cast<const Failure*>(&error)) {
      kind = failure->kind;
      peer = failure->peer;
    } else if (dynamic_cast<const gloo::IoException*>(&error) != nullptr) {
      kind = isTimeout(error.what()) ? Failure::kTimeout : Failure::kIo;
    }
    return std::string(1, kind) + std::to_string(peer) + "|" + error.what();
  } catch (...) {
    return std::string();
  }
}

void MeshContext::guard(std::shared_ptr<Registry> registry) {
  transportContext_ =
      std::make_shared<GuardedContext>(std::move(transportContext_), std::move(registry));
}

Bridge::Bridge(std::shared_ptr<MeshContext> context, std::shared_ptr<Registry> registry)
    : context_(std::move(context)), registry_(std::move(registry)) {}

template <typename Operation>
void Bridge::run(const Call& call, Operation&& operation) const {
  registry_->throwIfAborted();
  const Deadline deadline{Milliseconds(call.timeout_ms)};
  try {
    operation();
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    // An abort closes the connections, so the operation can fail with any of several errors.
    if (registry_->aborted()) {
      throw Failure(
          Failure::kAborted, -1, std::string("the context was aborted: ") + error.what());
    }
    throw;
  }
}

void Bridge::allreduce(
    const uint8_t* input,
    uint8_t* output,
    size_t count,
    size_t element,
    uint8_t dtype,
    uint8_t op,
    const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::AllreduceOptions>(context_, call);
    bindElements(options, input, output, count, element);
    options.setReduceFunction(reduction(dtype, op));
    gloo::allreduce(options);
  });
}

void Bridge::reduce(
    const uint8_t* input,
    uint8_t* output,
    size_t count,
    size_t element,
    uint8_t dtype,
    uint8_t op,
    int32_t root,
    const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::ReduceOptions>(context_, call);
    bindElements(options, input, output, count, element);
    options.setReduceFunction(reduction(dtype, op));
    options.setRoot(root);
    gloo::reduce(options);
  });
}

void Bridge::allgather(uint8_t* output, size_t bytes, const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::AllgatherOptions>(context_, call);
    options.setOutput(output, bytes * size_t(context_->size));
    gloo::allgather(options);
  });
}

void Bridge::allgatherv(uint8_t* output, rust::Slice<const size_t> counts, const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::AllgathervOptions>(context_, call);
    options.setOutput(output, std::vector<size_t>(counts.begin(), counts.end()));
    gloo::allgatherv(options);
  });
}

void Bridge::alltoall(const uint8_t* input, uint8_t* output, size_t bytes, const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::AlltoallOptions>(context_, call);
    options.setInput(readable(input), bytes * size_t(context_->size));
    options.setOutput(output, bytes * size_t(context_->size));
    gloo::alltoall(options);
  });
}

void Bridge::alltoallv(
    const uint8_t* input,
    rust::Slice<const int64_t> sent,
    uint8_t* output,
    rust::Slice<const int64_t> received,
    const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::AlltoallvOptions>(context_, call);
    options.setInput(readable(input), std::vector<int64_t>(sent.begin(), sent.end()));
    options.setOutput(output, std::vector<int64_t>(received.begin(), received.end()));
    gloo::alltoallv(options);
  });
}

void Bridge::broadcast(uint8_t* buffer, size_t bytes, int32_t root, const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::BroadcastOptions>(context_, call);
    options.setOutput(buffer, bytes);
    options.setRoot(root);
    gloo::broadcast(options);
  });
}

void Bridge::scatter(
    const uint8_t* input,
    uint8_t* output,
    size_t bytes,
    int32_t root,
    const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::ScatterOptions>(context_, call);
    if (context_->rank == root) {
      std::vector<uint8_t*> parts;
      for (int rank = 0; rank < context_->size; rank++) {
        parts.push_back(readable(input) + size_t(rank) * bytes);
      }
      options.setInputs(std::move(parts), bytes);
    }
    options.setOutput(output, bytes);
    options.setRoot(root);
    gloo::scatter(options);
  });
}

void Bridge::gather(
    const uint8_t* input,
    uint8_t* output,
    size_t bytes,
    int32_t root,
    const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::GatherOptions>(context_, call);
    options.setInput(readable(input), bytes);
    if (context_->rank == root) {
      options.setOutput(output, bytes * size_t(context_->size));
    }
    options.setRoot(root);
    gloo::gather(options);
  });
}

void Bridge::barrier(const Call& call) const {
  run(call, [&] {
    auto options = with<gloo::BarrierOptions>(context_, call);
    gloo::barrier(options);
  });
}

void Bridge::batch(rust::Slice<const Message> messages, uint8_t prefix, const Call& call) const {
  run(call, [&] {
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers;
    buffers.reserve(messages.size());
    for (const auto& message : messages) {
      auto* ptr = reinterpret_cast<void*>(message.address);
      buffers.push_back(context_->createUnboundBuffer(ptr, message.bytes));
    }
    // Posting never blocks, so all messages are in flight before the first wait. Receives are
    // posted first, so that a buffer exists for the peer's data.
    for (const bool send : {false, true}) {
      for (size_t i = 0; i < messages.size(); i++) {
        const auto& message = messages[i];
        const auto slot = gloo::Slot::build(prefix, message.tag);
        if (message.send != send) {
          continue;
        }
        if (send) {
          buffers[i]->send(message.peer, slot);
        } else {
          buffers[i]->recv(message.peer, slot);
        }
      }
    }
    const Milliseconds timeout(call.timeout_ms);
    for (size_t i = 0; i < messages.size(); i++) {
      if (messages[i].send) {
        buffers[i]->waitSend(timeout);
      } else {
        buffers[i]->waitRecv(timeout);
      }
    }
  });
}

void Bridge::abort() const {
  registry_->abort();
  context_->closeConnections();
}

std::unique_ptr<Bridge> connect(
    int32_t rank,
    int32_t size,
    uint64_t timeout_ms,
    uint8_t kind,
    rust::Str target,
    const StoreBox& store) {
  gloo::transport::tcp::attr attr;
  if (kind == 0) {
    attr.hostname = std::string(target);
  } else {
    attr.iface = std::string(target);
  }
  auto device = gloo::transport::tcp::CreateDevice(attr);
  auto context = std::make_shared<MeshContext>(rank, size);
  // Gloo waits for up to five times its timeout until a connection is established. While the ranks
  // connect, Gloo's timeout is therefore a fifth of the caller's timeout.
  context->setTimeout(Milliseconds(std::max<uint64_t>(timeout_ms / 5, 1)));
  RustStore bridge(store, Milliseconds(timeout_ms));
  context->connectFullMesh(bridge, device);
  context->setTimeout(Milliseconds(timeout_ms));
  auto registry = std::make_shared<Registry>();
  context->guard(registry);
  return std::make_unique<Bridge>(std::move(context), std::move(registry));
}

} // namespace fusewire_gloo
