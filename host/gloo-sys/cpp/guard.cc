#include "fusewire-gloo-sys/cpp/guard.h"

#include <algorithm>
#include <utility>

#include <gloo/common/error.h>

namespace fusewire_gloo {

namespace {

// Interval at which a wait checks the connection to its peer.
constexpr auto kTick = std::chrono::milliseconds(50);

// A slot that no operation uses. `slotFor` is not applied to this slot.
constexpr uint64_t kCanarySlot = 0x7Full << 40;

thread_local Clock::time_point deadline = Clock::time_point::max();
thread_local Clock::time_point begin = Clock::time_point::min();

// Gloo leaves the upper 16 bits of a slot unused, so a hash of the length is stored there: if a
// peer posts another length, the messages do not match, and the operation times out. Without the
// hash, the transport's thread would detect the difference and throw, which ends the process.
uint64_t slotFor(uint64_t slot, size_t nbytes) {
  const uint64_t mixed = (uint64_t(nbytes) * 0x9E3779B97F4A7C15ull) >> 48;
  return slot ^ (mixed << 48);
}

std::string withPeer(const std::string& text, const char* what, int peer) {
  if (peer < 0) {
    return text;
  }
  return text + " (" + what + " rank " + std::to_string(peer) + ")";
}

// Waits with timeout zero. Returns true if the message is complete. Otherwise Gloo closes all
// connections, which is acceptable here because one of them is broken already.
template <typename Once>
bool finished(const Once& once) {
  try {
    while (!once(std::chrono::milliseconds::zero())) {
      // `once` reported an earlier interruption. The next call returns the result.
    }
    return true;
  } catch (const gloo::IoException&) {
    return false;
  }
}

} // namespace

bool isTimeout(const std::string& text) {
  for (const char* mark : {"Timed out waiting", "Connect timeout", "Wait timeout"}) {
    if (text.find(mark) != std::string::npos) {
      return true;
    }
  }
  return false;
}

Registry::Registry() : ticker_([this] { tick(); }) {}

Registry::~Registry() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  ticker_.join();
}

void Registry::tick() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ended_) {
    idle_ = buffers_.empty();
    changed_.wait(lock, [this] { return ended_ || !buffers_.empty(); });
    idle_ = false;
    changed_.wait_for(lock, kTick, [this] { return ended_; });
    for (auto* buffer : buffers_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
}

void Registry::add(GuardedBuffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.insert(buffer);
  // The thread is notified only if it is idle, so operations in quick succession cost no
  // notification.
  if (idle_) {
    idle_ = false;
    changed_.notify_all();
  }
}

void Registry::remove(GuardedBuffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.erase(buffer);
}

void Registry::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (auto* buffer : buffers_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

bool Registry::aborted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return aborted_;
}

void Registry::throwIfAborted() {
  if (aborted()) {
    throw Failure(Failure::kAborted, -1, "the context was aborted");
  }
}

Watch::Watch(gloo::transport::Context& transport) {
  canaries_.resize(size_t(transport.size));
  for (int peer = 0; peer < transport.size; peer++) {
    if (peer == transport.rank) {
      continue;
    }
    auto canary = transport.createUnboundBuffer(nullptr, 0);
    canary->recv(peer, kCanarySlot, 0, 0);
    canaries_[size_t(peer)] = std::move(canary);
  }
}

void Watch::check(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 0; rank < canaries_.size(); rank++) {
    if (canaries_[rank] && (peer < 0 || size_t(peer) == rank)) {
      // After `abortWaitRecv`, `waitRecv` does not block. It throws if Gloo has reported a
      // connection error to this buffer.
      canaries_[rank]->abortWaitRecv();
      canaries_[rank]->waitRecv(nullptr, kTick);
    }
  }
}

Deadline::Deadline(std::chrono::milliseconds timeout) : previous_(deadline) {
  begin = Clock::now();
  deadline = std::min(previous_, begin + timeout);
}

Deadline::~Deadline() {
  deadline = previous_;
}

std::chrono::milliseconds Deadline::clamp(std::chrono::milliseconds timeout) {
  if (deadline == Clock::time_point::max()) {
    return timeout;
  }
  const auto zero = std::chrono::milliseconds::zero();
  // Rounded up, so that no wait ends before its deadline.
  const auto left =
      std::max(zero, std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()));
  return timeout == gloo::transport::kUnsetTimeout ? left : std::min(left, timeout);
}

std::chrono::milliseconds Deadline::elapsed() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
}

GuardedBuffer::GuardedBuffer(
    std::shared_ptr<gloo::transport::Context> transport,
    std::shared_ptr<Registry> registry,
    std::shared_ptr<Watch> watch,
    void* ptr,
    size_t size)
    : UnboundBuffer(ptr, size),
      transport_(std::move(transport)),
      registry_(std::move(registry)),
      watch_(std::move(watch)) {
  registry_->add(this);
}

GuardedBuffer::~GuardedBuffer() {
  registry_->remove(this);
}

size_t GuardedBuffer::length(size_t offset, size_t nbytes) const {
  const size_t wanted = nbytes == kUnspecifiedByteCount ? 0 : nbytes;
  if (offset > size || wanted > size - offset) {
    throw Failure(Failure::kInvalid, -1, "a message outside its buffer");
  }
  return nbytes == kUnspecifiedByteCount ? size - offset : nbytes;
}

gloo::transport::UnboundBuffer*
GuardedBuffer::post(Direction direction, int peer, size_t offset, size_t nbytes) {
  auto* at = nbytes == 0 ? nullptr : static_cast<uint8_t*>(ptr) + offset;
  auto buffer = transport_->createUnboundBuffer(at, nbytes);
  auto* raw = buffer.get();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = direction == Direction::kSend ? sends_ : recvs_;
    queue.push_back(Posted{std::move(buffer), peer});
  }
  // Checked after the push: an abort that comes later finds the message in the queue, and an
  // earlier abort is detected here.
  registry_->throwIfAborted();
  return raw;
}

void GuardedBuffer::send(int dstRank, uint64_t slot, size_t offset, size_t nbytes) {
  nbytes = length(offset, nbytes);
  auto* buffer = post(Direction::kSend, dstRank, offset, nbytes);
  try {
    buffer->send(dstRank, slotFor(slot, nbytes), 0, nbytes);
  } catch (const gloo::IoException& e) {
    throw Failure(Failure::kIo, dstRank, withPeer(e.what(), "sending to", dstRank));
  }
}

void GuardedBuffer::recv(int srcRank, uint64_t slot, size_t offset, size_t nbytes) {
  nbytes = length(offset, nbytes);
  auto* buffer = post(Direction::kRecv, srcRank, offset, nbytes);
  try {
    buffer->recv(srcRank, slotFor(slot, nbytes), 0, nbytes);
  } catch (const gloo::IoException& e) {
    throw Failure(Failure::kIo, srcRank, withPeer(e.what(), "receiving from", srcRank));
  }
}

void GuardedBuffer::recv(
    std::vector<int> srcRanks,
    uint64_t slot,
    size_t offset,
    size_t nbytes) {
  nbytes = length(offset, nbytes);
  auto* buffer = post(Direction::kRecv, -1, offset, nbytes);
  buffer->recv(std::move(srcRanks), slotFor(slot, nbytes), 0, nbytes);
}

bool GuardedBuffer::wait(Direction direction, int* rank, std::chrono::milliseconds timeout) {
  const bool sending = direction == Direction::kSend;
  auto& queue = sending ? sends_ : recvs_;
  gloo::transport::UnboundBuffer* buffer = nullptr;
  int peer = -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue.empty()) {
      throw Failure(Failure::kInvalid, -1, "a wait without a message");
    }
    buffer = queue.front().buffer.get();
    peer = queue.front().peer;
  }
  registry_->throwIfAborted();
  const char* what = sending ? "sending to" : "receiving from";
  int from = peer;
  const auto once = [&](std::chrono::milliseconds left) {
    return sending ? buffer->waitSend(&from, left) : buffer->waitRecv(&from, left);
  };
  try {
    const auto end = Clock::now() + Deadline::clamp(timeout);
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      if (once(std::max(left, std::chrono::milliseconds::zero()))) {
        break;
      }
      // An abort or the thread of the registry has interrupted the wait.
      registry_->throwIfAborted();
      try {
        watch_->check(peer);
      } catch (const gloo::IoException& broken) {
        // Data that arrived before the end of the connection is valid.
        if (!finished(once)) {
          throw Failure(Failure::kIo, peer, withPeer(broken.what(), what, peer));
        }
        break;
      }
    }
  } catch (const gloo::IoException& e) {
    const auto text = withPeer(e.what(), what, peer);
    if (!isTimeout(text)) {
      throw Failure(Failure::kIo, peer, text);
    }
    // Gloo's message contains only the duration of the last wait.
    const auto total = std::to_string(Deadline::elapsed().count());
    throw Failure(Failure::kTimeout, peer, text + ", after " + total + " ms in all");
  }
  if (rank != nullptr) {
    *rank = from;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  queue.pop_front();
  return true;
}

bool GuardedBuffer::waitRecv(int* rank, std::chrono::milliseconds timeout) {
  return wait(Direction::kRecv, rank, timeout);
}

bool GuardedBuffer::waitSend(int* rank, std::chrono::milliseconds timeout) {
  return wait(Direction::kSend, rank, timeout);
}

void GuardedBuffer::abortWaitRecv() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& posted : recvs_) {
    posted.buffer->abortWaitRecv();
  }
}

void GuardedBuffer::abortWaitSend() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& posted : sends_) {
    posted.buffer->abortWaitSend();
  }
}

GuardedContext::GuardedContext(
    std::shared_ptr<gloo::transport::Context> inner,
    std::shared_ptr<Registry> registry)
    : Context(inner->rank, inner->size),
      inner_(std::move(inner)),
      registry_(std::move(registry)),
      watch_(std::make_shared<Watch>(*inner_)) {}

std::unique_ptr<gloo::transport::Pair>& GuardedContext::getPair(int rank) {
  return inner_->getPair(rank);
}

std::unique_ptr<gloo::transport::Pair>& GuardedContext::createPair(int rank) {
  return inner_->createPair(rank);
}

std::unique_ptr<gloo::transport::UnboundBuffer> GuardedContext::createUnboundBuffer(
    void* ptr,
    size_t size) {
  return std::make_unique<GuardedBuffer>(inner_, registry_, watch_, ptr, size);
}

} // namespace fusewire_gloo
