// Layer between Gloo's algorithms and its TCP transport. It adds a deadline for the whole operation
// and support for an abort from another thread. It also adds the peer's rank to every failure.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

namespace fusewire_gloo {

using Clock = std::chrono::steady_clock;

// The only exception type that the C++ side throws. Its kind determines the variant of the Rust
// error.
struct Failure : std::runtime_error {
  enum Kind : char {
    kTimeout = 'T',
    kIo = 'I',
    kInvalid = 'V',
    kAborted = 'A',
    kRendezvous = 'R',
  };

  Failure(Kind kind, int peer, const std::string& text)
      : std::runtime_error(text), kind(kind), peer(peer) {}

  const Kind kind;
  const int peer; // -1 if unknown
};

// Returns true if Gloo's message describes a timeout. This version of Gloo throws IoException for
// timeouts and for connection errors.
bool isTimeout(const std::string& text);

class GuardedBuffer;

// The live buffers of a context, through which an abort reaches the waits in progress. While there
// are live buffers, a thread periodically interrupts their waits, so that the waits check the
// connections to their peers.
class Registry {
 public:
  Registry();
  ~Registry();
  void add(GuardedBuffer* buffer);
  void remove(GuardedBuffer* buffer);
  void abort();
  bool aborted();
  void throwIfAborted();

 private:
  void tick();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_set<GuardedBuffer*> buffers_;
  bool aborted_ = false;
  bool ended_ = false;
  bool idle_ = false;
  std::thread ticker_;
};

// Detects the end of the connection to each peer. When a connection ends, Gloo reports an error to
// the receives that have not begun, but not to a receive whose message has partially arrived: the
// wait for this message would last until its timeout. This class therefore posts one more receive
// per peer. No message ever matches this receive, so Gloo reports the end of the connection to it.
class Watch {
 public:
  explicit Watch(gloo::transport::Context& transport);

  // Throws the error that ended the connection to `peer`, if the connection has ended.
  void check(int peer);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> canaries_;
};

// Deadline of the operation that runs on this thread. Gloo bounds each wait, but not the sum of the
// waits.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

  // Returns the shorter of `timeout` and the time left until this thread's deadline; never
  // negative.
  static std::chrono::milliseconds clamp(std::chrono::milliseconds timeout);

  // Returns the time since the current operation of this thread began.
  static std::chrono::milliseconds elapsed();

 private:
  const Clock::time_point previous_;
};

// Uses one transport buffer per message, and waits for the messages in the order in which they were
// posted, so each wait knows the peer of its message. Gloo's algorithms count completions and rely
// on their order only for messages of the same peer. The transport preserves that order.
class GuardedBuffer : public gloo::transport::UnboundBuffer {
 public:
  GuardedBuffer(
      std::shared_ptr<gloo::transport::Context> transport,
      std::shared_ptr<Registry> registry,
      std::shared_ptr<Watch> watch,
      void* ptr,
      size_t size);
  ~GuardedBuffer() override;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override;
  void abortWaitSend() override;
  void send(int dstRank, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(int srcRank, uint64_t slot, size_t offset, size_t nbytes) override;
  void recv(std::vector<int> srcRanks, uint64_t slot, size_t offset, size_t nbytes) override;

 private:
  struct Posted {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    int peer;
  };

  enum class Direction { kSend, kRecv };

  gloo::transport::UnboundBuffer* post(Direction direction, int peer, size_t offset, size_t nbytes);
  bool wait(Direction direction, int* rank, std::chrono::milliseconds timeout);
  size_t length(size_t offset, size_t nbytes) const;

  const std::shared_ptr<gloo::transport::Context> transport_;
  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<Watch> watch_;
  // Protects the two queues. Only the operation's thread changes them; an abort reads them.
  std::mutex mutex_;
  std::deque<Posted> sends_;
  std::deque<Posted> recvs_;
};

// Wraps the transport's context and creates guarded buffers instead of the transport's buffers.
class GuardedContext : public gloo::transport::Context {
 public:
  GuardedContext(
      std::shared_ptr<gloo::transport::Context> inner,
      std::shared_ptr<Registry> registry);

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override;
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override;
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr, size_t size)
      override;

 private:
  const std::shared_ptr<gloo::transport::Context> inner_;
  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<Watch> watch_;
};

} // namespace fusewire_gloo
