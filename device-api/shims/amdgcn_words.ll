; Words of global memory with an order and a scope, for amdgcn-amd-amdhsa. In a name, `load_64_acquire_agent`
; is operation, bits, order, scope; no scope means the system. Signatures match `src/mem/amdgcn.rs`.

target triple = "amdgcn-amd-amdhsa"

define i32 @fusewire_load_32_relaxed(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g monotonic, align 4
  ret i32 %r
}

define i32 @fusewire_load_32_acquire(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g acquire, align 4
  ret i32 %r
}

define void @fusewire_store_32_relaxed(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g monotonic, align 4
  ret void
}

define void @fusewire_store_32_release(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g release, align 4
  ret void
}

define i32 @fusewire_add_32_relaxed(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value monotonic
  ret i32 %r
}

define i32 @fusewire_add_32_acq_rel(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value acq_rel
  ret i32 %r
}

define i32 @fusewire_add_32_acquire(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value acquire
  ret i32 %r
}

define i32 @fusewire_add_32_release(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value release
  ret i32 %r
}

define i32 @fusewire_exchange_32_relaxed(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value monotonic
  ret i32 %r
}

define i32 @fusewire_exchange_32_acq_rel(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value acq_rel
  ret i32 %r
}

define i32 @fusewire_exchange_32_acquire(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value acquire
  ret i32 %r
}

define i32 @fusewire_exchange_32_release(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value release
  ret i32 %r
}

define i32 @fusewire_cas_32_relaxed(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new monotonic monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acq_rel(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new acq_rel acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acquire(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new acquire acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_release(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new release monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_load_32_relaxed_agent(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g syncscope("agent") monotonic, align 4
  ret i32 %r
}

define i32 @fusewire_load_32_acquire_agent(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g syncscope("agent") acquire, align 4
  ret i32 %r
}

define void @fusewire_store_32_relaxed_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g syncscope("agent") monotonic, align 4
  ret void
}

define void @fusewire_store_32_release_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g syncscope("agent") release, align 4
  ret void
}

define i32 @fusewire_add_32_relaxed_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("agent") monotonic
  ret i32 %r
}

define i32 @fusewire_add_32_acq_rel_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("agent") acq_rel
  ret i32 %r
}

define i32 @fusewire_add_32_acquire_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("agent") acquire
  ret i32 %r
}

define i32 @fusewire_add_32_release_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("agent") release
  ret i32 %r
}

define i32 @fusewire_exchange_32_relaxed_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("agent") monotonic
  ret i32 %r
}

define i32 @fusewire_exchange_32_acq_rel_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("agent") acq_rel
  ret i32 %r
}

define i32 @fusewire_exchange_32_acquire_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("agent") acquire
  ret i32 %r
}

define i32 @fusewire_exchange_32_release_agent(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("agent") release
  ret i32 %r
}

define i32 @fusewire_cas_32_relaxed_agent(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("agent") monotonic monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acq_rel_agent(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("agent") acq_rel acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acquire_agent(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("agent") acquire acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_release_agent(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("agent") release monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_load_32_relaxed_workgroup(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g syncscope("workgroup") monotonic, align 4
  ret i32 %r
}

define i32 @fusewire_load_32_acquire_workgroup(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i32, ptr addrspace(1) %g syncscope("workgroup") acquire, align 4
  ret i32 %r
}

define void @fusewire_store_32_relaxed_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g syncscope("workgroup") monotonic, align 4
  ret void
}

define void @fusewire_store_32_release_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i32 %value, ptr addrspace(1) %g syncscope("workgroup") release, align 4
  ret void
}

define i32 @fusewire_add_32_relaxed_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("workgroup") monotonic
  ret i32 %r
}

define i32 @fusewire_add_32_acq_rel_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("workgroup") acq_rel
  ret i32 %r
}

define i32 @fusewire_add_32_acquire_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("workgroup") acquire
  ret i32 %r
}

define i32 @fusewire_add_32_release_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i32 %value syncscope("workgroup") release
  ret i32 %r
}

define i32 @fusewire_exchange_32_relaxed_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("workgroup") monotonic
  ret i32 %r
}

define i32 @fusewire_exchange_32_acq_rel_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("workgroup") acq_rel
  ret i32 %r
}

define i32 @fusewire_exchange_32_acquire_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("workgroup") acquire
  ret i32 %r
}

define i32 @fusewire_exchange_32_release_workgroup(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i32 %value syncscope("workgroup") release
  ret i32 %r
}

define i32 @fusewire_cas_32_relaxed_workgroup(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("workgroup") monotonic monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acq_rel_workgroup(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("workgroup") acq_rel acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_acquire_workgroup(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("workgroup") acquire acquire
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i32 @fusewire_cas_32_release_workgroup(ptr %at, i32 %expected, i32 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i32 %expected, i32 %new syncscope("workgroup") release monotonic
  %r = extractvalue { i32, i1 } %p, 0
  ret i32 %r
}

define i64 @fusewire_load_64_relaxed(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g monotonic, align 8
  ret i64 %r
}

define i64 @fusewire_load_64_acquire(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g acquire, align 8
  ret i64 %r
}

define void @fusewire_store_64_relaxed(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g monotonic, align 8
  ret void
}

define void @fusewire_store_64_release(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g release, align 8
  ret void
}

define i64 @fusewire_add_64_relaxed(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value monotonic
  ret i64 %r
}

define i64 @fusewire_add_64_acq_rel(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value acq_rel
  ret i64 %r
}

define i64 @fusewire_add_64_acquire(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value acquire
  ret i64 %r
}

define i64 @fusewire_add_64_release(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value release
  ret i64 %r
}

define i64 @fusewire_exchange_64_relaxed(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value monotonic
  ret i64 %r
}

define i64 @fusewire_exchange_64_acq_rel(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value acq_rel
  ret i64 %r
}

define i64 @fusewire_exchange_64_acquire(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value acquire
  ret i64 %r
}

define i64 @fusewire_exchange_64_release(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value release
  ret i64 %r
}

define i64 @fusewire_cas_64_relaxed(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new monotonic monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acq_rel(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new acq_rel acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acquire(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new acquire acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_release(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new release monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_load_64_relaxed_agent(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g syncscope("agent") monotonic, align 8
  ret i64 %r
}

define i64 @fusewire_load_64_acquire_agent(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g syncscope("agent") acquire, align 8
  ret i64 %r
}

define void @fusewire_store_64_relaxed_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g syncscope("agent") monotonic, align 8
  ret void
}

define void @fusewire_store_64_release_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g syncscope("agent") release, align 8
  ret void
}

define i64 @fusewire_add_64_relaxed_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("agent") monotonic
  ret i64 %r
}

define i64 @fusewire_add_64_acq_rel_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("agent") acq_rel
  ret i64 %r
}

define i64 @fusewire_add_64_acquire_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("agent") acquire
  ret i64 %r
}

define i64 @fusewire_add_64_release_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("agent") release
  ret i64 %r
}

define i64 @fusewire_exchange_64_relaxed_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("agent") monotonic
  ret i64 %r
}

define i64 @fusewire_exchange_64_acq_rel_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("agent") acq_rel
  ret i64 %r
}

define i64 @fusewire_exchange_64_acquire_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("agent") acquire
  ret i64 %r
}

define i64 @fusewire_exchange_64_release_agent(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("agent") release
  ret i64 %r
}

define i64 @fusewire_cas_64_relaxed_agent(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("agent") monotonic monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acq_rel_agent(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("agent") acq_rel acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acquire_agent(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("agent") acquire acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_release_agent(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("agent") release monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_load_64_relaxed_workgroup(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g syncscope("workgroup") monotonic, align 8
  ret i64 %r
}

define i64 @fusewire_load_64_acquire_workgroup(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load atomic i64, ptr addrspace(1) %g syncscope("workgroup") acquire, align 8
  ret i64 %r
}

define void @fusewire_store_64_relaxed_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g syncscope("workgroup") monotonic, align 8
  ret void
}

define void @fusewire_store_64_release_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store atomic i64 %value, ptr addrspace(1) %g syncscope("workgroup") release, align 8
  ret void
}

define i64 @fusewire_add_64_relaxed_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("workgroup") monotonic
  ret i64 %r
}

define i64 @fusewire_add_64_acq_rel_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("workgroup") acq_rel
  ret i64 %r
}

define i64 @fusewire_add_64_acquire_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("workgroup") acquire
  ret i64 %r
}

define i64 @fusewire_add_64_release_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw add ptr addrspace(1) %g, i64 %value syncscope("workgroup") release
  ret i64 %r
}

define i64 @fusewire_exchange_64_relaxed_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("workgroup") monotonic
  ret i64 %r
}

define i64 @fusewire_exchange_64_acq_rel_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("workgroup") acq_rel
  ret i64 %r
}

define i64 @fusewire_exchange_64_acquire_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("workgroup") acquire
  ret i64 %r
}

define i64 @fusewire_exchange_64_release_workgroup(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = atomicrmw xchg ptr addrspace(1) %g, i64 %value syncscope("workgroup") release
  ret i64 %r
}

define i64 @fusewire_cas_64_relaxed_workgroup(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("workgroup") monotonic monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acq_rel_workgroup(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("workgroup") acq_rel acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_acquire_workgroup(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("workgroup") acquire acquire
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define i64 @fusewire_cas_64_release_workgroup(ptr %at, i64 %expected, i64 %new) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = cmpxchg ptr addrspace(1) %g, i64 %expected, i64 %new syncscope("workgroup") release monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define void @fusewire_fence_acquire() #0 {
  fence acquire
  ret void
}

define void @fusewire_fence_acquire_agent() #0 {
  fence syncscope("agent") acquire
  ret void
}

define void @fusewire_fence_acquire_workgroup() #0 {
  fence syncscope("workgroup") acquire
  ret void
}

define void @fusewire_fence_release() #0 {
  fence release
  ret void
}

define void @fusewire_fence_release_agent() #0 {
  fence syncscope("agent") release
  ret void
}

define void @fusewire_fence_release_workgroup() #0 {
  fence syncscope("workgroup") release
  ret void
}

define void @fusewire_fence_acq_rel() #0 {
  fence acq_rel
  ret void
}

define void @fusewire_fence_acq_rel_agent() #0 {
  fence syncscope("agent") acq_rel
  ret void
}

define void @fusewire_fence_acq_rel_workgroup() #0 {
  fence syncscope("workgroup") acq_rel
  ret void
}

; Waits until the wave's accesses to global memory are complete: vmcnt(0), and no limit for the other
; counters. LLVM omits this wait from the release of a block, because the waves of a block see their
; stores in order. The fence keeps stores from moving behind the wait.
declare void @llvm.amdgcn.s.waitcnt(i32 immarg) #1

define void @fusewire_complete() #0 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.waitcnt(i32 3952)
  ret void
}

attributes #0 = { alwaysinline nounwind }
attributes #1 = { nounwind }
