// Interface to Rust: one class with a method for each operation. Every exception that Gloo or this
// layer throws is converted to a Rust error; no exception leaves the class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <gloo/rendezvous/context.h>

#include "fusewire-gloo-sys/cpp/guard.h"
#include "rust/cxx.h"

namespace fusewire_gloo {

struct Call;
struct Message;
struct StoreBox;

// Formats kind, peer and message of an exception as one line, which Rust parses.
std::string describe(const std::exception& error) noexcept;

class MeshContext : public gloo::rendezvous::Context {
 public:
  MeshContext(int rank, int size) : gloo::rendezvous::Context(rank, size) {}
  void guard(std::shared_ptr<Registry> registry);
};

class Bridge {
 public:
  Bridge(std::shared_ptr<MeshContext> context, std::shared_ptr<Registry> registry);

  void allreduce(
      const uint8_t* input,
      uint8_t* output,
      size_t count,
      size_t element,
      uint8_t dtype,
      uint8_t op,
      const Call& call) const;
  void reduce(
      const uint8_t* input,
      uint8_t* output,
      size_t count,
      size_t element,
      uint8_t dtype,
      uint8_t op,
      int32_t root,
      const Call& call) const;
  void allgather(uint8_t* output, size_t bytes, const Call& call) const;
  void allgatherv(uint8_t* output, rust::Slice<const size_t> counts, const Call& call) const;
  void alltoall(const uint8_t* input, uint8_t* output, size_t bytes, const Call& call) const;
  void alltoallv(
      const uint8_t* input,
      rust::Slice<const int64_t> sent,
      uint8_t* output,
      rust::Slice<const int64_t> received,
      const Call& call) const;
  void broadcast(uint8_t* buffer, size_t bytes, int32_t root, const Call& call) const;
  void scatter(
      const uint8_t* input,
      uint8_t* output,
      size_t bytes,
      int32_t root,
      const Call& call) const;
  void gather(
      const uint8_t* input,
      uint8_t* output,
      size_t bytes,
      int32_t root,
      const Call& call) const;
  void barrier(const Call& call) const;
  void batch(rust::Slice<const Message> messages, uint8_t prefix, const Call& call) const;
  void abort() const;

 private:
  template <typename Operation>
  void run(const Call& call, Operation&& operation) const;

  const std::shared_ptr<MeshContext> context_;
  const std::shared_ptr<Registry> registry_;
};

std::unique_ptr<Bridge> connect(
    int32_t rank,
    int32_t size,
    uint64_t timeout_ms,
    uint8_t kind,
    rust::Str target,
    const StoreBox& store);

} // namespace fusewire_gloo

namespace rust {
namespace behavior {

// Replaces cxx's default conversion of exceptions. Keeps the kind of a failure, and also catches
// objects that are not derived from std::exception.
template <typename Try, typename Fail>
static void trycatch(Try&& func, Fail&& fail) noexcept {
  try {
    func();
  } catch (const std::exception& error) {
    fail(fusewire_gloo::describe(error));
  } catch (...) {
    fail("I-1|an exception of an unknown type");
  }
}

} // namespace behavior
} // namespace rust
