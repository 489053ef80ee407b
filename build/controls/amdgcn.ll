; Device functions that the verifier's negative controls call (device.rs), for AMD.

target triple = "amdgcn-amd-amdhsa"

@control_memory = internal addrspace(3) global [64 x i32] poison, align 16

declare i32 @llvm.amdgcn.workitem.id.x()
declare void @llvm.amdgcn.s.barrier() #1
declare float @llvm.amdgcn.rcp.f32(float)
declare void @llvm.trap()

define i32 @control_lane() #0 {
  %r = call i32 @llvm.amdgcn.workitem.id.x()
  ret i32 %r
}

define void @control_barrier() #2 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret void
}

define ptr @control_shared() #0 {
  ret ptr addrspacecast (ptr addrspace(3) @control_memory to ptr)
}

define float @control_reciprocal(float %value) #0 {
  %r = call float @llvm.amdgcn.rcp.f32(float %value)
  ret float %r
}

define i32 @control_narrow_load(ptr %at) #0 {
  %r = load atomic i32, ptr %at syncscope("agent") acquire, align 4
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
