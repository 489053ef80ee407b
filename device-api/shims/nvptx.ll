; What Rust cannot say on nvptx64-nvidia-cuda: convergent operations, block-shared memory, and
; payload accesses in the global address space. Linked into every kernel image by fusewire-build;
; every function is inlined. Signatures match `src/arch/gpu.rs`, `src/arch/nvptx.rs` and
; `src/mem/gpu.rs`.

target triple = "nvptx64-nvidia-cuda"

; Block-shared scratch memory: SHARED_BYTES of src/arch/mod.rs. Present in an image only where a
; kernel uses it.
@fusewire_shared_memory = internal addrspace(3) global [39936 x i8] undef, align 128

; Replaces 0 by 1 in a word of the block-shared memory; returns the word as it was.
define i64 @fusewire_shared_claim(ptr %at) #0 {
  %s = addrspacecast ptr %at to ptr addrspace(3)
  %r = call i64 asm sideeffect "atom.relaxed.cta.shared.cas.b64 $0, [$1], 0, 1;", "=l,l,~{memory}"(ptr addrspace(3) %s)
  ret i64 %r
}

define ptr @fusewire_shared() #0 {
  ret ptr addrspacecast (ptr addrspace(3) @fusewire_shared_memory to ptr)
}

; ---- identity

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()

define i32 @fusewire_lane() #0 {
  %r = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  ret i32 %r
}

define i32 @fusewire_lanes() #0 {
  %r = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  ret i32 %r
}

define i32 @fusewire_block() #0 {
  %r = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  ret i32 %r
}

define i32 @fusewire_blocks() #0 {
  %r = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
  ret i32 %r
}

; ---- synchronisation: convergent

declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32) #1
declare i1 @llvm.nvvm.barrier.cta.red.or.aligned.all(i32, i1) #1
declare void @llvm.nvvm.bar.warp.sync(i32) #1
declare i32 @llvm.nvvm.vote.ballot.sync(i32, i1) #1
declare i32 @llvm.nvvm.match.any.sync.i32(i32, i32) #1
declare i32 @llvm.nvvm.match.any.sync.i64(i32, i64) #1
declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32) #1
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32) #1

define void @fusewire_sync() #2 {
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  ret void
}

define void @fusewire_sync_warp() #2 {
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret void
}

define i32 @fusewire_any(i32 %value) #2 {
  %vote = icmp ne i32 %value, 0
  %any = call i1 @llvm.nvvm.barrier.cta.red.or.aligned.all(i32 0, i1 %vote)
  %r = zext i1 %any to i32
  ret i32 %r
}

define i64 @fusewire_ballot(i32 %value) #2 {
  %vote = icmp ne i32 %value, 0
  %votes = call i32 @llvm.nvvm.vote.ballot.sync(i32 -1, i1 %vote)
  %r = zext i32 %votes to i64
  ret i64 %r
}

define i64 @fusewire_match_any_32(i32 %value) #2 {
  %lanes = call i32 @llvm.nvvm.match.any.sync.i32(i32 -1, i32 %value)
  %r = zext i32 %lanes to i64
  ret i64 %r
}

define i64 @fusewire_match_any_64(i64 %value) #2 {
  %lanes = call i32 @llvm.nvvm.match.any.sync.i64(i32 -1, i64 %value)
  %r = zext i32 %lanes to i64
  ret i64 %r
}

define i32 @fusewire_shuffle(i32 %value, i32 %from) #2 {
  %r = call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 %value, i32 %from, i32 31)
  ret i32 %r
}

define i32 @fusewire_shuffle_xor(i32 %value, i32 %mask) #2 {
  %r = call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 %value, i32 %mask, i32 31)
  ret i32 %r
}

; ---- time, and the end of it

define i64 @fusewire_clock_ns() #0 {
  %r = call i64 asm sideeffect "mov.u64 $0, %globaltimer;", "=l"()
  ret i64 %r
}

define void @fusewire_nap(i32 %ns) #0 {
  call void asm sideeffect "nanosleep.u32 $0;", "r"(i32 %ns)
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

; Passes by the first-level cache.
define i128 @fusewire_read_streaming(ptr %at) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %s = call { i64, i64 } asm sideeffect "ld.global.L1::no_allocate.v2.b64 {$0, $1}, [$2];", "=l,=l,l"(ptr addrspace(1) %g) #4
  %low = extractvalue { i64, i64 } %s, 0
  %high = extractvalue { i64, i64 } %s, 1
  %v0 = insertelement <2 x i64> poison, i64 %low, i32 0
  %v1 = insertelement <2 x i64> %v0, i64 %high, i32 1
  %r = bitcast <2 x i64> %v1 to i128
  ret i128 %r
}

define void @fusewire_write_streaming(ptr %at, i128 %value) #0 {
  %g = addrspacecast ptr %at to ptr addrspace(1)
  %v = bitcast i128 %value to <2 x i64>
  %low = extractelement <2 x i64> %v, i32 0
  %high = extractelement <2 x i64> %v, i32 1
  call void asm sideeffect "st.global.L1::no_allocate.v2.b64 [$0], {$1, $2};", "l,l,l,~{memory}"(ptr addrspace(1) %g, i64 %low, i64 %high)
  ret void
}

attributes #0 = { alwaysinline nounwind }
attributes #1 = { convergent nounwind }
attributes #2 = { alwaysinline convergent nounwind }
attributes #3 = { cold noinline noreturn nounwind }
attributes #4 = { nounwind memory(read) }
