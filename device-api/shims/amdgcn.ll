; What Rust cannot say on amdgcn-amd-amdhsa: convergent operations, block-shared memory, scopes
; narrower than the system, and accesses in the global address space. Linked into every kernel image
; by fusewire-build; every function is inlined. Signatures match `src/arch/gpu.rs`,
; `src/mem/gpu.rs` and `src/mem/amdgcn.rs`.

target triple = "amdgcn-amd-amdhsa"

; Block-shared scratch memory: SHARED_BYTES of src/arch/mod.rs. Present in an image only where a
; kernel uses it.
@fusewire_shared_memory = internal addrspace(3) global [39936 x i8] poison, align 128
; One word a wave, for votes of a block.
@fusewire_votes = internal addrspace(3) global [16 x i32] poison, align 4

; Replaces 0 by 1 in a word of the block-shared memory; returns the word as it was.
define i64 @fusewire_shared_claim(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %p = cmpxchg ptr addrspace(3) %s, i64 0, i64 1 syncscope("workgroup") monotonic monotonic
  %r = extractvalue { i64, i1 } %p, 0
  ret i64 %r
}

define ptr @fusewire_shared() #0 {
  ret ptr addrspacecast (ptr addrspace(3) @fusewire_shared_memory to ptr)
}

; ---- identity; launch sizes come from the implicit arguments (code object version 5 and later)

declare i32 @llvm.amdgcn.workitem.id.x()
declare i32 @llvm.amdgcn.workgroup.id.x()
declare ptr addrspace(4) @llvm.amdgcn.implicitarg.ptr()

define i32 @fusewire_lane() #0 {
  %r = call i32 @llvm.amdgcn.workitem.id.x()
  ret i32 %r
}

define i32 @fusewire_lanes() #0 {
  %implicit = call ptr addrspace(4) @llvm.amdgcn.implicitarg.ptr()
  %at = getelementptr i8, ptr addrspace(4) %implicit, i64 12
  %size = load i16, ptr addrspace(4) %at, align 4, !invariant.load !0
  %r = zext i16 %size to i32
  ret i32 %r
}

define i32 @fusewire_block() #0 {
  %r = call i32 @llvm.amdgcn.workgroup.id.x()
  ret i32 %r
}

define i32 @fusewire_blocks() #0 {
  %implicit = call ptr addrspace(4) @llvm.amdgcn.implicitarg.ptr()
  %r = load i32, ptr addrspace(4) %implicit, align 8, !invariant.load !0
  ret i32 %r
}

; ---- synchronisation: convergent

declare void @llvm.amdgcn.s.barrier() #1
declare void @llvm.amdgcn.wave.barrier() #1
declare i64 @llvm.amdgcn.ballot.i64(i1) #1
declare i32 @llvm.amdgcn.ds.bpermute(i32, i32) #1
declare i32 @llvm.amdgcn.mbcnt.lo(i32, i32)
declare i32 @llvm.amdgcn.mbcnt.hi(i32, i32)

define void @fusewire_sync() #2 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret void
}

define void @fusewire_sync_warp() #2 {
  fence syncscope("wavefront") release
  call void @llvm.amdgcn.wave.barrier()
  fence syncscope("wavefront") acquire
  ret void
}

define i64 @fusewire_ballot(i32 %value) #2 {
  %vote = icmp ne i32 %value, 0
  %r = call i64 @llvm.amdgcn.ballot.i64(i1 %vote)
  ret i64 %r
}

; A word a wave, a barrier, all words, a barrier.
define i32 @fusewire_any(i32 %value) #2 {
entry:
  %vote = icmp ne i32 %value, 0
  %votes = call i64 @llvm.amdgcn.ballot.i64(i1 %vote)
  %wave.any = icmp ne i64 %votes, 0
  %word = zext i1 %wave.any to i32
  %lane = call i32 @llvm.amdgcn.workitem.id.x()
  %wave = lshr i32 %lane, 6
  %own = getelementptr i32, ptr addrspace(3) @fusewire_votes, i32 %wave
  store i32 %word, ptr addrspace(3) %own, align 4
  call void @fusewire_sync()
  %lanes = call i32 @fusewire_lanes()
  %rounded = add i32 %lanes, 63
  %waves = lshr i32 %rounded, 6
  br label %loop

loop:
  %index = phi i32 [ 0, %entry ], [ %next, %loop ]
  %acc = phi i32 [ 0, %entry ], [ %or, %loop ]
  %at = getelementptr i32, ptr addrspace(3) @fusewire_votes, i32 %index
  %seen = load i32, ptr addrspace(3) %at, align 4
  %or = or i32 %acc, %seen
  %next = add i32 %index, 1
  %more = icmp ult i32 %next, %waves
  br i1 %more, label %loop, label %exit

exit:
  call void @fusewire_sync()
  %r = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %or)
  ret i32 %r
}

declare i32 @llvm.amdgcn.readfirstlane.i32(i32) #1

define i32 @fusewire_shuffle(i32 %value, i32 %from) #2 {
  %byte = shl i32 %from, 2
  %r = call i32 @llvm.amdgcn.ds.bpermute(i32 %byte, i32 %value)
  ret i32 %r
}

define i32 @fusewire_shuffle_xor(i32 %value, i32 %mask) #2 {
  %low = call i32 @llvm.amdgcn.mbcnt.lo(i32 -1, i32 0)
  %lane = call i32 @llvm.amdgcn.mbcnt.hi(i32 -1, i32 %low)
  %from = xor i32 %lane, %mask
  %byte = shl i32 %from, 2
  %r = call i32 @llvm.amdgcn.ds.bpermute(i32 %byte, i32 %value)
  ret i32 %r
}

; ---- time, and the end of it

declare i64 @llvm.amdgcn.s.memrealtime()
declare void @llvm.amdgcn.s.sleep(i32 immarg)

; The constant clock counts 10 ns on gfx90a and gfx942.
define i64 @fusewire_clock_ns() #0 {
  %ticks = call i64 @llvm.amdgcn.s.memrealtime()
  %r = mul i64 %ticks, 10
  ret i64 %r
}

; s_sleep takes a constant, in units of 64 cycles (about 35 ns): short, or the longest.
define void @fusewire_nap(i32 %ns) #0 {
  %long = icmp ugt i32 %ns, 1000
  br i1 %long, label %longest, label %short

longest:
  call void @llvm.amdgcn.s.sleep(i32 127)
  ret void

short:
  call void @llvm.amdgcn.s.sleep(i32 4)
  ret void
}

declare void @llvm.trap()

; Not inlined, so that the verifier sees in the image which kernel can reach it.
define void @fusewire_panic() #3 {
  call void @llvm.trap()
  unreachable
}

; ---- arithmetic: correctly rounded, because it carries no fast-math flag

declare float @llvm.sqrt.f32(float)

define float @fusewire_sqrt_f32(float %value) #0 {
  %r = call float @llvm.sqrt.f32(float %value)
  ret float %r
}

; ---- block-shared memory: plain. A read of memory that no lane has written, or that another lane
; writes meanwhile, has some value: `freeze`.

define i8 @fusewire_shared_read_8(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %v = load i8, ptr addrspace(3) %s, align 1
  %r = freeze i8 %v
  ret i8 %r
}

define i16 @fusewire_shared_read_16(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %v = load i16, ptr addrspace(3) %s, align 2
  %r = freeze i16 %v
  ret i16 %r
}

define i32 @fusewire_shared_read_32(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %v = load i32, ptr addrspace(3) %s, align 4
  %r = freeze i32 %v
  ret i32 %r
}

define i64 @fusewire_shared_read_64(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %v = load i64, ptr addrspace(3) %s, align 8
  %r = freeze i64 %v
  ret i64 %r
}

define void @fusewire_shared_write_8(ptr %at, i8 %value) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  store i8 %value, ptr addrspace(3) %s, align 1
  ret void
}

define void @fusewire_shared_write_16(ptr %at, i16 %value) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  store i16 %value, ptr addrspace(3) %s, align 2
  ret void
}

define void @fusewire_shared_write_32(ptr %at, i32 %value) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  store i32 %value, ptr addrspace(3) %s, align 4
  ret void
}

define void @fusewire_shared_write_64(ptr %at, i64 %value) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  store i64 %value, ptr addrspace(3) %s, align 8
  ret void
}

; ---- payload: global memory, plain

; A pointer into global memory that lies in global memory; both address spaces are stated for the optimiser.
define ptr @fusewire_read_pointer(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %p = load ptr addrspace(1), ptr addrspace(1) %g, align 8
  %r = addrspacecast ptr addrspace(1) %p to ptr
  ret ptr %r
}

define i8 @fusewire_read_8(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load i8, ptr addrspace(1) %g, align 1
  ret i8 %r
}

define i16 @fusewire_read_16(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load i16, ptr addrspace(1) %g, align 2
  ret i16 %r
}

define i32 @fusewire_read_32(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load i32, ptr addrspace(1) %g, align 4
  ret i32 %r
}

define i64 @fusewire_read_64(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %r = load i64, ptr addrspace(1) %g, align 8
  ret i64 %r
}

define i128 @fusewire_read_128(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %v = load <4 x i32>, ptr addrspace(1) %g, align 16
  %r = bitcast <4 x i32> %v to i128
  ret i128 %r
}

define void @fusewire_write_8(ptr %at, i8 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store i8 %value, ptr addrspace(1) %g, align 1
  ret void
}

define void @fusewire_write_16(ptr %at, i16 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store i16 %value, ptr addrspace(1) %g, align 2
  ret void
}

define void @fusewire_write_32(ptr %at, i32 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store i32 %value, ptr addrspace(1) %g, align 4
  ret void
}

define void @fusewire_write_64(ptr %at, i64 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  store i64 %value, ptr addrspace(1) %g, align 8
  ret void
}

define void @fusewire_write_128(ptr %at, i128 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %v = bitcast i128 %value to <4 x i32>
  store <4 x i32> %v, ptr addrspace(1) %g, align 16
  ret void
}

; Passes by the caches.
define i128 @fusewire_read_streaming(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %v = load <4 x i32>, ptr addrspace(1) %g, align 16, !nontemporal !1
  %r = bitcast <4 x i32> %v to i128
  ret i128 %r
}

define void @fusewire_write_streaming(ptr %at, i128 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %v = bitcast i128 %value to <4 x i32>
  store <4 x i32> %v, ptr addrspace(1) %g, align 16, !nontemporal !1
  ret void
}

; ---- packets: two words of global memory, each with its own flag, so that two atomic loads
; suffice. LLVM waits after every volatile load; it waits for these only where they are used.

define i128 @fusewire_load_packets(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %h = getelementptr i64, ptr addrspace(1) %g, i64 1
  %low = load atomic i64, ptr addrspace(1) %g monotonic, align 8
  %high = load atomic i64, ptr addrspace(1) %h monotonic, align 8
  %l = zext i64 %low to i128
  %z = zext i64 %high to i128
  %s = shl i128 %z, 64
  %r = or i128 %s, %l
  ret i128 %r
}

attributes #0 = { alwaysinline nounwind }
attributes #1 = { convergent nounwind }
attributes #2 = { alwaysinline convergent nounwind }
attributes #3 = { cold noinline noreturn nounwind }

!0 = !{}
!1 = !{i32 1}
