#include "fusewire-gloo-sys/cpp/guard.h"

#include <algorithm>
#include <utility>

#include <gloo/common/error.h>

namespace fusewire_gloo {

namespace {

thread_local Clock::time_point deadline = Clock::time_point::max();

// Gloo leaves the upper 16 bits of a slot unused. The length goes there: a peer that posts another
// length then never matches, and the operation times out. Without it the transport's own thread
// finds the difference, throws, and takes the process down.
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

} // namespace

bool isTimeout(const std::string& text) {
  for (const char* mark : {"Timed out waiting", "Connect timeout", "Wait timeout"}) {
    if (text.find(mark) != std::string::npos) {
      return true;
    }
  }
  return false;
}

void Registry::add(GuardedBuffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.insert(buffer);
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

Deadline::Deadline(std::chrono::milliseconds timeout) : previous_(deadline) {
  deadline = std::min(previous_, Clock::now() + timeout);
}

Deadline::~Deadline() {
  deadline = previous_;
}

std::chrono::milliseconds Deadline::clamp(std::chrono::milliseconds timeout) {
  if (deadline == Clock::time_point::max()) {
    return timeout;
  }
  const auto zero = std::chrono::milliseconds::zero();
  // Rounded up: nothing ends before its time.
  const auto left =
      std::max(zero, std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()));
  return timeout == gloo::transport::kUnsetTimeout ? left : std::min(left, timeout);
}

GuardedBuffer::GuardedBuffer(
    std::shared_ptr<gloo::transport::Context> transport,
    std::shared_ptr<Registry> registry,
    void* ptr,
    size_t size)
    : UnboundBuffer(ptr, size), transport_(std::move(transport)), registry_(std::move(registry)) {
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
  // After the push: an abort from here on finds the message, an earlier one is seen here.
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
  try {
    const auto left = Deadline::clamp(timeout);
    const bool done = sending ? buffer->waitSend(&from, left) : buffer->waitRecv(&from, left);
    if (!done) {
      throw Failure(Failure::kAborted, peer, "the context was aborted");
    }
  } catch (const gloo::IoException& e) {
    const auto kind = isTimeout(e.what()) ? Failure::kTimeout : Failure::kIo;
    throw Failure(kind, peer, withPeer(e.what(), what, peer));
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
      registry_(std::move(registry)) {}

std::unique_ptr<gloo::transport::Pair>& GuardedContext::getPair(int rank) {
  return inner_->getPair(rank);
}

std::unique_ptr<gloo::transport::Pair>& GuardedContext::createPair(int rank) {
  return inner_->createPair(rank);
}

std::unique_ptr<gloo::transport::UnboundBuffer> GuardedContext::createUnboundBuffer(
    void* ptr,
    size_t size) {
  return std::make_unique<GuardedBuffer>(inner_, registry_, ptr, size);
}

} // namespace fusewire_gloo
