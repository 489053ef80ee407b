; Device functions that the verifier's negative controls call (device.rs), for NVIDIA.

target triple = "nvptx64-nvidia-cuda"

@control_memory = internal addrspace(3) global [64 x i32] undef, align 16

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32) #1
declare float @llvm.nvvm.rcp.approx.ftz.f(float)
declare void @llvm.trap()

define i32 @control_lane() #0 {
  %r = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  ret i32 %r
}

define void @control_barrier() #2 {
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  ret void
}

define ptr @control_shared() #0 {
  ret ptr addrspacecast (ptr addrspace(3) @control_memory to ptr)
}

define float @control_reciprocal(float %value) #0 {
  %r = call float @llvm.nvvm.rcp.approx.ftz.f(float %value)
  ret float %r
}

define i32 @control_narrow_load(ptr %at) #0 {
  %r = load atomic i32, ptr %at syncscope("device") acquire, align 4
  ret i32 %r
}

define void @fusewire_panic() #3 {
  call void @llvm.trap()
  unreachable
}

attributes #0 = { alwaysinline nounwind }
attributes #1 = { convergent nounwind }
attributes #2 = { alwaysinline convergent nounwind }
attributes #3 = { cold noinline noreturn nounwind }
